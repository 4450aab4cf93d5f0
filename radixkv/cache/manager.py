"""PrefixCache: the façade over pool, tree and policy; all that the floors above call."""

from __future__ import annotations

from dataclasses import replace

from radixkv.cache.allocator import BlockAllocator
from radixkv.cache.copies import CopyOrder
from radixkv.cache.events import Announcer, EventSink, RemovalSink
from radixkv.cache.eviction import EvictionQueue
from radixkv.cache.hashing import (
    TOKEN_BYTES,
    GivenNamespace,
    TokenIds,
    check_namespace,
    default_block_hash,
    token_bytes,
)
from radixkv.cache.laws import check_laws
from radixkv.cache.match import Match, longest_match
from radixkv.cache.policies import make_policy
from radixkv.cache.pool import BlockPool
from radixkv.cache.render import TokensToText, render_tree
from radixkv.cache.residency import Residency
from radixkv.cache.retention import DEFAULT_RETENTION, Retention
from radixkv.cache.sequence import Sequence
from radixkv.cache.stats import CacheStats, Counters
from radixkv.cache.together import append_each, commit_each
from radixkv.cache.tree import RadixTree
from radixkv.cache.visibility import Visibility
from radixkv.config import CacheConfig
from radixkv.errors import RequestError


class PrefixCache:
    """A complete prefix cache for an engine: tokens in, block tables out; it never sees KV.

    One step of an engine: `acquire` or `Sequence.append`; `commit` with ``pending=True`` for what
    the step will compute; carry out `take_copies`; compute into `Sequence.slots`; `settle`, or
    `abort` if computing failed. Not thread-safe: one thread owns a cache.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.block_bytes = config.block_size * TOKEN_BYTES
        self.counters = Counters()
        self.pool = BlockPool(config.num_blocks)
        self._announcer = Announcer(self.block_bytes)
        if config.events is not None:
            self.listen(config.events)
        self.tree = RadixTree(
            self.pool,
            config.block_size,
            EvictionQueue(make_policy(config.eviction)),
            config.block_hash or default_block_hash,
            self.counters,
            self._announcer,
        )
        self.allocator = BlockAllocator(self.pool, self.tree, self.counters)
        self.sequences: dict[int, Sequence] = {}
        self.visibility = Visibility(self.allocator, self.sequences)

    # -- sequences -------------------------------------------------------------------------------

    def match(self, tokens: TokenIds, namespace: GivenNamespace = ()) -> int:
        """How many leading tokens are cached; reads only. O(edges) memcmps."""
        match = self._match(token_bytes(tokens), namespace)
        return match.num_blocks * self.block_size + match.source_tokens

    def _match(self, data: bytes, namespace: GivenNamespace) -> Match:
        root = self.tree.roots.get(check_namespace(namespace))
        return longest_match(root, data, 0, self.block_bytes)

    def acquire(
        self,
        tokens: TokenIds,
        namespace: GivenNamespace = (),
        *,
        retention: Retention = DEFAULT_RETENTION,
        resumed: bool = False,
        spare_blocks: int = 0,
    ) -> Sequence:
        """Start a sequence: share its longest cached prefix, reserve blocks for the rest.

        May split one edge, evict, and order one copy (reuse inside a block). What is matched is
        retained before anything is allocated.

        Parameters
        ----------
        tokens : ints (num_tokens,)
            At least one; all of them may turn out to be cached.
        namespace : tuple of str
            Blocks are shared only between sequences of one namespace (model, adapter, salt).
        retention : Retention
            How long the blocks will be wanted once the sequence has ended.
        resumed : bool
            The tokens have been counted before (a preempted request comes back).
        spare_blocks : int
            Blocks that must be left over, free or evictable, for others to go on.

        Raises
        ------
        RequestError
            If there are no tokens, or they are no int32.
        OutOfBlocksError
            If the rest does not fit. Nothing has been evicted and nothing is held then.
        """
        data = token_bytes(tokens)
        if not data:
            raise RequestError("a sequence needs at least one token")
        match = self._match(data, namespace)
        missing = -(-len(data) // self.block_bytes) - match.num_blocks
        # Refused before anything is touched, so that a retry never counts as a use.
        self.allocator.require(missing + spare_blocks, match)
        table = match.blocks()
        node = self.tree.hold(match, retention)
        try:
            table += self.allocator.allocate(missing)
        except BaseException:
            if node is not None:
                self.tree.unpin(node)
            raise
        sequence = Sequence(self, data, table, node, match.num_blocks, namespace, retention)
        self._take_over(sequence, match, 0)
        if not resumed:
            counters = self.counters
            counters.queries += 1
            sequence.num_counted = sequence.num_tokens
            counters.query_tokens += sequence.num_counted
            counters.hit_tokens += sequence.num_computed
            counters.copied_tokens += match.source_tokens
        self.sequences[id(sequence)] = sequence
        return sequence

    def _take_over(self, sequence: Sequence, match: Match, start: int) -> int:
        """Count what was matched as computed; copy the tokens before a divergence in a block.

        ``start`` is the first block that is new in the table. Returns the tokens gained.
        """
        full = sequence.num_tree_blocks
        if match.source_tokens:
            target = sequence.table[full]
            if match.source_block != target:
                self.allocator.order_copy(match.source_block, target, match.source_tokens)
        if self.allocator.pending:
            self.visibility.lean(sequence, start)
        gained = full * self.block_size + match.source_tokens - sequence.num_computed
        sequence.num_computed += gained
        sequence.num_cached += gained
        return gained

    def reuse(self, sequence: Sequence) -> int:
        """Take over what others have computed of this sequence's tokens since it was acquired.

        For prompts computed in chunks: call it before each chunk. May split one edge and order
        one copy. Returns the number of tokens that need not be computed any more.
        """
        sequence.check_usable()
        before, done, table = sequence.num_computed, sequence.num_tree_blocks, sequence.table
        if not sequence.cacheable or before // self.block_size != done or done == len(table):
            return 0
        if table[done] in self.allocator.pending:
            return 0  # The step being scheduled was told to write there.
        match = self.visibility.match_on(sequence, len(sequence.data))
        full = done + match.num_blocks
        if match.source_tokens and self.pool.refs[table[full]] != 1:
            match.forget_source()
        if full * self.block_size + match.source_tokens <= before:
            return 0
        if match.num_blocks:
            self.visibility.advance(sequence, match)
        else:
            self.tree.use(match, sequence.retention)
        gained = self._take_over(sequence, match, done)
        hits = min(before + gained, sequence.num_counted) - before
        self.counters.hit_tokens += max(hits, 0)
        self.counters.copied_tokens += max(min(hits, match.source_tokens), 0)
        return gained

    def append_each(self, sequences: list[Sequence], tokens: bytes) -> int:
        """`Sequence.append` for each of these, a token of four bytes each; O(sequences).

        Returns how many have got theirs: all, unless the next one finds no block.
        """
        return append_each(sequences, tokens, self.allocator)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence over the same blocks; O(blocks), nothing is computed.

        What is computed becomes visible first. Blocks with slots still to be computed are not
        shared: the branch gets its own.

        Raises
        ------
        OutOfBlocksError
            Only if there are such blocks and none to give. What is computed is visible all the
            same, and blocks that the tree has already were given back for its own.
        """
        sequence.check_usable()
        self.commit(sequence, sequence.num_computed)
        computed, done = sequence.num_computed, sequence.num_tree_blocks
        shared = len(sequence.table)
        if computed < sequence.num_tokens:
            shared = computed // self.block_size
        own = self.allocator.allocate(len(sequence.table) - shared)
        if own and computed % self.block_size:
            self.allocator.order_copy(sequence.table[shared], own[0], computed % self.block_size)
        self.pool.retain(sequence.table[done:shared])
        if sequence.node is not None:
            self.tree.pin(sequence.node)
        table = sequence.table[:shared] + own
        namespace, retention = sequence.namespace, sequence.retention
        branch = Sequence(self, sequence.data, table, sequence.node, done, namespace, retention)
        branch.num_cached = branch.num_computed = computed
        branch.cacheable = sequence.cacheable
        self.visibility.lean(branch, 0)
        self.counters.forks += 1
        self.sequences[id(branch)] = branch
        return branch

    def release(self, sequence: Sequence, retention: Retention | None = None) -> None:
        """End a sequence. Its committed blocks stay cached until they are evicted.

        Settle or abort a step before the sequences it computed are released: what is still
        pending of a sequence is withdrawn here, with all that was built on it.

        Parameters
        ----------
        sequence : Sequence
        retention : Retention, optional
            `EPHEMERAL` if nobody will ask for its own blocks again (a branch that lost, a closed
            context): those that nobody else has used go first from now on. Any other hint lets
            all its blocks stay as long as it asks, at least.

        Raises
        ------
        SequenceClosedError
            If it was released before.
        """
        sequence.check_open()
        if sequence.num_settled is not None:
            self.visibility.end(sequence)
        private = sequence.table[sequence.num_tree_blocks :]
        last = self.tree.open_nodes.get(private[0]) if private else None
        last = last or sequence.node
        if last is not None:
            self.tree.touch(last)
        if private:
            self.allocator.release(private)
        if sequence.node is not None:
            self.tree.unpin(sequence.node)
        if last is not None and retention is not None:
            if retention.ephemeral:
                self.tree.forget(last, sequence.own_from, retention)
            else:
                last.strengthen(retention, self.tree.queue.clock)
        sequence.closed = True
        del self.sequences[id(sequence)]

    def shorten_path(self, sequence: Sequence, num_blocks: int) -> None:
        """Let the sequence end at its first ``num_blocks`` blocks of the tree; may split an edge.

        The blocks behind stay in its table for the caller to replace or drop.
        """
        node = sequence.node
        while node is not None and node.start >= num_blocks:
            node = node.parent
        if node is not None and node.parent is not None:
            node = self.tree.split_at(node, num_blocks - node.start)
        else:
            node = None
        self.tree.repin(sequence.node, node)
        sequence.node, sequence.num_tree_blocks = node, num_blocks

    # -- visibility ------------------------------------------------------------------------------

    def commit(
        self,
        sequence: Sequence,
        num_tokens: int | None = None,
        *,
        include_open: bool = False,
        pending: bool = False,
    ) -> None:
        """Make the first ``num_tokens`` tokens' blocks visible to everyone; O(new tokens).

        A full block that the tree already has is kept once: the table is re-pointed to it and its
        own copy freed.

        Parameters
        ----------
        sequence : Sequence
        num_tokens : int, optional
            Tokens whose KV is computed; all of them unless given.
        include_open : bool
            Make the last block visible too if it is not full, for others to copy from. Only at
            the end of the tokens: a block with slots still to be computed is never shared.
        pending : bool
            The KV will be computed by the step being scheduled; `settle` or `abort` must follow.
            Until then the sequence can be forked or released, but not changed.
        """
        if sequence.closed or sequence.withdrawn:
            sequence.check_usable()
        length = len(sequence.data) // TOKEN_BYTES
        stop = length if num_tokens is None else num_tokens
        if not sequence.num_computed <= stop <= length:
            raise RequestError(
                f"cannot commit {stop} of {length} tokens, of which "
                f"{sequence.num_computed} are computed"
            )
        if pending:
            self.visibility.promise(sequence, stop)
        sequence.num_computed = stop
        if not sequence.cacheable:
            return
        full, offset = divmod(stop, self.block_size)
        shown = self.visibility.commit(sequence, full)
        if shown and include_open and offset and stop == length:
            self.visibility.commit_open(sequence)

    def commit_each(self, sequences: list[Sequence]) -> None:
        """`commit` for each of these, of all its tokens; O(sequences + new blocks)."""
        commit_each(sequences, self.block_size, self.visibility)

    def settle(self) -> None:
        """The step has run: what was committed as pending is computed."""
        self.visibility.settle()

    def abort(self) -> None:
        """The step has failed: withdraw what was committed as pending, with all built on it.

        Sequences that the step was to serve keep their blocks until they are released, which is
        all that can be done with them: they are ``withdrawn``.
        Copies taken for the step must have been carried out: only late ones are forgotten.
        """
        self.visibility.abort()

    def withdraw(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back what is visible of a sequence beyond ``num_tokens``, and all built on it.

        For KV that is not to be trusted. The sequence and others that hold the same blocks are
        ``withdrawn``: they keep their blocks until they are released, which is all that can be
        done with them.
        """
        sequence.check_open()
        if num_tokens < 0:
            raise RequestError(f"cannot withdraw a sequence to {num_tokens} tokens")
        self.visibility.withdraw(sequence, num_tokens)

    def reset(self) -> None:
        """Forget everything cached. Running sequences keep their blocks, and to themselves.

        For weights that have changed, say: nothing computed before becomes visible again.
        """
        for root in list(self.tree.roots.values()):
            for node in list(root.children or ()):
                self.visibility.remove(node, "reset")
        for sequence in self.sequences.values():
            self.visibility.hide(sequence)

    # -- looking in ------------------------------------------------------------------------------

    def listen(self, sink: EventSink) -> None:
        """Have a sink called with each `BlocksStored` and `BlocksRemoved` from now on.

        It must not touch the cache. Each event costs a chained hash for every block of its path.
        """
        self._announcer.sinks.append(sink)

    def watch_removals(self, watcher: RemovalSink) -> None:
        """Have a watcher called with each `Removal` from now on; it must not touch the cache."""
        self._announcer.removal_sinks.append(watcher)

    def measure_residency(self) -> Residency:
        """Measure from now on how long blocks stay and wait; once for all who ask."""
        if self._announcer.residency is None:
            self._announcer.residency = Residency(self.pool.num_blocks)
        return self._announcer.residency

    def take_copies(self) -> list[CopyOrder]:
        """Block copies ordered since the last call; carry them out before anything is written."""
        return self.allocator.take_copies()

    def stats(self) -> CacheStats:
        """The counters and the pool's state now; O(nodes)."""
        nodes = list(self.tree.nodes())
        cached = sum(len(node.blocks) for node in nodes)
        free, evictable = self.pool.num_free, self.tree.num_evictable
        return CacheStats(
            num_blocks=self.pool.num_blocks,
            block_size=self.block_size,
            free=free,
            held_only=self.pool.num_blocks - free - cached,
            cached_only=evictable,
            held_and_cached=cached - evictable,
            sequences=len(self.sequences),
            nodes=len(nodes),
            cached_tokens=sum(len(node.tokens) for node in nodes) // TOKEN_BYTES,
            counters=replace(self.counters),
        )

    def render(self, decode: TokensToText | None = None) -> str:
        """The tree as text, a line a node, with the text of its tokens if they can be decoded."""
        return render_tree(self.tree, decode)

    def check(self) -> None:
        """Check every law that the state can show; O(everything).

        Raises
        ------
        CacheInvariantError
            Naming the law that was broken.
        """
        check_laws(self.allocator, list(self.sequences.values()))
