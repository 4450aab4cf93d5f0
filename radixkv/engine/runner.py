"""ModelRunner: one step on the model, from rows to logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from radixkv.attention import AttentionBackend, AttentionBatch, AttentionPlan, Row, make_batch
from radixkv.cache import CopyOrder, Sequence, copy_waves
from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE
from radixkv.engine.scheduler import ScheduledRow, Step
from radixkv.engine.stats import EngineCounters
from radixkv.model.adapter import ModelAdapter

Forward = Callable[[AttentionBatch, torch.Tensor, torch.Tensor], torch.Tensor]


class ModelRunner:
    """Runs steps; owns nothing but the plan of the last one.

    ``forward`` may be set to another way of running the adapter; see `DecodeGraphs`.
    """

    def __init__(
        self, adapter: ModelAdapter, backend: AttentionBackend, counters: EngineCounters
    ) -> None:
        self.adapter = adapter
        self.backend = backend
        self.counters = counters
        self.forward: Forward | None = None
        # Held, not only named: an id would be given to another sequence.
        self._planned: list[Sequence] = []
        self._plan: AttentionPlan | None = None

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
        rows = [Row(row.sequence.block_table, row.start, row.stop - row.start) for row in step.rows]
        batch = make_batch(
            rows,
            self.backend.store.block_size,
            keep=[row.computes for row in step.rows],
            plan=self._reusable_plan(step),
            cost=self.backend.cost,
        )
        self._plan = batch.plan
        batch.copies = [self._slots(order) for order in step.copies if order.after_write]
        order = batch.plan.order
        place = np.empty(len(rows), np.int64)
        place[order] = np.arange(len(rows))
        tokens = _tokens([step.rows[index] for index in order.tolist()])
        wanted = torch.from_numpy(_wanted(step.rows, batch.offsets[1:][place]))
        self._count(step.rows, batch.kv_tokens())
        # What the adapter does may be changed from outside, so it is looked up every time.
        forward = self.forward or partial(self.adapter.forward, self.backend)
        return forward(batch, torch.from_numpy(tokens), wanted)

    def _reusable_plan(self, step: Step) -> AttentionPlan | None:
        """The last plan, if the same sequences only go on decoding."""
        rows = [row.sequence for row in step.rows if row.decodes]
        same = len(rows) == len(self._planned) == len(step.rows) and not step.copies
        same = same and all(now is then for now, then in zip(rows, self._planned, strict=True))
        self._planned = rows if len(rows) == len(step.rows) else []
        return self._plan if same else None

    def _slots(self, order: CopyOrder) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.backend.store.block_size
        offsets = torch.arange(order.num_tokens)
        return order.source * size + offsets, order.target * size + offsets

    def _count(self, rows: list[ScheduledRow], kv_tokens: tuple[int, int]) -> None:
        counters = self.counters
        counters.steps += 1
        counters.kv_tokens_read += kv_tokens[0]
        counters.kv_tokens_unshared += kv_tokens[1]


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
