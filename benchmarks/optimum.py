"""What a cache that knows the future could reach: Belady's rule on blocks, leaves first.

Requests come one at a time. Each needs all of its full blocks at once; those at its beginning that
are in the cache are hits. For the others room is made by evicting, one after the other, the block
whose next use lies farthest in the future, among the blocks that this request does not use; of two
that are used next at the same time, the deeper one goes. A block is used by every request that
begins with the same tokens up to its end, so a parent's next use is never later than its child's,
and the rule takes leaves before what they stand on without being told. Blocks of a request stay
until others push them out, also those that nobody will ask for again: these go first.

The rule is optimal where requests take one block at a time. With whole prompts it is a close
approximation: no request may drop its own blocks while it runs, and no cheaper choice is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

NEVER = 1 << 60


def block_ids(sequences: Iterable[bytes], block_bytes: int) -> list[list[int]]:
    """Each sequence's full blocks by number; equal numbers are equal prefixes."""
    numbers: dict[tuple[int, bytes], int] = {}
    all_ids = []
    for data in sequences:
        parent, ids = -1, []
        for start in range(0, len(data) // block_bytes * block_bytes, block_bytes):
            key = (parent, data[start : start + block_bytes])
            parent = numbers.setdefault(key, len(numbers))
            ids.append(parent)
        all_ids.append(ids)
    return all_ids


def hits(requests: list[list[int]], capacity: int, prompt_blocks: list[int]) -> list[int]:
    """Hits of each request, in blocks, in a cache of ``capacity`` blocks that knows the future.

    Parameters
    ----------
    requests : list of list of int
        Block numbers, see `block_ids`; one that needs more than ``capacity`` hits what is there,
        and adds nothing.
    capacity : int
    prompt_blocks : list of int
        How many of each request's blocks are its prompt's: only those can be hits.
    """
    upcoming = next_uses(requests)
    next_use: dict[int, int] = {}  # of cached blocks
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale ones are skipped
    found = []
    for number, (blocks, after) in enumerate(zip(requests, upcoming, strict=True)):
        cached = 0
        while cached < len(blocks) and blocks[cached] in next_use:
            cached += 1
        found.append(min(cached, prompt_blocks[number]))
        if len(blocks) > capacity:
            # It is served without the cache; what it found there is still next used later.
            for depth in range(cached):
                next_use[blocks[depth]] = after[depth]
                heappush(heap, (-after[depth], -depth, blocks[depth]))
            continue
        # Its blocks are in use: not on the heap until it has ended.
        own = set(blocks)
        _make_room(heap, next_use, own, capacity - (len(own) - len(own & next_use.keys())))
        for depth, (block, use) in enumerate(zip(blocks, after, strict=True)):
            next_use[block] = use
            heappush(heap, (-use, -depth, block))
    return found


def _make_room(
    heap: list[tuple[int, int, int]], next_use: dict[int, int], own: set[int], room: int
) -> None:
    """Evict until no more than ``room`` blocks are cached."""
    held = []
    while len(next_use) > room:
        entry = heappop(heap)
        use, _, block = entry
        if next_use.get(block) != -use:
            continue
        if block in own:
            held.append(entry)
            continue
        del next_use[block]
    for entry in held:
        heappush(heap, entry)


def next_uses(requests: list[list[int]]) -> list[list[int]]:
    """The number of the next request that uses each block of each request, else `NEVER`."""
    seen: dict[int, int] = {}
    result: list[list[int]] = [[] for _ in requests]
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number]
        result[number] = [seen.get(block, NEVER) for block in blocks]
        seen.update(dict.fromkeys(blocks, number))
    return result
