"""KV events on the wire, as vLLM sends them: msgpack arrays, an event's first entry its name.

That is the form of vLLM's releases from 0.9 on, up to the fields ``lora_name`` and ``extra_keys``;
its newest send maps instead. Readers of earlier ones skip the entries that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from radixkv.cache import BlocksStored, namespace_hash
from radixkv.cache.events import Event
from radixkv.cache.hashing import TOKEN_DTYPE

# vLLM's word for the memory that the engine computes in, whatever the device.
MEDIUM = "GPU"
# Stands in place of a sequence number behind the last batch of a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class _Tagged(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The name of the class comes first."""


class BlockStored(_Tagged, frozen=True):
    """Full blocks, each below the one before it, became visible.

    Attributes
    ----------
    block_hashes : list of int
        Chained 64-bit hashes; the chain begins with the namespace's.
    parent_block_hash : int or None
        Of the block before the first; None at the start of a prompt.
    token_ids : list of int
        Of all these blocks.
    block_size : int
    lora_id, medium, lora_name
        vLLM's.
    extra_keys : list of (tuple of str or None), or None
        One entry a block: the namespace, salt and all, for the first of a prompt, None for others.
        None if all are.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Tagged, frozen=True):
    """Blocks are no longer visible."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Tagged, frozen=True):
    """Nothing is cached any more."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events in the order in which they happened; none of them is a heartbeat.

    Attributes
    ----------
    ts : float
        Seconds since the epoch, when it was sent.
    data_parallel_rank : int
        vLLM's; there is only the one.
    """

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


def to_wire(events: Iterable[Event], block_size: int) -> list[WireEvent]:
    """The cache's events in vLLM's form.

    A reset takes everything, node by node: it is said once.
    """
    said: list[WireEvent] = []
    for event in events:
        if isinstance(event, BlocksStored):
            said.append(_stored(event, block_size))
        elif event.reason != "reset":
            said.append(BlockRemoved(list(event.hashes), MEDIUM))
        elif not said or not isinstance(said[-1], AllBlocksCleared):
            said.append(AllBlocksCleared())
    return said


def _stored(event: BlocksStored, block_size: int) -> BlockStored:
    begins = event.parent == namespace_hash(event.namespace)
    keys: list[tuple[str, ...] | None] | None = None
    if begins and event.namespace:
        keys = [event.namespace, *[None] * (len(event.hashes) - 1)]
    return BlockStored(
        list(event.hashes),
        None if begins else event.parent,
        np.frombuffer(event.tokens, TOKEN_DTYPE).tolist(),
        block_size,
        None,
        MEDIUM,
        None,
        keys,
    )
