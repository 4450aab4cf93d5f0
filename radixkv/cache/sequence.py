"""Sequence: tokens and the block table that says where their KV is."""

from __future__ import annotations

from struct import Struct, error
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
import numpy.typing as npt

from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE, Namespace, TokenIds, token_bytes
from radixkv.cache.pool import BlockIds
from radixkv.cache.retention import Retention
from radixkv.errors import RadixKVError, RequestError, SequenceClosedError

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
    num_counted : int
        Leading tokens that were counted as a query, so that finding them counts as a hit.
    num_settled : int or None
        Tokens that stay computed if the step now scheduled fails; None if it does not matter.
    promised_from : int or None
        From which token on that step computes this sequence's own; None if it computes nothing.
    cacheable : bool
        False once the cache was reset: blocks computed before must never be seen again.
    withdrawn : bool
        True once KV that it holds was withdrawn, by `PrefixCache.withdraw` or a failed step. All
        it is good for then is to be released; its tokens can be acquired anew.
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
        "num_counted",
        "num_settled",
        "num_tree_blocks",
        "own_from",
        "promised_from",
        "retention",
        "table",
        "withdrawn",
    )

    def __init__(
        self,
        cache: PrefixCache,
        data: bytes | bytearray,
        table: BlockIds[int],
        node: RadixNode | None,
        num_tree_blocks: int,
        namespace: Namespace,
        retention: Retention,
    ) -> None:
        self._cache = cache
        self.data = bytearray(data)
        self.table = table
        self.node = node
        self.namespace = namespace
        self.retention = retention
        self.num_cached = 0
        self.num_computed = 0
        self.num_tree_blocks = num_tree_blocks
        self.own_from = num_tree_blocks
        self.num_counted = 0
        self.num_settled: int | None = None
        self.promised_from: int | None = None
        self.cacheable = True
        self.withdrawn = False
        self.closed = False

    # -- reading ---------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return len(self.data) // TOKEN_BYTES

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens; int32 (num_tokens,)."""
        return np.frombuffer(self.data[:], TOKEN_DTYPE)

    @property
    def num_blocks(self) -> int:
        return len(self.table)

    @property
    def num_own_blocks(self) -> int:
        """Blocks that no other sequence holds; O(blocks outside the tree + nodes)."""
        allocator = self._cache.allocator
        refs, open_nodes = allocator.pool.refs, allocator.tree.open_nodes
        private = self.table[self.num_tree_blocks :]
        own = sum(refs[block] - (block in open_nodes) == 1 for block in private)
        node = self.node
        while node is not None and node.pins == 1:
            own += min(len(node.blocks), self.num_tree_blocks - node.start)
            node = node.parent
        return own

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """A copy of the table; int32 (num_blocks,). Entry i holds tokens from i × block size on."""
        return np.array(self.table, np.int32)

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slot mapping of tokens ``start`` to ``stop``; int64 (stop - start,)."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise RequestError(f"tokens {start} to {stop} of {self.num_tokens} have no slots")
        size = self._cache.block_size
        positions = np.arange(start, stop)
        table = np.array(self.table, np.int64)
        return table[positions // size] * size + positions % size

    # -- writing ---------------------------------------------------------------------------------

    def append(self, token: SupportsIndex) -> None:
        """Add one token and make its slot writable.

        May allocate one block, evict, and order one copy (copy-on-write).

        Raises
        ------
        OutOfBlocksError
            Nothing has changed then.
        """
        try:
            packed = _pack_token(token)
        except error:
            raise RequestError(f"a token id must be a 32-bit integer, not {token!r}") from None
        self.grow(packed)

    def extend(self, tokens: TokenIds) -> None:
        """Add several tokens at once; as `append`, all or nothing."""
        self.grow(token_bytes(tokens))

    def resume(self, tokens: TokenIds, *, resumed: bool = False, spare_blocks: int = 0) -> None:
        """Go on as the prompt ``tokens``, which begins with all tokens that are here; as `extend`.

        Counts as a query whose hits are what this sequence has computed.

        Parameters
        ----------
        tokens : ints (num_tokens,)
        resumed : bool
            The tokens have been counted before (a preempted request comes back).
        spare_blocks : int
            Blocks that must be left over, free or evictable, for others to go on.

        Raises
        ------
        RequestError
            If the tokens begin otherwise.
        OutOfBlocksError
            If the rest does not fit. Nothing has changed then.
        """
        self._check_changeable()
        data = token_bytes(tokens)
        if not data.startswith(self.data):
            raise RequestError("a sequence goes on only with a prompt that begins with its tokens")
        size, start, stop = self._cache.block_size, self.num_tokens, len(data) // TOKEN_BYTES
        # One more than is missing, if the last block has to be copied before it is written.
        missing = -(-stop // size) - len(self.table) + (stop > start and start % size > 0)
        self._cache.allocator.require(missing + spare_blocks)
        self.grow(data[len(self.data) :])
        self.num_cached = self.num_computed
        if not resumed:
            self.num_counted = stop
            counters = self._cache.counters
            counters.queries += 1
            counters.query_tokens += stop
            counters.hit_tokens += self.num_computed
            counters.held_tokens += self.num_computed

    @property
    def is_changeable(self) -> bool:
        """Whether tokens may be added and dropped now."""
        return not self.closed and not self.withdrawn and self.promised_from is None

    def grow(self, data: bytes) -> None:
        """As `extend`, by tokens of four bytes each."""
        if not self.is_changeable:
            self._check_changeable()
        if not data:
            return
        allocator, size = self._cache.allocator, self._cache.block_size
        start = len(self.data) // TOKEN_BYTES
        missing = -(-(start + len(data) // TOKEN_BYTES) // size) - len(self.table)
        index, offset = divmod(start, size)
        if offset and self._must_copy(index, missing):
            # One allocation for both, so that nothing has changed if it fails.
            blocks = allocator.allocate(missing + 1)
            self._copy_on_write(index, blocks.pop(0), offset)
        else:
            blocks = allocator.allocate(missing)
            if offset and allocator.late:
                allocator.spare_late(self.table[index], offset)
        self.table += blocks
        self.data += data

    def _must_copy(self, index: int, missing: int) -> bool:
        """Whether block ``index`` has to be copied before anything is written into it."""
        if index < self.num_tree_blocks:
            return True
        allocator, block = self._cache.allocator, self.table[index]
        count = allocator.pool.refs[block]
        if count == 2 and block in allocator.tree.open_nodes and allocator.pool.num_free <= missing:
            # Better to hide the open end of our own prompt than to evict somebody's prefix.
            allocator.require(missing)
            allocator.tree.drop_open(block)
            return False
        return count > 1

    def _copy_on_write(self, index: int, target: int, num_tokens: int) -> None:
        """Hold a copy of block ``index`` in its place, with its first ``num_tokens`` tokens."""
        allocator = self._cache.allocator
        allocator.order_copy(self.table[index], target, num_tokens)
        allocator.counters.copies_on_write += 1
        if index < self.num_tree_blocks:
            self._cache.shorten_path(self, index)
        else:
            allocator.release(self.table[index:])
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
        self._check_changeable()
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
        self.num_counted = min(self.num_counted, num_tokens)
        if self.num_settled is not None:
            self.num_settled = min(self.num_settled, num_tokens)
        self.own_from = min(self.own_from, full)
        self._cache.allocator.release(private)

    def check_open(self) -> None:
        """Raise `SequenceClosedError` if the sequence was released."""
        if self.closed:
            raise SequenceClosedError("the sequence was released; acquire or fork a new one")

    def check_usable(self) -> None:
        """Raise if the sequence was released, or if what it holds is not to be trusted."""
        self.check_open()
        if self.withdrawn:
            raise RadixKVError("the sequence was withdrawn: release it, acquire its tokens anew")

    def _check_changeable(self) -> None:
        """The step that computes a sequence's tokens must find them where it was told."""
        self.check_usable()
        if self.promised_from is not None:
            raise RadixKVError("the sequence was committed as pending: settle or abort it first")
