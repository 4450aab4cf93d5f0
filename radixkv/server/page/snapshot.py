"""Look: all the page shows, taken between two steps of the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixkv.cache import Namespace
from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.node import RadixNode, RootNode
from radixkv.cache.survey import PoolView, TreeView, survey_pool, survey_tree, tail_of
from radixkv.engine import Request
from radixkv.llm import LLM
from radixkv.server.page.pulse import Pulse, totals
from radixkv.server.page.removals import LoggedRemoval, RemovalLog

# Nodes, holders and waiting requests beyond these are counted and not shown.
MOST_NODES = 1000
MOST_HOLDERS = 256
MOST_WAITING = 50
# Cells of the heat map; each stands for several blocks where there are more of them.
MOST_CELLS = 2048
# Tokens of a node, and of a holder's end, that its label is made of.
LABEL_TOKENS = 24

FREE, HELD, CACHED, BOTH = range(4)


@dataclass(frozen=True, slots=True)
class Holder:
    """A sequence that holds blocks: of a request that runs, or of a context between two of them.

    Attributes
    ----------
    name : str
        The request's id, with the continuation's number behind a slash where there are several.
    kind : str
        "request" or "context"; a context's sequence stays when its request has ended.
    ends_at : int
        Serial of the node at which it ends; 0 if it holds no full block of the tree.
    num_tokens, num_computed, num_blocks, num_own : int
        ``num_own`` counts blocks that the tree does not show.
    num_generated : int
    text : str or None
        The end of what was generated, where it is known as text.
    tail : bytes
        The last tokens, for their text; empty where ``text`` is known.
    """

    key: int
    name: str
    kind: str
    namespace: Namespace
    ends_at: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    num_own: int
    num_generated: int
    text: str | None
    tail: bytes


@dataclass(slots=True)
class Snapshot:
    """Plain data, to be named and sent by another thread.

    Attributes
    ----------
    spaces : list of tuple of str
        The namespaces that nodes and holders name by their places.
    nodes : list of tuple
        For each node its serial, its parent's (0 below a namespace), its namespace, blocks before
        it, blocks, tokens, sequences that hold it, the tree's clock when it was made, hits, hint (1
        ephemeral, 2 with a priority), and children that are not given.
    heads : list of bytes
        Their first tokens.
    used_at : list of float
        When each was used last, in seconds by the pulse's clock.
    cpu_seconds : float
        What taking it cost the engine's thread.
    """

    spaces: list[Namespace]
    nodes: list[tuple[int, ...]]
    heads: list[bytes]
    used_at: list[float]
    holders: list[Holder]
    num_holders: int
    waiting: list[dict[str, Any]]
    num_waiting: int
    num_running: int
    pool: dict[str, Any]
    stats: dict[str, Any]
    removals: list[LoggedRemoval]
    cpu_seconds: float = 0.0


@dataclass
class Look:
    """Takes snapshots on the engine's thread, when something has changed.

    Attributes
    ----------
    shown : dict of int to RadixNode
        The nodes of the last snapshot, by their serials, for whoever asks for their tokens.
    """

    pulse: Pulse
    removals: RemovalLog
    shown: dict[int, RadixNode] = field(default_factory=dict)
    _mark: tuple[object, ...] = ()

    def take(self, llm: LLM) -> Snapshot | None:
        """All that is to be seen; None if nothing has changed since the last time."""
        begin = time.thread_time()
        mark = _mark_of(llm)
        if mark == self._mark:
            return None
        self._mark = mark
        now = self.pulse.clock()
        self.pulse.clocks.note(llm.cache.tree.clock, now)
        view = survey_tree(llm.cache, MOST_NODES)
        self.shown = {node.serial: node for node in view.nodes}
        spaces = list(llm.cache.tree.roots)
        scheduler = llm.engine.scheduler
        pool = survey_pool(llm.cache)
        snapshot = Snapshot(
            spaces=spaces,
            nodes=_rows(view, {space: place for place, space in enumerate(spaces)}),
            heads=[bytes(node.tokens[: LABEL_TOKENS * TOKEN_BYTES]) for node in view.nodes],
            used_at=self.pulse.clocks.when_each([node.last_used for node in view.nodes], now),
            holders=_holders(llm),
            num_holders=len(llm.cache.sequences),
            waiting=[_waiting(request) for request in scheduler.waiting[:MOST_WAITING]],
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            pool=_heat_map(pool),
            stats=_stats(llm, self.pulse, pool, self.removals, now),
            removals=self.removals.newest(),
        )
        snapshot.cpu_seconds = time.thread_time() - begin
        return snapshot

    def forget(self) -> None:
        """Nobody looks: keep no node alive, and take the next snapshot whatever has happened."""
        self.shown = {}
        self._mark = ()


def _mark_of(llm: LLM) -> tuple[object, ...]:
    """Differs whenever what is seen does; O(1)."""
    cache, scheduler = llm.cache, llm.engine.scheduler
    return (
        llm.engine.counters.steps,
        llm.engine.counters.requests,
        cache.tree.clock,
        cache.tree.num_evictable,
        cache.pool.num_free,
        cache.counters.forks,
        cache.counters.blocks_stored,
        len(cache.sequences),
        len(scheduler.holds),
        len(scheduler.waiting),
        len(scheduler.running),
    )


def _rows(view: TreeView, places: dict[Namespace, int]) -> list[tuple[int, ...]]:
    """The nodes as the page reads them; see `Snapshot`."""
    rows: list[tuple[int, ...]] = []
    spaces: dict[int, int] = {}
    holders, hidden = view.holders.get, view.num_hidden.get
    for node in view.nodes:
        parent, serial, hint = node.parent, node.serial, node.retention
        assert parent is not None
        if parent.parent is None:
            assert isinstance(parent, RootNode)
            above, space = 0, places[parent.namespace]
        else:
            above, space = parent.serial, spaces[parent.serial]
        spaces[serial] = space
        rows.append(
            (
                serial,
                above,
                space,
                node.start,
                len(node.blocks),
                len(node.tokens) // TOKEN_BYTES,
                holders(serial, 0),
                node.created,
                node.hits,
                1 if hint.ephemeral else 2 if hint.priority else 0,
                hidden(serial, 0),
            )
        )
    return rows


def _holders(llm: LLM) -> list[Holder]:
    """Who holds blocks: requests in order of admission, then contexts, the last used first."""
    holders = []
    for request in llm.engine.scheduler.running:
        for branch in request.branches:
            if (sequence := branch.sequence) is None:
                continue
            name = request.request_id
            if len(request.branches) > 1:
                name += f"/{branch.index}"
            num_generated = len(branch.stream.token_ids)
            text = branch.stream.text[-120:] if num_generated else None
            kind = "request" if request.hold is None else "context"
            holders.append(_holder(sequence, name, kind, num_generated, text))
    contexts = []
    for hold in llm.engine.scheduler.holds:
        if hold.sequence is not None:
            contexts.append(_holder(hold.sequence, "context", "context", 0, None))
    return (holders + contexts[::-1])[:MOST_HOLDERS]


def _holder(sequence: Any, name: str, kind: str, generated: int, text: str | None) -> Holder:
    node = sequence.node
    return Holder(
        key=id(sequence),
        name=name,
        kind=kind,
        namespace=sequence.namespace,
        ends_at=0 if node is None else node.serial,
        num_tokens=sequence.num_tokens,
        num_computed=sequence.num_computed,
        num_blocks=len(sequence.table),
        num_own=len(sequence.table) - sequence.num_tree_blocks,
        num_generated=generated,
        text=text,
        tail=b"" if text is not None else tail_of(sequence, LABEL_TOKENS),
    )


def _waiting(request: Request) -> dict[str, Any]:
    return {
        "name": request.request_id,
        "tokens": len(request.prompt),
        "since": round(request.arrived_at, 1),
        "preemptions": request.num_preemptions,
    }


def _heat_map(pool: PoolView) -> dict[str, Any]:
    """A letter for each cell's state and one for its references, as two strings."""
    states = np.where(
        pool.cached, np.where(pool.tables > 0, BOTH, CACHED), np.where(pool.tables > 0, HELD, FREE)
    )
    refs = pool.tables + pool.cached
    num_blocks = len(states)
    group = -(-num_blocks // MOST_CELLS)
    counts = np.bincount(states, minlength=4).tolist()
    if group > 1:
        starts = np.arange(0, num_blocks, group)
        shares = np.stack([np.add.reduceat(states == state, starts) for state in range(4)])
        states, refs = shares.argmax(0), np.maximum.reduceat(refs, starts)
    return {
        "states": (states + ord("0")).astype(np.uint8).tobytes().decode(),
        "refs": (np.minimum(refs, 9) + ord("0")).astype(np.uint8).tobytes().decode(),
        "group": group,
        "counts": counts,
    }


def _stats(
    llm: LLM, pulse: Pulse, pool: PoolView, removals: RemovalLog, now: float
) -> dict[str, Any]:
    engine, cache = llm.engine.counters, llm.cache.counters
    return {
        "now": now,
        "totals": totals(llm, now),
        "steps": engine.steps,
        "requests": engine.requests,
        "failed": engine.requests_failed,
        "preemptions": engine.preemptions,
        "copies_on_write": cache.copies_on_write,
        "forks": cache.forks,
        "evicted": cache.blocks_evicted,
        # Table entries that name a block which another table, or the tree, holds already.
        "shared": int(np.maximum(pool.tables - 1, 0).sum()),
        "removed": dict(removals.num_blocks),
        "first_token": pulse.first_token.percentiles(now),
        "between_tokens": pulse.between_tokens.percentiles(now),
    }
