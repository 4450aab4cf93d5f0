"""Others' attention on our problems, as far as it is there: torch's, flex_attention, FlashInfer.

torch's two are given keys and values in one piece for each row, gathered beforehand, untimed: that
favours them, as no engine has its cache like this. Their output is checked like ours.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu import DEVICE, HAS_GPU
from gpu_scenes import BLOCK_SIZE, Problem

from radixkv.attention import Row

Run = Callable[[], torch.Tensor]
WORKSPACE = 256 * 2**20


class NotThereError(Exception):
    """A rival cannot be run here; says why."""


def sdpa(problem: Problem) -> dict[str, Run]:
    """torch's scaled_dot_product_attention over contiguous rows, one query each, in two layouts.

    With its own switch for grouped heads; and with the heads of a group as queries of one head,
    which read its keys once. Outputs are (tokens, heads, dim).
    """
    keys, values = (cache.transpose(1, 2) for cache in problem.contiguous())
    query, kv_heads = problem.query, problem.heads.kv
    grouped = query.unflatten(1, (kv_heads, -1))

    def by_switch() -> torch.Tensor:
        out = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        return out[:, :, 0]

    def as_queries() -> torch.Tensor:
        return F.scaled_dot_product_attention(grouped, keys, values).flatten(1, 2)

    return {"enable_gqa": by_switch, "group as queries": as_queries}


def sdpa_prefill(problem: Problem) -> dict[str, Run]:
    """torch's scaled_dot_product_attention over contiguous rows, causal from the end."""
    from torch.nn.attention.bias import causal_lower_right

    keys, values = (cache.transpose(1, 2) for cache in problem.contiguous())
    # Heads that are told apart: not every implementation behind the bias takes grouped ones.
    group = problem.heads.query // problem.heads.kv
    keys, values = (cache.repeat_interleave(group, 1) for cache in (keys, values))
    batch, count = len(problem.rows), problem.rows[0].num_queries
    query = problem.query.unflatten(0, (batch, count)).transpose(1, 2)
    bias = causal_lower_right(count, keys.shape[2])

    def run() -> torch.Tensor:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias)
        return out.transpose(1, 2).flatten(0, 1)

    return {"causal_lower_right": run}


def flex(problem: Problem) -> dict[str, Run]:
    """torch's flex_attention over contiguous rows, one query each; compiled on a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    keys, values = (cache.transpose(1, 2) for cache in problem.contiguous())
    query = problem.query[:, :, None]
    attend: Any = torch.compile(flex_attention, dynamic=False) if HAS_GPU else flex_attention

    def run() -> torch.Tensor:
        with warnings.catch_warnings():
            # That it is not compiled, without a GPU.
            warnings.simplefilter("ignore")
            out = attend(query, keys, values, enable_gqa=True)
        return out[:, :, 0]

    return {"compiled" if HAS_GPU else "not compiled": run}


def flashinfer(problem: Problem, prefix: int = 0) -> dict[str, Run]:
    """FlashInfer over the same pages, one query each: plain decode; its cascade if all rows share.

    Raises
    ------
    NotThereError
        If it cannot be imported, or is asked to run without a GPU.
    """
    try:
        package = importlib.import_module("flashinfer")
    except Exception as error:  # of a package that may be built for another torch
        reason = "not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        raise NotThereError(f"{reason}: {error}") from error
    if not HAS_GPU:
        raise NotThereError("it needs a GPU")
    caches = (problem.store.keys[0], problem.store.values[0])
    sizes = (problem.heads.query, problem.heads.kv, problem.heads.dim, BLOCK_SIZE)
    dtype, batch = problem.store.dtype, len(problem.rows)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)
    plain = package.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    plain.plan(*pages(problem.rows, 0), *sizes, q_data_type=dtype, kv_data_type=dtype)
    runs: dict[str, Run] = {"decode": lambda: plain.run(problem.query, caches)}
    if prefix:
        space = torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)
        cascade = package.MultiLevelCascadeAttentionWrapper(2, space, "NHD")
        common = Row(problem.rows[0].table[: prefix // BLOCK_SIZE], prefix - 1, 1)
        levels = [pages([common], 0), pages(problem.rows, prefix // BLOCK_SIZE)]
        queries = [[0, batch], range(batch + 1)]
        cascade.plan(
            [torch.tensor(list(ends), dtype=torch.int32, device=DEVICE) for ends in queries],
            *(list(level) for level in zip(*levels, strict=True)),
            *sizes,
            q_data_type=dtype,
        )
        runs["cascade"] = lambda: cascade.run(problem.query, caches)
    return runs


def pages(rows: Sequence[Row], first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds, blocks and tokens in the last block of rows from block `first` on, for FlashInfer.

    int32: (rows + 1,), (blocks,), (rows,)
    """
    tables = [row.table[first : -(-row.stop // BLOCK_SIZE)] for row in rows]
    bounds = np.cumsum([0, *map(len, tables)])
    last = [(row.stop - 1) % BLOCK_SIZE + 1 for row in rows]
    return tuple(
        torch.from_numpy(np.asarray(numbers, np.int32)).to(DEVICE)
        for numbers in (bounds, np.concatenate(tables), last)
    )  # type: ignore[return-value]
