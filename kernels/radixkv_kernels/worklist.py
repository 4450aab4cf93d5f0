"""The work list: which queries read which keys through which table, and what is merged into what.

Prefill, decode, shared runs, splits and branches differ in nothing but this list. `docs/kernels.md`
draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# The KV end of a read that goes as far as its queries see: such a list stays valid as rows grow.
TO_THE_END = 2**31 - 1
# The first partial of an item that alone serves its queries and writes the output itself.
DIRECT = -1
# The base-2 log-sum-exp of no key at all: finite, since -inf - -inf would be NaN.
NOTHING = -1e30

ITEM_FIELDS = ("first query", "queries", "table row", "KV start", "KV end", "first partial")


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Work items and merges, on the device.

    Queries are counted in the plan's order. An item's queries all read the same keys, through one
    row of the block tables that holds them; which of them a query sees is left to its position.

    Attributes
    ----------
    items : Tensor
        int32, contiguous: first query, number of queries, table row, KV start, KV end (exclusive,
        or `TO_THE_END`), first partial (its queries follow each other from there) or `DIRECT`,
        shape (W, 6). Launched in this order: put what takes longest first.
    num_items : Tensor
        int32, how many of `items` count; the rest are padding, shape (1,).
    merge_ptr : Tensor
        int32, contiguous: query q merges ``merge_idx[merge_ptr[q]:merge_ptr[q + 1]]``, in this
        order; nothing if a `DIRECT` item serves it, shape (Q + 1,).
    merge_idx : Tensor
        int32, contiguous, partials; as long as the partial buffers, shape (P,).
    order : Tensor or None
        int32, contiguous: the token of each query, no token twice. None: the tokens are in the
        plan's order, shape (Q,).
    max_queries : int
        No item has more queries than this. It decides the grid, so it is on the host.
    """

    items: Tensor
    num_items: Tensor
    merge_ptr: Tensor
    merge_idx: Tensor
    order: Tensor | None
    max_queries: int

    @property
    def num_queries(self) -> int:
        """Queries, padding included."""
        return self.merge_ptr.shape[0] - 1

    @property
    def num_partials(self) -> int:
        """Rows that the partial buffers must have, padding included."""
        return self.merge_idx.shape[0]

    def padded(
        self, max_items: int, num_queries: int, max_partials: int, max_queries: int
    ) -> WorkList:
        """The same work in buffers of fixed capacity, as a CUDA graph needs them.

        Queries and items beyond this list's own do nothing. The order, if there is one, is padded
        with zeros, which nothing reads.

        Raises
        ------
        ValueError
            If the work does not fit.
        """

        def grown(tensor: Tensor, size: int) -> Tensor:
            return tensor.new_zeros(size, *tensor.shape[1:])

        room = WorkList(
            grown(self.items, max_items),
            grown(self.num_items, 1),
            grown(self.merge_ptr, num_queries + 1),
            grown(self.merge_idx, max_partials),
            None if self.order is None else grown(self.order, num_queries),
            max_queries,
        )
        room.copy_(self)
        return room

    def copy_(self, other: WorkList) -> None:
        """Replace this list's work by another's, in place, so that a captured graph sees it.

        Raises
        ------
        ValueError
            If the work does not fit, or only one of the lists has an order.
        """
        needs = (len(other.items), other.num_queries, other.num_partials, other.max_queries)
        room = (len(self.items), self.num_queries, self.num_partials, self.max_queries)
        if any(need > has for need, has in zip(needs, room, strict=True)):
            raise ValueError(
                f"items, queries, partials and queries of an item {needs} do not fit into {room}"
            )
        if (self.order is None) != (other.order is None):
            raise ValueError("only one of the work lists has an order")
        self.items[: len(other.items)].copy_(other.items)
        self.num_items.copy_(other.num_items)
        self.merge_ptr[: len(other.merge_ptr)].copy_(other.merge_ptr)
        self.merge_ptr[len(other.merge_ptr) :].copy_(other.merge_ptr[-1:])
        self.merge_idx[: len(other.merge_idx)].copy_(other.merge_idx)
        if self.order is not None and other.order is not None:
            self.order[: len(other.order)].copy_(other.order)


def build_work_list(
    reads: npt.ArrayLike,
    num_queries: int,
    *,
    order: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> WorkList:
    """Make a work list from reads: gives out partials, and lists what each query merges.

    A read whose queries need no other read writes the output itself. Partials of a query are merged
    in the order of their keys, whatever the order of the reads, so that the order of launches does
    not change a bit. O(queries of all reads x log).

    Parameters
    ----------
    reads : int array
        First query, number of queries, table row, KV start, KV end or `TO_THE_END`, shape (W, 5).
    num_queries : int
        Q. Queries that no read serves are left untouched in the output.
    order : sequence of int, optional
        The token of each query, length Q.
    device : torch.device or str
        Where the tensors go.

    Raises
    ------
    ValueError
        For a read outside the queries, an empty query range, an end before the start, an order of
        another length or with a token twice, or two reads that give one query the same key twice.
    """
    read = np.asarray(reads, np.int64).reshape(-1, 5)
    first, count, table_row, start, end = read.T
    for bad, message in (
        ((count < 1) | (first < 0) | (first + count > num_queries), "has queries outside the list"),
        ((start < 0) | (end < start) | (end > TO_THE_END), "has no valid range of keys"),
        (table_row < 0, "has a negative table row"),
    ):
        if bad.any():
            raise ValueError(f"read {int(bad.argmax())} {message}: {read[bad.argmax()].tolist()}")
    if order is not None and not len(set(order)) == len(order) == num_queries:
        raise ValueError(f"order must name {num_queries} tokens, each once")

    steps = np.zeros(num_queries + 1, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, first + count, -1)
    merged_before = np.concatenate([[0], np.cumsum(np.cumsum(steps)[:-1] > 1)])
    direct = merged_before[first + count] == merged_before[first]
    sizes = np.where(direct, 0, count)
    first_partial = np.cumsum(sizes) - sizes

    # One entry for each partial: its read, its query.
    source = np.repeat(np.arange(len(read)), sizes)
    query = first[source] + np.arange(len(source)) - first_partial[source]
    merge_idx = np.lexsort((end[source], start[source], query))
    source, query = source[merge_idx], query[merge_idx]
    start, end, reader = start[source], end[source], query
    start, end, reader = (column[end > start] for column in (start, end, reader))
    twice = (reader[1:] == reader[:-1]) & (end[:-1] > start[1:])
    if twice.any():
        raise ValueError(f"query {int(reader[:-1][twice.argmax()])} would see a key twice")
    merge_ptr = np.concatenate([[0], np.cumsum(np.bincount(query, minlength=num_queries))])

    def tensor(values: npt.ArrayLike) -> Tensor:
        return torch.tensor(np.asarray(values, np.int32), device=device)

    return WorkList(
        tensor(np.column_stack([read, np.where(direct, DIRECT, first_partial)])),
        tensor([len(read)]),
        tensor(merge_ptr),
        tensor(merge_idx),
        None if order is None else tensor(order),
        int(count.max(initial=1)),
    )


def unshared_work_list(
    num_queries: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    split: int = 0,
    device: torch.device | str = "cpu",
) -> WorkList:
    """Each row reads its own table and shares nothing: plain paged attention.

    The queries of row 0 come first, then those of row 1, ...; row i reads through row i of the
    block tables, as far as its queries' positions.

    Parameters
    ----------
    num_queries : sequence of int
        Queries of each row: 1 in decode, more in prefill, 0 for a row that sits out.
    lengths : sequence of int, optional
        Keys of each row; needed for `split`.
    split : int
        If positive, keys are cut at multiples of it, and each part is a program of its own, so that
        few long rows fill a GPU. The cuts depend on nothing else, and so neither do the sums.
    device : torch.device or str
        Where the tensors go.

    Raises
    ------
    ValueError
        For `split` without `lengths`, or lists of different lengths.
    """
    if split and (lengths is None or len(lengths) != len(num_queries)):
        raise ValueError("split needs lengths, one for each row")
    reads, first = [], 0
    for row, count in enumerate(num_queries):
        length = lengths[row] if split and lengths is not None else 0
        starts = range(0, max(length, 1), split or 1)
        if count:
            reads += [
                (first, count, row, start, TO_THE_END if start == starts[-1] else start + split)
                for start in starts
            ]
        first += count
    return build_work_list(reads, first, device=device)
