"""Many sequences at once, a token each: what a step of decoding asks of the cache.

Within a block there is nothing to do but to note the token, and nearly all steps are. So the test
for that stands in one loop, which is compiled; whatever else there is goes the general way.
"""

from __future__ import annotations

from radixkv.cache.allocator import BlockAllocator
from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.sequence import Sequence
from radixkv.cache.visibility import Visibility
from radixkv.errors import OutOfBlocksError


def append_each(sequences: list[Sequence], tokens: bytes, allocator: BlockAllocator) -> int:
    """`Sequence.append` for each of these, until one finds no block; how many have got theirs."""
    refs, late, block_bytes = allocator.pool.refs, allocator.late, allocator.tree.block_bytes
    done = 0
    for sequence in sequences:
        token = tokens[done * TOKEN_BYTES : (done + 1) * TOKEN_BYTES]
        index, offset = divmod(len(sequence.data), block_bytes)
        if (
            offset
            and index >= sequence.num_tree_blocks
            and refs[sequence.table[index]] == 1
            and not late
            and sequence.is_changeable
        ):
            sequence.data += token
        else:
            try:
                sequence.grow(token)
            except OutOfBlocksError:
                break
        done += 1
    return done


def commit_each(sequences: list[Sequence], block_size: int, visibility: Visibility) -> None:
    """`PrefixCache.commit` for each of these, of all its tokens."""
    for sequence in sequences:
        if sequence.closed or sequence.withdrawn:
            sequence.check_usable()
        sequence.num_computed = len(sequence.data) // TOKEN_BYTES
        if sequence.cacheable:
            full = sequence.num_computed // block_size
            if sequence.num_tree_blocks < full:
                visibility.commit(sequence, full)
