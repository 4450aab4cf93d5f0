"""A debate: two sides, each of which drafts what it says; forks of forks, joined level by level.

    python examples/debate.py [--model demo] [--drafts 3]

After Du et al., "Improving Factuality and Reasoning in Language Models through Multiagent Debate"
(2023), on a small scale. The motion is forked into two sides, and each side into drafts, all of
which are written in one batch. A side goes on from its likeliest draft, reads the other's, and
answers. Then both are joined: the context reads what they said, and decides.
"""

from __future__ import annotations

import argparse

from radixkv import LLM, Context

MOTION = """\
Minutes of the town council. Motion: the old town is closed to private cars from next spring.

The old town has 2,400 inhabitants, 180 shops and two schools. On a working day 9,000 cars drive
through it, of which a third look for a place to park. Buses run every ten minutes and end at the
market square. Shopkeepers fear for their customers, parents for their children's way to school.
Deliveries would be free until eleven in the morning, and taxis at any hour.
"""
SIDES = ("for", "against")


def speak(llm: LLM, sides: list[Context], number: int) -> list[str]:
    """Let each side draft, all in one batch, and go on from its likeliest draft; what they said."""
    drafts = [side.fork(number) for side in sides]
    lengths = [len(side) for side in sides]
    llm.run(
        [
            draft.generate(max_tokens=48, min_tokens=12, temperature=0.8, stop=["\n", '"'])
            for group in drafts
            for draft in group
        ]
    )
    said = []
    for name, side, group, length in zip(SIDES, sides, drafts, lengths, strict=True):
        stats = group[0].stats
        # Joined branches are closed, but what they say can still be read.
        best = side.join(group, by="mean_logprob")
        said.append(best.generated.strip())
        print(f"{name:>8}: {said[-1]}")
        print(f"{'':>10}{number} drafts behind {length} tokens each; one shared")
        print(f"{'':>10}{stats.shared_blocks} blocks and had {stats.own_blocks} of its own")
    return said


def debate(llm: LLM, motion: Context, number: int) -> str:
    """Two rounds and a verdict."""
    sides = motion.fork(len(SIDES))
    for name, side in zip(SIDES, sides, strict=True):
        side.append(f'\nA speaker {name} the motion says: "')
    first, second = speak(llm, sides, number)
    for side, heard in zip(sides, (second, first), strict=True):
        side.append(f'"\nAnother one says: "{heard}"\nThe first speaker answers: "')
    speak(llm, sides, number)
    motion.join(sides, mode="append", template='\nSpeaker {index}: "{text}"')
    motion.append("\nThe council has heard both. It votes")
    return motion.choose([f" {name} the motion" for name in SIDES]).text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafts", type=int, default=3)
    arguments = parser.parse_args()
    with LLM(arguments.model, dtype="bfloat16", seed=5) as llm, llm.context(MOTION) as motion:
        brief = len(motion)
        print(f"\nthe council votes {debate(llm, motion, arguments.drafts)}\n")
        stats = llm.stats()
        engine, counters = stats.engine, stats.cache.counters
        branches = len(SIDES) * 2 * arguments.drafts
        print(f"{branches} drafts on {len(SIDES)} sides over a motion of {brief} tokens:")
        print(f"read: {engine.prefilled_tokens} tokens, written: {engine.decoded_tokens}")
        print(f"{counters.forks} forks, {counters.copies_on_write} blocks copied")
        print(f"{engine.peak_blocks_held} blocks held at the peak, {stats.cache.sequences} left")


if __name__ == "__main__":
    main()
