"""One program, in the engine's process or against a server: drafts, a critic, and a last word.

    python examples/over_http.py [--model demo] [--n 4]
    python examples/over_http.py --url http://127.0.0.1:8000 [--api-key KEY] [--n 4]

A question is answered several times over, by tasks of one event loop. Each draft is read by the
model as its own critic; the best goes on. `program` does not know where the model is: branches,
blocks and scores live where the engine does, and what one line asks for goes there in one list.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

QUESTION = """\
A teacher answers children's questions in one short sentence.

Question: Why is the sea salty?
Answer: Rivers carry a little salt from the rocks to the sea, and it stays there.

Question: Why do leaves turn yellow in autumn?
Answer:"""
CRITIC = "\nA scientist reads the answer and says:"


async def draft(branch: Any, seed: int) -> float:
    """Write an answer, and say how well the critic likes it."""
    pieces = [
        piece
        async for piece in branch.generate(max_tokens=32, temperature=0.8, seed=seed, stop="\n")
    ]
    assert "".join(pieces) == branch.generated
    (critic,) = branch.fork(1)
    critic.append(CRITIC)
    yes, no = await asyncio.gather(critic.score(" That is right."), critic.score(" That is wrong."))
    critic.close()
    return float(yes.mean - no.mean)


async def program(context: Any, number: int) -> str:
    """The best of some drafts, and the word that the model sums it up by."""
    drafts = context.fork(number)
    liked = await asyncio.gather(*(draft(branch, seed) for seed, branch in enumerate(drafts)))
    score = dict(zip(drafts, liked, strict=True))
    for branch in drafts:
        print(f"{score[branch]:6.2f}  {branch.generated.strip()}")
    best = context.join(drafts, by=score.__getitem__)
    print(f"best: {best.generated.strip()}")
    place = context.checkpoint()
    context.append("\nThe teacher is")
    choice = await context.choose([" pleased.", " puzzled.", " asleep."])
    context.rollback(place)
    context.append("\nIn one word:")
    word = await context.generate(max_tokens=4, temperature=0, stop="\n")
    print(f"the teacher is{choice.text} In one word:{word.text}")
    return str(context.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--url")
    parser.add_argument("--api-key")
    parser.add_argument("--n", type=int, default=4)
    arguments = parser.parse_args()
    host: Any
    if arguments.url:
        from radixkv.client import Client

        host = Client(arguments.url, api_key=arguments.api_key)
    else:
        from radixkv import LLM

        host = LLM(arguments.model, dtype="bfloat16")
    with host, host.context(QUESTION) as context:
        asyncio.run(program(context, arguments.n))
        print(f"{len(context)} tokens; {context.stats}")


if __name__ == "__main__":
    main()
