"""Sequence: tokens and the block table that says where their KV is."""

from __future__ import annotations

from struct import Struct, error
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE, Namespace, TokenIds, token_bytes
from radixkv.cache.pool import BlockIds
from radixkv.cache.retention import DEFAULT_RETENTION, Retention
from radixkv.errors import RequestError, SequenceClosedError

if TYPE_CHECKING:
    from radixkv.cache.manager import PrefixCache
    from radixkv.cache.node import RadixNode

_pack_token = Struct("<i").pack


class Sequence:
    """Tokens, a block table, and how much of it is computed.

    Made by `PrefixCache.acquire` or by `fork`; ended by `PrefixCache.release`.

    Attributes
    ----------
    namespace : tuple of str
        What the blocks are shared within.
    data : bytearray
        The tokens, four bytes each; the cache's own.
    num_cached : int
        Tokens whose KV was found in the cache and need not be computed.
    num_computed : int
        Tokens whose KV is in the blocks (or will be when the step now scheduled has run).
    table : array of int32
        The block table; the cache's own, see ``block_table``.
    node : RadixNode or None
        The node of the tree that this sequence ends at and pins.
    num_tree_blocks : int
        Leading blocks of the table that are the path to ``node``: full blocks of the tree.
    own_from : int
        Blocks that were there before this sequence; a hint at its end speaks of those behind.
    cacheable : bool
        False once the cache was reset: blocks computed before must never be seen again.
    """

    __slots__ = (
        "_cache",
        "cacheable",
        "closed",
        "data",
        "namespace",
        "node",
        "num_cached",
        "num_computed",
        "num_tree_blocks",
        "own_from",
        "retention",
        "table",
    )

    def __init__(
        self,
        cache: PrefixCache,
        data: bytes | bytearray,
        table: BlockIds[int],
        namespace: Namespace = (),
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        self._cache = cache
        self.data = bytearray(data)
        self.table = table
        self.node: RadixNode | None = None
        self.namespace = namespace
        self.retention = retention
        self.num_cached = 0
        self.num_computed = 0
        self.num_tree_blocks = 0
        self.own_from = 0
        self.cacheable = True
        self.closed = False

    # -- reading ---------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens; int32 (num_tokens,)."""
        return np.frombuffer(bytes(self.data), TOKEN_DTYPE)

    @property
    def num_blocks(self) -> int:
        return len(self.table)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """A copy of the table; int32 (num_blocks,). Entry i holds tokens from i × block size on."""
        return np.array(self.table, np.int32)

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slot mapping of tokens ``start`` to ``stop``; int64 (stop - start,)."""
        size = self._cache.block_size
        positions = np.arange(start, stop)
        table = np.frombuffer(self.table, np.int32) if self.table else np.empty(0, np.int32)
        return table[positions // size].astype(np.int64) * size + positions % size

    # -- writing ---------------------------------------------------------------------------------

    def append(self, token: int) -> None:
        """Add one token and make its slot writable.

        May allocate one block, evict, and order one copy (copy-on-write).

        Raises
        ------
        OutOfBlocksError
            Nothing has changed then.
        """
        self.check_open()
        index, offset = divmod(self.num_tokens, self._cache.block_size)
        try:
            packed = _pack_token(token)
        except error:
            raise RequestError(f"a token id must be a 32-bit integer, not {token!r}") from None
        if offset:
            self._make_writable(index)
        else:
            self.table.extend(self._cache.allocator.allocate(1))
        self.data += packed

    def extend(self, tokens: TokenIds) -> None:
        """Add several tokens at once; as `append`, all or nothing."""
        self.check_open()
        data = token_bytes(tokens)
        if not data:
            return
        size, start = self._cache.block_size, self.num_tokens
        missing = -(-(start + len(data) // TOKEN_BYTES) // size) - self.num_blocks
        blocks = self._cache.allocator.allocate(missing)
        if start % size:
            try:
                self._make_writable(start // size)
            except BaseException:
                self._cache.pool.release(blocks)
                raise
        self.table.extend(blocks)
        self.data += data

    def _make_writable(self, index: int) -> None:
        """Copy-on-write: hold block ``index`` alone before anything is written into it."""
        pool, allocator, tree = self._cache.pool, self._cache.allocator, self._cache.tree
        block = self.table[index]
        shared_by_tree = index < self.num_tree_blocks
        if not shared_by_tree:
            if pool.refs[block] == 1:
                return
            # Better to hide the open end of our own prompt than to evict somebody's prefix.
            if pool.refs[block] == 2 and block in tree.open_nodes and not pool.num_free:
                tree.drop_open(block)
                return
        (target,) = allocator.allocate(1)
        allocator.order_copy(block, target, self.num_tokens - index * self._cache.block_size)
        allocator.counters.copies_on_write += 1
        if shared_by_tree:
            self._cache.shorten_path(self, index)
        else:
            tree.release(self.table[index : index + 1])
        self.table[index] = target

    # -- branching -------------------------------------------------------------------------------

    def fork(self) -> Sequence:
        """A second sequence over the same blocks; see `PrefixCache.fork`."""
        return self._cache.fork(self)

    def truncate(self, num_tokens: int) -> None:
        """Forget all tokens from ``num_tokens`` on and give their blocks back; may split an edge.

        Raises
        ------
        RequestError
            If ``num_tokens`` is negative or more than there are.
        """
        self.check_open()
        if not 0 <= num_tokens <= self.num_tokens:
            raise RequestError(f"cannot truncate {self.num_tokens} tokens to {num_tokens}")
        full, offset = divmod(num_tokens, self._cache.block_size)
        kept = full + (offset > 0)
        private = self.table[max(kept, self.num_tree_blocks) :]
        del self.data[num_tokens * TOKEN_BYTES :]
        if kept < self.num_tree_blocks:
            self._cache.shorten_path(self, kept)
        del self.table[kept:]
        self.num_computed = min(self.num_computed, num_tokens)
        self.num_cached = min(self.num_cached, num_tokens)
        self.own_from = min(self.own_from, full)
        self._cache.tree.release(private)

    def check_open(self) -> None:
        """Raise `SequenceClosedError` if the sequence was released."""
        if self.closed:
            raise SequenceClosedError("the sequence was released; acquire or fork a new one")
