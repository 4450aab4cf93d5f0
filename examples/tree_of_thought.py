"""Tree of thought: the Game of 24, by branches that are scored and pruned.

    python examples/tree_of_thought.py [--model demo] [--keep 4]

After Yao et al., "Tree of Thoughts" (2023): combine two of the numbers left, three times, to reach
24. Each round lists the steps that are possible from each state, lets the model read them all as
forks, and keeps the states that it finds likeliest. A small model is no good judge; what is to be
seen is that a tree of states computes no prefix twice.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import permutations

from radixkv import LLM, Context

EXAMPLES = """\
Use the numbers and + - * / to get 24. Each line combines two of the numbers that are left.
Numbers: 4 4 6 8
4 + 8 = 12 (left: 4 6 12)
6 - 4 = 2 (left: 2 12)
2 * 12 = 24 (left: 24)

Numbers: 2 9 10 12
12 * 2 = 24 (left: 9 10 24)
10 - 9 = 1 (left: 1 24)
24 * 1 = 24 (left: 24)

Numbers: 1 2 8 8
"""
NUMBERS = (1, 2, 8, 8)
Numbers = tuple[int, ...]


@dataclass
class State:
    """What was written so far, and the numbers that are left."""

    context: Context
    left: Numbers
    score: float = 0.0


def steps_from(left: Numbers) -> dict[str, Numbers]:
    """Every line that combines two of the numbers, and what is left then."""
    found = {}
    for i, j in permutations(range(len(left)), 2):
        one, two = left[i], left[j]
        results = {"+": one + two, "-": one - two, "*": one * two}
        if two and one % two == 0:
            results["/"] = one // two
        rest = [number for k, number in enumerate(left) if k not in (i, j)]
        for sign, result in results.items():
            if result >= 0:
                after = tuple(sorted([*rest, result]))
                said = " ".join(map(str, after))
                found[f"{one} {sign} {two} = {result} (left: {said})\n"] = after
    return found


def search(llm: LLM, root: Context, keep: int) -> State:
    """The likeliest state after three rounds, or the first that reaches 24."""
    states = [State(root, NUMBERS)]
    for number in range(1, len(NUMBERS)):
        lines = [(state, *step) for state in states for step in steps_from(state.left).items()]
        scores = llm.run([state.context.score(line) for state, line, _ in lines])
        order = sorted(range(len(lines)), key=lambda i: -scores[i].mean)
        order.sort(key=lambda i: lines[i][2] != (24,))
        print(f"round {number}: {len(lines)} thoughts, read in one batch; the likeliest:")
        kept = []
        for i in order[:keep]:
            state, line, left = lines[i]
            (branch,) = state.context.fork(1)
            branch.append(line)
            kept.append(State(branch, left, scores[i].mean))
            print(f"    {scores[i].mean:6.2f}  {line.rstrip()}")
        states = kept
    return states[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--keep", type=int, default=4)
    arguments = parser.parse_args()
    with LLM(arguments.model, dtype="bfloat16") as llm, llm.context(EXAMPLES) as root:
        prompt = len(root)
        best = search(llm, root, arguments.keep)
        root.join([best.context], by=len)
        print(f"{'solved' if best.left == (24,) else 'not solved'}:")
        print(root.text.rpartition("Numbers:")[2])
        stats = llm.stats()
        asked = stats.cache.counters.query_tokens
        print(
            f"{stats.engine.requests} thoughts over a prompt of {prompt} tokens: {asked:,} tokens,"
        )
        print(
            f"of which {stats.engine.prefilled_tokens:,} were computed; "
            f"{stats.engine.peak_blocks_held} blocks held at the peak"
        )


if __name__ == "__main__":
    main()
