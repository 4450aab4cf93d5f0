"""The tree as JSON: a bounded part of it, taken between two steps of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from pydantic import BaseModel

from radixkv.cache.hashing import TOKEN_DTYPE
from radixkv.cache.survey import NodeView, PoolView, survey_pool, survey_tree
from radixkv.llm import LLM
from radixkv.server.keys import ApiKey, TheService

router = APIRouter(tags=["tree"])

PREVIEW_TOKENS = 24
MOST_NODES = 5000


class Node(BaseModel):
    """A run of blocks below a prefix.

    Attributes
    ----------
    parent : int or None
        None below the empty prefix.
    namespace : list of str
        What its blocks are shared within.
    start, tokens : int
        Tokens before the run, and in it.
    held : int
        Sequences that hold its blocks now.
    hits : int
        Matches that used it.
    last_used, created : int
        Readings of the tree's logical clock.
    open : bool
        Its last block is not full; others can only copy from that.
    hidden_children : int
        Children that are not in this answer.
    text : str
        How its text begins; token ids where the model has no tokenizer.
    """

    id: int
    parent: int | None
    namespace: list[str]
    start: int
    tokens: int
    blocks: int
    held: int
    hits: int
    last_used: int
    created: int
    open: bool
    ephemeral: bool
    priority: int
    hidden_children: int
    text: str


class Pool(BaseModel):
    """Who has the blocks."""

    num_blocks: int
    block_size: int
    free: int
    held_only: int
    cached_only: int
    held_and_cached: int


class Tree(BaseModel):
    """A part of the tree, and the counters of the cache and the engine.

    Attributes
    ----------
    clock : int
        The tree's logical clock now.
    query_tokens, hit_tokens : int
        Prompt tokens so far, and those of them that were cached.
    nodes : list of Node
        Parents first: those that are held, then those used last.
    """

    model: str
    clock: int
    running: int
    waiting: int
    query_tokens: int
    hit_tokens: int
    pool: Pool
    nodes: list[Node]


@router.get("/v1/tree")
async def tree(
    service: TheService, key: ApiKey, limit: Annotated[int, Query(ge=1, le=MOST_NODES)] = 200
) -> Tree:
    """At most ``limit`` nodes of the tree, and the pool.

    Where keys are isolated from each other, a key sees its own nodes alone.
    """

    def look(llm: LLM) -> tuple[Tree, list[NodeView]]:
        nodes = survey_tree(llm.cache, limit, PREVIEW_TOKENS)
        counters, scheduler = llm.cache.counters, llm.engine.scheduler
        whole = Tree(
            model=service.model_name,
            clock=llm.cache.tree.clock,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            query_tokens=counters.query_tokens,
            hit_tokens=counters.hit_tokens,
            pool=_pool(survey_pool(llm.cache), llm.cache.block_size),
            nodes=[],
        )
        return whole, nodes

    whole, found = await service.worker.call(look)
    own = service.namespace(key, None)
    seen = [node for node in found if node.namespace[: len(own)] == own]
    block_size = whole.pool.block_size
    whole.nodes = await service.on_texts(
        lambda llm: [_node(view, block_size, _speller(llm)) for view in seen]
    )
    return whole


def _pool(view: PoolView, block_size: int) -> Pool:
    held = view.tables > 0
    return Pool(
        num_blocks=len(held),
        block_size=block_size,
        free=int((~held & ~view.cached).sum()),
        held_only=int((held & ~view.cached).sum()),
        cached_only=int((~held & view.cached).sum()),
        held_and_cached=int((held & view.cached).sum()),
    )


def _speller(llm: LLM) -> Callable[[list[int]], str]:
    tokenizer = llm.loaded.tokenizer
    if tokenizer is None:
        return lambda tokens: " ".join(map(str, tokens))
    return lambda tokens: str(tokenizer.decode(tokens))


def _node(view: NodeView, block_size: int, spell: Callable[[list[int]], str]) -> Node:
    hint = view.retention
    return Node(
        id=view.serial,
        parent=view.parent or None,
        namespace=list(view.namespace),
        start=view.start * block_size,
        tokens=view.num_tokens,
        blocks=view.num_blocks,
        held=view.holders,
        hits=view.hits,
        last_used=view.last_used,
        created=view.created,
        open=view.num_tokens % block_size != 0,
        ephemeral=hint.ephemeral,
        priority=hint.priority,
        hidden_children=view.num_hidden,
        text=spell(np.frombuffer(view.head, TOKEN_DTYPE).tolist()),
    )
