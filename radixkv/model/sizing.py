"""How large a store may be: on a GPU, what the model and the largest step leave."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from radixkv.attention import KVStore, Row, choose_backend, make_batch
from radixkv.config import EngineConfig
from radixkv.devices import room_for_kv
from radixkv.errors import ConfigError
from radixkv.memory import num_blocks_for
from radixkv.model.adapter import ModelAdapter


def make_store(
    adapter: ModelAdapter,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_memory: str | int,
    kv_dtype: torch.dtype | None,
    block_size: int,
    max_len: int,
    config: EngineConfig,
) -> KVStore:
    """The store of an engine.

    Parameters
    ----------
    kv_memory : str or int
        As for `num_blocks_for`; "auto" on a GPU is measured, see `room_for_kv`.
    kv_dtype : torch.dtype, optional
        What keys and values are kept in; ``dtype`` unless given.
    max_len : int
        No sequence is longer.
    config : EngineConfig
        How many sequences and tokens are served at one time.

    Raises
    ------
    ConfigError
        If there is no memory for the largest step, or for a block beside it.
    """
    room = None
    if kv_memory == "auto" and device.type == "cuda":
        step = partial(run_largest_step, adapter, dtype, device, block_size, max_len, config)
        try:
            room = room_for_kv(device, step)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{device} has no memory for a step of {config.max_num_batched_tokens} tokens "
                "beside the model; lower max_num_batched_tokens or max_num_seqs"
            ) from error
    num_blocks = num_blocks_for(
        kv_memory,
        KVStore.bytes_per_block(adapter.layers, block_size, kv_dtype or dtype),
        block_size,
        config.max_num_seqs * max_len,
        room=room,
    )
    return KVStore(adapter.layers, num_blocks, block_size, dtype, device, kv_dtype=kv_dtype)


def run_largest_step(
    adapter: ModelAdapter,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_len: int,
    config: EngineConfig,
) -> torch.Tensor:
    """Prefill as much as fits into a step, over a store that is made for it.

    The store is counted as the step's: a little more is left for activations than they take.

    Returns
    -------
    tensor (wanted, vocabulary)
        Logits of the last tokens, as many as sequences may run at one time.
    """
    num_tokens = config.max_num_batched_tokens
    lengths = [min(max_len, num_tokens - start) for start in range(0, num_tokens, max_len)]
    blocks = [-(-length // block_size) for length in lengths]
    store = KVStore(adapter.layers, sum(blocks), block_size, dtype, device)
    tables = np.split(np.arange(sum(blocks), dtype=np.int32), np.cumsum(blocks)[:-1])
    rows = [Row(table, 0, length) for table, length in zip(tables, lengths, strict=True)]
    batch = make_batch(rows, block_size)
    wanted = torch.arange(max(num_tokens - config.max_num_seqs, 0), num_tokens)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    with torch.inference_mode():
        return adapter.forward(choose_backend(store), batch, tokens, wanted)
