"""Random forests of block tables, for the planner's tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from radixkv.attention import Row

BLOCK_SIZES = st.sampled_from([1, 2, 16])


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Row], int]:
    """Rows of a random forest of block tables: children extend a parent's table or a part of it."""
    size = draw(BLOCK_SIZES)
    fresh = iter(draw(st.permutations(range(200))))
    tables: list[list[int]] = [[]]
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from(tables))
        table = parent[: draw(st.integers(0, len(parent)))]
        table = table + [next(fresh) for _ in range(draw(st.integers(0, 4)))]
        tables.append(table)
        start = len(table) * size + draw(st.integers(0, size - 1))
        queries = draw(st.sampled_from([1, 1, 1, 2, size, size + 1, 2 * size + 1]))
        blocks = -(-(start + queries) // size)
        full = table + [next(fresh) for _ in range(blocks - len(table))]
        # Room that is not used yet, as an engine reserves it.
        full += [next(fresh) for _ in range(draw(st.integers(0, 1)))]
        rows.append(Row(np.array(full, np.int32), start, queries))
    return rows, size


def grown(rows: list[Row], growth: list[int], size: int) -> list[Row]:
    """The rows once each has decoded some more tokens, with one query each."""
    later = []
    for index, row in enumerate(rows):
        start = row.stop + growth[index]
        missing = max(0, start // size + 1 - len(row.table))
        more = np.arange(1000 + 100 * index, 1000 + 100 * index + missing, dtype=np.int32)
        later.append(Row(np.concatenate([row.table, more]), start, 1))
    return later
