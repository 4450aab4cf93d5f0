"""The tree as JSON: a bounded part of it, taken between two steps of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from pydantic import BaseModel

from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE, Namespace
from radixkv.cache.node import RootNode
from radixkv.cache.survey import PoolView, TreeView, survey_pool, survey_tree
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is read of a node between two steps; its text is made later, elsewhere."""

    fields: dict[str, Any]
    namespace: Namespace
    head: bytes


@router.get("/v1/tree")
async def tree(
    service: TheService, key: ApiKey, limit: Annotated[int, Query(ge=1, le=MOST_NODES)] = 200
) -> Tree:
    """At most ``limit`` nodes of the tree, and the pool.

    Where keys are isolated from each other, a key sees its own nodes alone.
    """

    def look(llm: LLM) -> tuple[Tree, list[_Seen]]:
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
        return whole, _read(survey_tree(llm.cache, limit), llm.cache.block_size)

    whole, found = await service.worker.call(look)
    own = service.namespace(key, None)
    seen = [node for node in found if node.namespace[: len(own)] == own]
    whole.nodes = await service.on_texts(lambda llm: _with_texts(llm, seen))
    return whole


def _read(view: TreeView, block_size: int) -> list[_Seen]:
    namespaces: dict[int, Namespace] = {}
    seen = []
    for node in view.nodes:
        above = node.parent
        assert above is not None
        top = isinstance(above, RootNode)
        namespace = above.namespace if isinstance(above, RootNode) else namespaces[above.serial]
        namespaces[node.serial] = namespace
        tokens = len(node.tokens) // TOKEN_BYTES
        fields = {
            "id": node.serial,
            "parent": None if top else above.serial,
            "namespace": list(namespace),
            "start": node.start * block_size,
            "tokens": tokens,
            "blocks": len(node.blocks),
            "held": view.holders.get(node.serial, 0),
            "hits": node.hits,
            "last_used": node.last_used,
            "created": node.created,
            "open": tokens % block_size != 0,
            "ephemeral": node.retention.ephemeral,
            "priority": node.retention.priority,
            "hidden_children": view.num_hidden.get(node.serial, 0),
        }
        head = bytes(node.tokens[: PREVIEW_TOKENS * TOKEN_BYTES])
        seen.append(_Seen(fields, namespace, head))
    return seen


def _with_texts(llm: LLM, seen: list[_Seen]) -> list[Node]:
    tokenizer = llm.loaded.tokenizer
    nodes = []
    for node in seen:
        tokens = np.frombuffer(node.head, TOKEN_DTYPE).tolist()
        text = " ".join(map(str, tokens)) if tokenizer is None else str(tokenizer.decode(tokens))
        nodes.append(Node(**node.fields, text=text))
    return nodes


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
