"""Tree of thought: the Game of 24, by branches that are scored and pruned.

    python examples/tree_of_thought.py [--model demo] [--width 4] [--keep 2]

After Yao et al., "Tree of Thoughts" (2023): combine two of the numbers left, three times, to reach
24. Each round forks every state that is left, lets the model propose a step, throws out what is no
arithmetic, and keeps the states that the model finds likeliest to end well. A small model finds a
solution by luck at best; what is to be seen is that a tree of states costs no prefix twice.
"""

from __future__ import annotations

import argparse
import re

from radixkv import LLM
from radixkv.programs import Context

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
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+) \(left: ([\d ]+)\)$")


def numbers_after(line: str, left: tuple[int, ...]) -> tuple[int, ...] | None:
    """The numbers that are left if the line is a step from ``left``; else None."""
    found = STEP.match(line.strip())
    if found is None:
        return None
    one, sign, two, result = int(found[1]), found[2], int(found[3]), int(found[4])
    rest = list(left)
    for number in (one, two):
        if number not in rest:
            return None
        rest.remove(number)
    exact = {"+": one + two, "-": one - two, "*": one * two, "/": one / two if two else None}
    after = tuple(sorted([*rest, result]))
    said = tuple(sorted(map(int, found[5].split())))
    return after if exact[sign] == result and said == after else None


def expand(
    llm: LLM, state: Context, left: tuple[int, ...], width: int
) -> list[tuple[Context, tuple[int, ...]]]:
    """Branches of a state that made a step, with what is left of the numbers."""
    branches = state.fork(width)
    llm.run([b.generate(max_tokens=24, temperature=0.8, stop="\n") for b in branches])
    found: dict[str, tuple[Context, tuple[int, ...]]] = {}
    for branch in branches:
        line = branch.generated
        after = numbers_after(line, left)
        if after is None or line in found:
            branch.close()
            continue
        branch.append("\n")
        found[line] = branch, after
    return list(found.values())


def search(
    llm: LLM, root: Context, width: int, keep: int
) -> tuple[Context, tuple[int, ...]] | None:
    """The best state after three rounds, or None if no state was left."""
    states = [(root, NUMBERS)]
    for number in range(1, 4):
        children = [child for state, left in states for child in expand(llm, state, left, width)]
        scores = llm.run([child.score("24 (left: 24)") for child, _ in children])
        order = sorted(range(len(children)), key=lambda i: -scores[i].mean)
        states = [children[i] for i in order[:keep]]
        for i in order[keep:]:
            children[i][0].close()
        print(f"round {number}: {len(children)} valid steps")
        for state, left in states:
            print(f"    {state.generated!r}, left: {left}")
        if not states:
            return None
    return states[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--keep", type=int, default=3)
    arguments = parser.parse_args()
    with LLM(arguments.model, dtype="bfloat16", seed=24) as llm, llm.context(EXAMPLES) as root:
        prompt = len(root)
        best = search(llm, root, arguments.width, arguments.keep)
        if best is not None:
            state, left = best
            print(f"best: {state.generated!r}, left: {left}; {state.stats}")
            root.join([state], by=len)
        stats = llm.stats()
        print(f"{stats.engine.requests} generations and scores over a prompt of {prompt} tokens")
        print(
            f"prefilled: {stats.engine.prefilled_tokens} tokens; copies on write: "
            f"{stats.cache.counters.copies_on_write}; blocks held at the peak: "
            f"{stats.engine.peak_blocks_held}"
        )


if __name__ == "__main__":
    main()
