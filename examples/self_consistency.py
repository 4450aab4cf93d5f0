"""Self-consistency: reason several times, take the answer that most chains end with.

    python examples/self_consistency.py [--model demo] [--chains 8]

After Wang et al., "Self-Consistency Improves Chain of Thought Reasoning" (2022). The chains are
tasks of one event loop: each asks for its answer when its reasoning is done, and all share the
engine's steps.
"""

from __future__ import annotations

import argparse
import asyncio
import re

from radixkv import LLM, Context, majority

EXAMPLES = """\
Question: Tom has 3 apples and buys 4 more. He eats 2. How many are left?
Reasoning: 3 and 4 make 7. 7 minus 2 is 5.
Answer: 5

Question: A box holds 6 pens. How many pens are in 3 boxes, if one pen is lost?
Reasoning: 3 boxes of 6 pens are 18 pens. 18 minus 1 is 17.
Answer: 17

Question: Anna reads 10 pages a day. The book has 50 pages. How many days does she need?
Reasoning: 50 divided by 10 is 5.
Answer: 5

"""
QUESTION = "Question: Ben has 5 coins. He finds 6 more and gives 3 away. How many does he have?\n"


def answer_of(chain: Context) -> str | None:
    """The number behind the last "Answer:"; None if there is none."""
    found = re.search(r"\d+", chain.text.rpartition("Answer:")[2])
    return found.group() if found else None


async def reason(chain: Context) -> None:
    await chain.generate(max_tokens=40, temperature=0.8, stop="\n")
    chain.append("\nAnswer:")
    await chain.generate(max_tokens=4, temperature=0, stop="\n")


async def program(llm: LLM, chains: int) -> None:
    with llm.context(EXAMPLES + QUESTION + "Reasoning:") as context:
        prompt = len(context)
        branches = context.fork(chains)
        await asyncio.gather(*map(reason, branches))
        for branch in branches:
            print(f"{answer_of(branch)!s:>5}  {branch.generated.strip()!r}")
        stats = branches[0].stats
        best = context.join(branches, by=majority(answer_of))
        print(f"\nmost chains say {answer_of(best)}")
    engine = llm.stats().engine
    print(f"a chain shared {stats.shared_blocks} blocks and had {stats.own_blocks} of its own")
    print(f"prefilled: {engine.prefilled_tokens} tokens, in place of {chains * prompt} for prompts")
    print(f"steps: {engine.steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--chains", type=int, default=8)
    arguments = parser.parse_args()
    with LLM(arguments.model, dtype="bfloat16", seed=3) as llm:
        asyncio.run(program(llm, arguments.chains))


if __name__ == "__main__":
    main()
