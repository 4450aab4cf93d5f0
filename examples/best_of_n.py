"""Best of n: draft an answer several times, go on from the likeliest draft.

    python examples/best_of_n.py [--model demo] [--n 4]

The question is computed once, the drafts share its blocks and run in one batch; the winner's
blocks become the context's own, and the losers' are the first to be evicted.
"""

from __future__ import annotations

import argparse

from radixkv import LLM

QUESTION = [
    {"role": "system", "content": "You are careful. You answer in one or two short sentences."},
    {"role": "user", "content": "Why do leaves turn yellow and red in autumn?"},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--n", type=int, default=4)
    arguments = parser.parse_args()
    with LLM(arguments.model, dtype="bfloat16", seed=1) as llm, llm.context(QUESTION) as context:
        prompt = len(context)
        drafts = context.fork(arguments.n)
        llm.run([draft.generate(max_tokens=60, temperature=0.9) for draft in drafts])
        for draft in drafts:
            mean = sum(draft.logprobs) / len(draft.logprobs)
            print(f"{mean:6.2f}  {draft.generated!r}")
        print(f"\neach draft: {drafts[0].stats}")
        best = context.join(drafts, by="mean_logprob")
        print(f"best: {best.generated!r}")
        before = llm.stats().engine.prefilled_tokens
        context.append([{"role": "user", "content": "Say that in five words."}])
        print(f"and in short: {context.generate(max_tokens=20, temperature=0).text!r}\n")
        engine = llm.stats().engine
        print(f"prompt of {prompt} tokens, prefilled once for {arguments.n} drafts: {before}")
        print(f"prefilled for the second turn: {engine.prefilled_tokens - before}")


if __name__ == "__main__":
    main()
