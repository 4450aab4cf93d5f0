"""How long does it take to plan who reads what? Block tables in, reads out; no model, no GPU.

    python benchmarks/planner.py [--runs N] [--output FILE]

Decodes over a forest of three levels: a system prompt that all rows share, eight documents, and a
branch for every four rows. Planned as for a GPU with 132 processors. "replan" is what a step pays
whose batch has changed: sort the tables, find the forest, cut the reads. "go on" is what a step
pays instead whose rows have only grown. Laying the rows out is paid by every step. CPU time of this
process, the shortest of all runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import print_table, write_json

from radixkv.attention import (
    FULL,
    AttentionPlan,
    Reads,
    Row,
    make_batch,
    plan_attention,
    plan_reads,
)
from radixkv.attention.cost import on_a_gpu

BLOCK_SIZE, KV_HEADS, MOST_QUERIES = 16, 8, 16
SYSTEM, DOCUMENTS, DOCUMENT, BRANCH, OWN = 64, 8, 64, 16, 8  # blocks, but for the second
START = (SYSTEM + DOCUMENT + BRANCH + OWN) * BLOCK_SIZE - 3
COST = on_a_gpu(processors=132, tile=64)


def forest(rows: int) -> list[Row]:
    """Rows in any order, over blocks in any order."""
    rng = np.random.default_rng(0)
    blocks = iter(rng.permutation(1_000_000).astype(np.int32))

    def take(count: int) -> list[int]:
        return [int(next(blocks)) for _ in range(count)]

    system, documents = take(SYSTEM), [take(DOCUMENT) for _ in range(DOCUMENTS)]
    branches = [documents[i % DOCUMENTS] + take(BRANCH) for i in range(-(-rows // 4))]
    made = [
        Row(np.array(system + branches[i % len(branches)] + take(OWN), np.int32), START, 1)
        for i in range(rows)
    ]
    return [made[i] for i in rng.permutation(rows)]


def shortest(function: Callable[[], object], runs: int) -> float:
    """Microseconds of CPU time."""
    times = []
    for _ in range(runs):
        begin = time.process_time_ns()
        function()
        times.append(time.process_time_ns() - begin)
    return min(times) / 1e3


def measure(count: int, runs: int) -> list[Any]:
    """One line of the table."""
    rows = forest(count)
    tables, queries = [row.table for row in rows], [1] * count
    shareable = [row.start // BLOCK_SIZE for row in rows]
    batch = make_batch(rows, BLOCK_SIZE, cost=COST)

    def plan() -> AttentionPlan:
        return plan_attention(tables, shareable, queries, BLOCK_SIZE, COST)

    def cut() -> Reads:
        return plan_reads(batch, FULL, COST, kv_heads=KV_HEADS, max_queries=MOST_QUERIES)

    reads = cut()
    read, unshared = batch.kv_tokens()
    return [
        str(count),
        len(batch.plan.runs),
        len(reads.items),
        f"{read / unshared:.3f}",
        shortest(plan, runs) + shortest(cut, runs),
        shortest(lambda: reads.last_for(batch), runs),
        shortest(lambda: make_batch(rows, BLOCK_SIZE, plan=batch.plan), runs),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines = [measure(count, arguments.runs) for count in (1, 32, 128, 256, 512)]
    head = ["rows", "runs", "reads", "KV read", "replan us", "go on us", "lay out us"]
    print_table("Planning a decode step, three levels", head, lines)
    write_json(arguments.output, {"lines": [dict(zip(head, x, strict=True)) for x in lines]})


if __name__ == "__main__":
    main()
