"""One state machine with three oracles: structure, content, and a naive dictionary.

Structure: `PrefixCache.check`. Content: `FakeStore`, read through every table after every step.
Dictionary: all token strings that were ever shown in a namespace (``may``), and those that cannot
have been lost since (``must``): a match returns at least the longest prefix shared with one of the
latter and at most with one of the former, to the token. While nothing was lost the two are equal.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store import FakeStore, Write, write_of

from radixkv.cache import EPHEMERAL, PrefixCache, Retention, Sequence
from radixkv.config import CacheConfig
from radixkv.errors import OutOfBlocksError

Tokens = tuple[int, ...]
Result = TypeVar("Result")

NAMESPACES = [(), ("a", "bc"), ("ab", "c")]
HASHES: list[Callable[[bytes], int] | None] = [
    None,
    lambda block: sum(block) & 0xFF,  # 8 bits
    lambda block: 7,
]
HINTS = [Retention(), EPHEMERAL, Retention(priority=2), Retention(priority=1, expires_at=0.0)]

picks = st.integers(0, 1 << 16)
raw_tokens = st.binary(min_size=1, max_size=40)


class InjectedError(Exception):
    """An allocation that fails because the test wants it to."""


class FailingFree(array):  # type: ignore[type-arg]
    """A free list from which the ``countdown``-th allocation from now on fails; 0 for none.

    Faults come in with the data: methods of compiled classes cannot be replaced.
    """

    countdown = 0

    def __getitem__(self, index: Any) -> Any:
        if self.countdown and isinstance(index, slice) and index.step is None:
            self.countdown -= 1
            if not self.countdown:
                raise InjectedError
        return super().__getitem__(index)


def shared_prefix(left: Tokens, right: Tokens) -> int:
    for length, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return length
    return min(len(left), len(right))


class CacheMachine(RuleBasedStateMachine):
    """Random calls in any order; three oracles after each."""

    fired: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.history: list[Tokens] = [(0,)]
        self.writes: list[Write] = []
        self.step_open = False
        self.must: dict[tuple[str, ...], set[Tokens]] = {}
        self.may: dict[tuple[str, ...], set[Tokens]] = {}

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 16]),
        num_blocks=st.sampled_from([3, 5, 9, 14, 24, 60]),
        block_hash=st.sampled_from(HASHES),
        policy=st.sampled_from(["lru", "plain-lru", "fifo", "priority"]),
        vocabulary=st.integers(1, 3),
    )
    def make(
        self,
        block_size: int,
        num_blocks: int,
        block_hash: Callable[[bytes], int] | None,
        policy: str,
        vocabulary: int,
    ) -> None:
        self.cache = PrefixCache(
            CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                block_hash=block_hash,
                eviction=policy,
            )
        )
        self.vocabulary = vocabulary
        self.store = FakeStore(self.cache)
        self.free = FailingFree("i", self.cache.pool._free)
        self.cache.pool._free = self.free

    # -- helpers ---------------------------------------------------------------------------------

    def saw(self, *what: str) -> None:
        for name in what:
            self.fired[name] += 1

    def tokens_from(self, raw: bytes) -> Tokens:
        return tuple(byte % self.vocabulary for byte in raw)

    def pick(self, index: int, *, usable: bool = True, settled: bool = False) -> Sequence | None:
        """A live sequence that may be used (and changed), or None."""
        fit = [
            sequence
            for sequence in self.live
            if not (usable and sequence.withdrawn)
            and not (settled and sequence.promised_from is not None)
        ]
        return fit[index % len(fit)] if fit else None

    def attempt(self, call: Callable[[], Result]) -> Result | None:
        """A call that may run out of blocks, after which nothing may have changed."""
        tables = [(s, s.table.tolist(), s.tokens.tolist(), s.num_computed) for s in self.live]
        free, evictable = self.cache.pool.num_free, self.cache.tree.num_evictable
        evicted = self.cache.counters.blocks_evicted
        deduplicated = self.cache.counters.blocks_deduplicated
        queries = self.cache.counters.query_tokens, self.cache.counters.hit_tokens
        try:
            return call()
        except (OutOfBlocksError, InjectedError) as error:
            assert len(self.cache.sequences) == len(self.live), "a failed call left a sequence"
            for sequence, _, tokens, computed in tables:
                assert sequence.tokens.tolist() == tokens
                assert sequence.num_computed == computed
            now = self.cache.counters
            assert (now.query_tokens, now.hit_tokens) == queries, "law 13: a retry was counted"
            if isinstance(error, OutOfBlocksError):
                self.saw("out of blocks")
                # What a fork shows first may be there already: duplicates are given back.
                duplicates = now.blocks_deduplicated - deduplicated
                self._was_refused(error, free + evictable, duplicates, evicted)
            else:
                self.saw("injected failure")
            return None
        finally:
            self.free.countdown = 0
            if self.cache.counters.blocks_evicted > evicted:
                self.saw("eviction")
                self.must.clear()

    def _was_refused(
        self, error: OutOfBlocksError, available: int, duplicates: int, evicted: int
    ) -> None:
        pool, tree = self.cache.pool, self.cache.tree
        assert self.cache.counters.blocks_evicted == evicted, "a refused call evicted"
        gained = pool.num_free + tree.num_evictable - available
        assert 0 <= gained <= duplicates, "a refused call kept blocks, or gave some away"
        assert error.needed > error.free + error.evictable
        assert error.free + error.evictable + error.held == pool.num_blocks

    def longest(self, shown: dict[tuple[str, ...], set[Tokens]], ns: Any, tokens: Tokens) -> int:
        return max((shared_prefix(tokens, other) for other in shown.get(ns, ())), default=0)

    def expect_match(self, namespace: tuple[str, ...], tokens: Tokens, found: int) -> None:
        low = self.longest(self.must, namespace, tokens)
        high = self.longest(self.may, namespace, tokens)
        assert low <= found <= high, f"{found} tokens matched, but {low} to {high} were shown"

    def show(self, sequence: Sequence, num_tokens: int, *, certain: bool = True) -> None:
        if sequence.cacheable and num_tokens:
            shown = tuple(sequence.tokens[:num_tokens].tolist())
            self.may.setdefault(sequence.namespace, set()).add(shown)
            if certain:
                self.must.setdefault(sequence.namespace, set()).add(shown)

    # -- rules: beginning ------------------------------------------------------------------------

    @rule(raw=raw_tokens, namespace=st.sampled_from(NAMESPACES), hint=st.sampled_from(HINTS))
    def acquire_fresh(self, raw: bytes, namespace: tuple[str, ...], hint: Retention) -> None:
        self.saw("acquire fresh")
        self._acquire(self.tokens_from(raw), namespace, hint)

    @rule(index=picks, raw=raw_tokens, namespace=st.sampled_from(NAMESPACES))
    def acquire_extending(self, index: int, raw: bytes, namespace: tuple[str, ...]) -> None:
        self.saw("acquire extending")
        base = self.history[index % len(self.history)]
        self._acquire(base + self.tokens_from(raw), namespace, HINTS[0])

    @rule(index=picks, cut=picks, raw=raw_tokens, namespace=st.sampled_from(NAMESPACES))
    def acquire_diverging(
        self, index: int, cut: int, raw: bytes, namespace: tuple[str, ...]
    ) -> None:
        self.saw("acquire diverging")
        base = self.history[index % len(self.history)]
        self._acquire(base[: cut % len(base)] + self.tokens_from(raw), namespace, HINTS[0])

    @rule(index=picks, cut=picks, namespace=st.sampled_from(NAMESPACES), resumed=st.booleans())
    def acquire_at_a_block(
        self, index: int, cut: int, namespace: tuple[str, ...], resumed: bool
    ) -> None:
        base = self.history[index % len(self.history)]
        blocks = len(base) // self.cache.block_size
        if blocks:
            self.saw("acquire at a block")
            length = (1 + cut % blocks) * self.cache.block_size
            self._acquire(base[:length], namespace, HINTS[0], resumed=resumed)

    @rule(index=picks)
    def acquire_twin(self, index: int) -> None:
        if self.live:
            self.saw("acquire twin")
            other = self.live[index % len(self.live)]
            if other.num_tokens:
                self._acquire(tuple(other.tokens.tolist()), other.namespace, other.retention)

    def _acquire(
        self, tokens: Tokens, namespace: tuple[str, ...], hint: Retention, resumed: bool = False
    ) -> Sequence | None:
        size = self.cache.block_size
        tokens = tokens[: min(5 * size + 2, max(size * self.cache.pool.num_blocks * 2 // 3, 1))]
        before = self.cache.match(tokens, namespace)
        counters = self.cache.counters
        queries, hits = counters.query_tokens, counters.hit_tokens
        sequence = self.attempt(
            lambda: self.cache.acquire(tokens, namespace, retention=hint, resumed=resumed)
        )
        if sequence is None:
            if len(self.live) > 1:
                self._release(self.live[0], None)  # room for the next
            return None
        assert sequence.num_cached == sequence.num_computed == before
        assert sequence.tokens.tolist() == list(tokens)
        counted = 0 if resumed else 1
        assert counters.query_tokens - queries == counted * len(tokens), "law 13"
        assert counters.hit_tokens - hits == counted * before, "law 13"
        self.live.append(sequence)
        self.history = [*self.history[-20:], tokens]
        if before % self.cache.block_size:
            self.saw("reuse inside a block")
        return sequence

    @precondition(lambda self: not self.step_open)
    @rule(index=picks, cut=picks, raw=raw_tokens, include_open=st.booleans(), keep=st.booleans())
    def request(self, index: int, cut: int, raw: bytes, include_open: bool, keep: bool) -> None:
        """A prompt like an earlier one, computed at once; a short answer; the end."""
        self.saw("request")
        base = self.history[index % len(self.history)]
        prompt = base[: 1 + cut % len(base)] + self.tokens_from(raw[: len(raw) // 4])
        sequence = self._acquire(prompt, NAMESPACES[0], HINTS[0])
        if sequence is not None:
            self._compute(sequence, sequence.num_tokens, include_open)
            if raw[0] & 1:
                self._grow_one(sequence, self.tokens_from(raw)[0])
            if not keep:
                self._release(sequence, None)

    @rule(index=picks)
    def fork(self, index: int) -> None:
        parent = self.pick(index)
        if parent is not None:
            self._fork(parent)

    @precondition(lambda self: not self.step_open)
    @rule(raw=raw_tokens, length=picks)
    def fork_half_computed(self, raw: bytes, length: int) -> None:
        parent = self._acquire(self.tokens_from(raw), NAMESPACES[0], HINTS[0])
        if parent is not None:
            self._compute(parent, self._stop(parent, length, False), False)
            self._fork(parent)

    def _fork(self, parent: Sequence) -> None:
        self.saw("fork")
        waiting = parent.num_computed < parent.num_tokens
        branch = self.attempt(parent.fork)
        if branch is not None:
            self.saw("fork of an unfinished prompt" if waiting else "fork of all")
            if parent.promised_from is not None:
                self.saw("fork of a promise")
            self.live.append(branch)
            assert branch.tokens.tolist() == parent.tokens.tolist()
            self._show_full(parent)

    # -- rules: growing and shrinking ------------------------------------------------------------

    @rule(index=picks, raw=raw_tokens)
    def append(self, index: int, raw: bytes) -> None:
        token = self.tokens_from(raw)[0]
        self._grow(index, (token,), lambda sequence: sequence.append(token), "append")

    @rule(index=picks, raw=raw_tokens)
    def extend(self, index: int, raw: bytes) -> None:
        tokens = self.tokens_from(raw)[: 2 * self.cache.block_size + 1]
        self._grow(index, tokens, lambda sequence: sequence.extend(list(tokens)), "extend")

    def _grow_one(self, sequence: Sequence, token: int) -> None:
        self._grow_to(sequence, (token,), lambda grown: grown.append(token), "append")

    def _grow(
        self, index: int, tokens: Tokens, call: Callable[[Sequence], None], name: str
    ) -> None:
        sequence = self.pick(index, settled=True)
        if sequence is not None:
            self._grow_to(sequence, tokens, call, name)

    def _grow_to(
        self, sequence: Sequence, tokens: Tokens, call: Callable[[Sequence], None], name: str
    ) -> None:
        if sequence.num_tokens > 8 * self.cache.block_size + 8:
            return
        before, copies = sequence.num_tokens, self.cache.counters.copies_on_write
        tree, free = self.cache.tree, self.cache.pool.num_free
        opened = set(tree.open_nodes)

        def grow() -> bool:
            call(sequence)
            return True

        evicted = self.cache.counters.blocks_evicted
        if self.attempt(grow):
            self.saw(name)
            assert tuple(sequence.tokens[before:].tolist()) == tokens
            if self.cache.counters.copies_on_write > copies:
                self.saw("copy on write")
            if before % self.cache.block_size:
                block = sequence.table[before // self.cache.block_size]
                assert self.cache.pool.refs[block] == 1, "law 6: the slot is not writable"
        if self.cache.counters.blocks_evicted == evicted and opened - tree.open_nodes.keys():
            self.saw("hidden open end")
            self.must.clear()
            assert free <= len(tokens), "an open end was hidden though there was room"

    @rule(index=picks, length=picks)
    def truncate(self, index: int, length: int) -> None:
        sequence = self.pick(index, settled=True)
        if sequence is None:
            return
        self.saw("truncate")
        length %= sequence.num_tokens + 1
        if length < sequence.num_tree_blocks * self.cache.block_size:
            inside = length % self.cache.block_size
            self.saw("truncate inside a tree's block" if inside else "truncate in the tree")
        sequence.truncate(length)
        assert sequence.num_tokens == length

    # -- rules: computing ------------------------------------------------------------------------

    @precondition(lambda self: not self.step_open)
    @rule(index=picks, length=picks, include_open=st.booleans(), finish=st.booleans())
    def compute(self, index: int, length: int, include_open: bool, finish: bool) -> None:
        """A step for one sequence that runs at once."""
        sequence = self.pick(index)
        if sequence is None:
            return
        self._compute(sequence, self._stop(sequence, length, finish), include_open)

    @precondition(lambda self: not self.step_open)
    @rule(index=picks, raw=raw_tokens, include_open=st.booleans())
    def decode(self, index: int, raw: bytes, include_open: bool) -> None:
        sequence = self.pick(index)
        if sequence is not None:
            self.saw("decode")
            self._compute(sequence, sequence.num_tokens, include_open)
            self._grow_one(sequence, self.tokens_from(raw)[0])

    def _compute(self, sequence: Sequence, stop: int, include_open: bool) -> None:
        self.store.run(self.cache.take_copies())
        self.store.run([], [write_of(self.cache, sequence, sequence.num_computed, stop)])
        deduplicated = self.cache.counters.blocks_deduplicated
        self.cache.commit(sequence, stop, include_open=include_open)
        self.saw("commit with the open end" if include_open else "commit")
        if self.cache.counters.blocks_deduplicated > deduplicated:
            self.saw("deduplication")
        self._show_full(sequence)
        if include_open and stop == sequence.num_tokens:
            self.show(sequence, stop)

    def _stop(self, sequence: Sequence, length: int, finish: bool) -> int:
        if finish:
            return sequence.num_tokens
        missing = sequence.num_tokens - sequence.num_computed
        return sequence.num_computed + length % (missing + 1)

    def _show_full(self, sequence: Sequence) -> None:
        size = self.cache.block_size
        full = sequence.num_computed // size
        shown = min(sequence.num_tree_blocks, full)
        if sequence.cacheable and not self.cache.allocator.pending and shown < full:
            first = sequence.block_table[shown]
            assert self.cache.pool.refs[first] > 1, "computed blocks were not shown"
            self.saw("blocks that forks share wait for one holder")
        self.show(sequence, shown * size)

    @rule(index=picks, length=picks, include_open=st.booleans(), finish=st.booleans())
    def schedule(self, index: int, length: int, include_open: bool, finish: bool) -> None:
        """Promise what the step being scheduled will compute."""
        sequence = self.pick(index, settled=True)
        if sequence is None or not sequence.num_tokens:
            return
        self._schedule(sequence, self._stop(sequence, length, finish), include_open)

    def _schedule(self, sequence: Sequence, stop: int, include_open: bool) -> None:
        start = sequence.num_computed
        self.writes.append(write_of(self.cache, sequence, start, stop))
        self.step_open = True
        self.cache.commit(sequence, stop, include_open=include_open, pending=True)
        self.saw("schedule")
        self._show_full(sequence)
        if include_open and stop == sequence.num_tokens:
            self.show(sequence, stop, certain=False)

    @rule(index=picks, cut=picks, raw=raw_tokens, include_open=st.booleans())
    def schedule_two(self, index: int, cut: int, raw: bytes, include_open: bool) -> None:
        """Two prompts of one step, of which one goes on from a part of the other."""
        first = self.pick(index, settled=True)
        if first is None or not first.num_tokens:
            return
        self.saw("schedule two")
        tokens = tuple(first.tokens.tolist())
        self._schedule(first, first.num_tokens, include_open)
        prompt = tokens[: 1 + cut % len(tokens)] + self.tokens_from(raw[: len(raw) // 8])
        second = self._acquire(prompt, first.namespace, HINTS[0])
        if second is not None and raw[0] & 1:
            self._schedule(second, second.num_tokens, include_open)
        elif second is not None:
            self._fork(second)
            self._release(second, None)

    @rule(raw=raw_tokens, include_open=st.booleans(), computed=st.booleans())
    def schedule_twins(self, raw: bytes, include_open: bool, computed: bool) -> None:
        """Two of one prompt that know nothing of each other; the first may be computed before."""
        tokens = self.tokens_from(raw)
        first = self._acquire(tokens, NAMESPACES[0], HINTS[0])
        second = self._acquire(tokens, NAMESPACES[0], HINTS[0])
        if first is None or second is None or first.closed:
            return
        self.saw("schedule twins")
        if computed and not self.step_open:
            self._compute(first, first.num_tokens, include_open)
            if raw[0] & 1:  # What the first leaves is adopted.
                self._release(first, None)
                self._compute(second, second.num_tokens, include_open)
                return
        else:
            self._schedule(first, first.num_tokens, include_open)
        self._schedule(second, second.num_tokens, include_open)

    @precondition(lambda self: self.step_open)
    @rule()
    def run_step(self) -> None:
        self.saw("run a step")
        orders = self.cache.take_copies()
        if any(order.after_write for order in orders):
            self.saw("late copy")
        self.store.run(orders, self.writes)
        self.cache.settle()
        self._close_step()

    @rule(index=picks)
    def abort_step(self, index: int) -> None:
        """The step fails before it computes anything; allowed between any two calls."""
        if index % 3:
            return
        self.saw("abort" if self.step_open else "abort of nothing")
        waiting = [s for s in self.live if s.num_settled is not None]
        self.cache.abort()
        assert all(sequence.withdrawn for sequence in waiting)
        self.must.clear()
        self._close_step()

    def _close_step(self) -> None:
        self.writes.clear()
        self.step_open = False
        assert not self.cache.allocator.pending
        assert all(sequence.promised_from is None for sequence in self.live)

    @rule(index=picks)
    def reuse(self, index: int) -> None:
        sequence = self.pick(index)
        if sequence is None:
            return
        self.saw("reuse")
        before, cached = sequence.num_computed, sequence.num_cached
        tokens = tuple(sequence.tokens.tolist())
        possible = self.longest(self.must, sequence.namespace, tokens)
        gained = self.cache.reuse(sequence)
        assert sequence.num_computed == before + gained
        assert sequence.num_cached == cached + gained
        if gained:
            self.saw("reuse that gained")
        fresh = sequence.cacheable and sequence.num_tree_blocks >= before // self.cache.block_size
        if fresh and not self.step_open:
            full = possible // self.cache.block_size * self.cache.block_size
            assert sequence.num_computed >= min(full, sequence.num_tokens), "reuse missed blocks"

    # -- rules: ending ---------------------------------------------------------------------------

    @rule(index=picks, hint=st.sampled_from([None, *HINTS]))
    def release(self, index: int, hint: Retention | None) -> None:
        sequence = self.pick(index, usable=False)
        if sequence is None:
            return
        self.saw("release" if hint is None else "release with a hint")
        self._release(sequence, hint)

    def _release(self, sequence: Sequence, hint: Retention | None) -> None:
        if sequence.promised_from is not None:
            self.saw("release of a promise")
            self.must.clear()
        others = [s for s in self.live if s.withdrawn and s is not sequence]
        self.cache.release(sequence, hint)
        self.live.remove(sequence)
        if any(s.withdrawn and s not in others for s in self.live):
            self.saw("withdrawn with the promise of another")
        self._drop_writes()

    @rule(index=picks, length=picks)
    def withdraw(self, index: int, length: int) -> None:
        sequence = self.pick(index, usable=False)
        if sequence is None or length % 3:
            return
        self.saw("withdraw")
        length //= 3
        length %= sequence.num_computed + 1
        waiting = self.cache.allocator.take_copies()
        self.store.run([order for order in waiting if not order.after_write])
        self.cache.allocator._orders = [order for order in waiting if order.after_write]
        self.store.poison(sequence, length)
        self.cache.withdraw(sequence, length)
        self.must.clear()
        self._drop_writes()
        assert sequence.withdrawn
        if sum(other.withdrawn for other in self.live) > 1:
            self.saw("withdrawn with another")

    def _drop_writes(self) -> None:
        self.writes = [w for w in self.writes if w.sequence.promised_from is not None]
        self.writes = [w for w in self.writes if not w.sequence.closed]

    @rule(count=st.integers(1, 12))
    def evict_pressure(self, count: int) -> None:
        blocks = self.attempt(lambda: self.cache.allocator.allocate(count))
        if blocks is not None:
            self.saw("pressure")
            self.cache.allocator.release(blocks)

    @rule(index=picks)
    def reset(self, index: int) -> None:
        if index % 4:  # rarely, or nothing is ever cached for long
            return
        self.saw("reset")
        self.cache.reset()
        assert not self.cache.tree.roots
        self.may.clear()
        self.must.clear()

    @rule(countdown=st.integers(1, 2))
    def arm(self, countdown: int) -> None:
        """The k-th allocation from now on fails, if it belongs to the next call."""
        self.free.countdown = countdown

    # -- oracles ---------------------------------------------------------------------------------

    @invariant()
    def laws_hold(self) -> None:
        self.cache.check()

    @invariant()
    def everyone_reads_their_own(self) -> None:
        if not self.step_open:
            self.store.run(self.cache.take_copies())
        orders = list(self.cache.allocator._orders)
        self.store.poison_free(orders)
        ahead = self.store.clone()
        ahead.run(orders, self.writes)
        for sequence in self.live:
            ahead.verify(sequence)

    @invariant()
    def matches_are_exact(self) -> None:
        clock = self.cache.tree.clock
        for tokens in self.history[-4:]:
            for namespace in NAMESPACES[: 1 + len(self.may)]:
                self.expect_match(namespace, tokens, self.cache.match(tokens, namespace))
        assert self.cache.tree.clock == clock, "law 10: looking refreshed something"

    @invariant()
    def the_right_leaf_goes_first(self) -> None:
        queue = self.cache.tree.queue
        if len(queue):
            tree = self.cache.tree
            leaves = [n for n in tree.nodes() if n.children is None and tree.num_unheld(n)]
            key = queue.policy.key
            first = min(leaves, key=lambda n: (key(n, queue.clock()), n.serial))
            assert queue.victim() is first, "the policy was not obeyed"

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.live:
            self.cache.release(sequence)
        self.cache.check()
        assert (
            self.cache.pool.num_free + self.cache.tree.num_evictable == self.cache.pool.num_blocks
        )
        self.cache.reset()
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks, "law 12: blocks leaked"
