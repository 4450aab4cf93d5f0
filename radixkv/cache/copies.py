"""Copy orders: which blocks must be copied before a step may write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CopyOrder(NamedTuple):
    """Copy block ``source`` into block ``target``, in every layer.

    Orders are carried out in their order, before anything of the step is written; whether they
    copy all slots or only those that matter is then all the same. An order with ``after_write``
    set reads a block that the step itself computes: it is carried out layer by layer, after that
    layer's keys and values are written and before its attention reads, and it must copy the first
    ``num_tokens`` slots *only*, because the step has just written others of ``target``.
    """

    source: int
    target: int
    after_write: bool = False
    num_tokens: int = 0


def copy_waves(orders: Iterable[CopyOrder]) -> list[list[tuple[int, int]]]:
    """Orders as waves of (source, target) pairs that may each be carried out at once.

    Within a wave every source is read as it was before the wave, and targets are distinct; that
    gives what carrying the orders out one by one would give.
    """
    waves: list[dict[int, int]] = []
    for order in orders:
        if not waves or order.source in waves[-1]:
            waves.append({})
        waves[-1][order.target] = order.source
    return [[(source, target) for target, source in wave.items()] for wave in waves]
