"""ModelRunner: one step on the model, from rows to logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixkv.attention import AttentionBackend, AttentionBatch, Row, make_batch
from radixkv.cache import CopyOrder, copy_waves
from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE
from radixkv.engine.decodes import Decodes, ScheduledRow
from radixkv.engine.scheduler import Step
from radixkv.engine.stats import EngineCounters
from radixkv.model.adapter import ModelAdapter

Forward = Callable[[AttentionBatch, torch.Tensor, torch.Tensor], torch.Tensor]


class ModelRunner:
    """Runs steps; owns nothing but how the last one was laid out.

    ``forward`` may be set to another way of running the adapter; see `DecodeGraphs`.
    """

    def __init__(
        self, adapter: ModelAdapter, backend: AttentionBackend, counters: EngineCounters
    ) -> None:
        self.adapter = adapter
        self.backend = backend
        self.counters = counters
        self.forward: Forward | None = None
        self._last: _LastStep | None = None

    def copy_blocks(self, step: Step) -> None:
        """Make the copies that come before anything of the step is written."""
        for wave in copy_waves(order for order in step.copies if not order.after_write):
            self.backend.copy_blocks(wave)

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Compute a step, whose `copy_blocks` has been done.

        Returns
        -------
        tensor (wanted, vocabulary)
            Logits, in the order of the step's rows: of each its last ``num_logits`` queries'.
        """
        batch = self._grow(step) or self._lay_out(step)
        self._count(batch.kv_tokens())
        # What the adapter does may be changed from outside, so it is looked up every time.
        forward = self.forward or partial(self.adapter.forward, self.backend)
        last = self._last
        assert last is not None
        return forward(batch, torch.from_numpy(last.tokens), torch.from_numpy(last.wanted))

    def _grow(self, step: Step) -> AttentionBatch | None:
        """The last step's batch one token on, if the same sequences only go on decoding."""
        if self._last is None or step.copies or not self._last.goes_on(step):
            return None
        self.counters.steps_grown += 1
        return self._last.grow(step.decodes)

    def _lay_out(self, step: Step) -> AttentionBatch:
        """Any step, from its rows."""
        rows = step.rows
        batch = make_batch(
            [Row(row.sequence.block_table, row.start, row.stop - row.start) for row in rows],
            self.backend.store.block_size,
            keep=[row.computes for row in rows],
            cost=self.backend.cost,
        )
        batch.copies = [self._slots(order) for order in step.copies if order.after_write]
        self._last = _LastStep(step, rows, batch)
        return batch

    def _slots(self, order: CopyOrder) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.backend.store.block_size
        offsets = torch.arange(order.num_tokens)
        return order.source * size + offsets, order.target * size + offsets

    def _count(self, kv_tokens: tuple[int, int]) -> None:
        counters = self.counters
        counters.steps += 1
        counters.kv_tokens_read += kv_tokens[0]
        counters.kv_tokens_unshared += kv_tokens[1]


class _LastStep:
    """A step as it was laid out, to go on from.

    Attributes
    ----------
    batch : AttentionBatch
    tokens : int64 array (tokens,)
        The queries, in the plan's order.
    wanted : int64 array (logits,)
        Which queries' logits are wanted, in the order of the step's rows.
    """

    def __init__(self, step: Step, rows: list[ScheduledRow], batch: AttentionBatch) -> None:
        self.batch = batch
        self._order = batch.plan.order
        place = np.empty(len(rows), np.int64)
        place[self._order] = np.arange(len(rows))
        ordered = [rows[index] for index in self._order.tolist()]
        self.tokens = _tokens(ordered)
        self.wanted = _wanted(rows, batch.offsets[1:][place])
        # None if others than these had rows, too.
        self._decodes = None if step.prompts else step.decodes
        self._turn = self._first_turn = step.decodes.turn
        self._ordered = [row.sequence for row in ordered]
        self._shown = self._num_shown()
        # In which of the next steps each row begins a block.
        size = batch.block_size
        self._begins: list[list[int]] = [[] for _ in range(size)]
        if self._decodes is not None:
            for row, position in enumerate(batch.positions.tolist()):
                self._begins[-position % size].append(row)

    def goes_on(self, step: Step) -> bool:
        """Whether a step has the same rows, all decoding, each a token further."""
        return (
            step.decodes is self._decodes
            and not step.prompts
            and step.decodes.turn == self._turn + 1
        )

    def grow(self, decodes: Decodes) -> AttentionBatch:
        """The batch of such rows, and their tokens; what is wanted of them stays."""
        shown = self._num_shown()
        # Where nothing was copied, a table has changed if it has a new block, or if blocks that
        # others show have taken the place of its own.
        changed = self._begins[(decodes.turn - self._first_turn) % self.batch.block_size]
        if shown != self._shown:
            pairs = enumerate(zip(shown, self._shown, strict=True))
            changed = [*changed, *(place for place, (now, then) in pairs if now != then)]
        self._turn, self._shown = decodes.turn, shown
        self.tokens = decodes.tokens[self._order].astype(np.int64)
        self.batch = self.batch.grown({p: self._ordered[p].block_table for p in changed})
        return self.batch

    def _num_shown(self) -> list[int]:
        return [sequence.num_tree_blocks for sequence in self._ordered]


def _tokens(rows: list[ScheduledRow]) -> npt.NDArray[np.int64]:
    """The rows' queries, one row after the other."""
    data = b"".join(
        [row.sequence.data[row.start * TOKEN_BYTES : row.stop * TOKEN_BYTES] for row in rows]
    )
    return np.frombuffer(data, TOKEN_DTYPE).astype(np.int64)


def _wanted(rows: list[ScheduledRow], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which queries' logits are wanted: of each row, whose queries end there, the last ones."""
    counts = np.array([1 if row.decodes else row.num_logits for row in rows], np.int64)
    places = np.arange(counts.sum(), dtype=np.int64)
    places += np.repeat(ends - np.cumsum(counts), counts)
    return places
