"""Children: found by hash, told apart by tokens, ordered when there are many."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import token_bytes
from radixkv.cache.children import SCAN_LIMIT, Children
from radixkv.cache.hashing import BlockHash, default_block_hash
from radixkv.cache.node import RadixNode
from radixkv.cache.retention import DEFAULT_RETENTION

SIZE = 3
HASHES: list[BlockHash] = [default_block_hash, lambda block: sum(block) & 3, lambda block: 7]


def node(*tokens: int) -> RadixNode:
    data = bytearray(token_bytes(tokens))
    return RadixNode(None, data, array("i"), 0, 0, 0, DEFAULT_RETENTION)


def first(*tokens: int) -> bytes:
    return token_bytes(tokens)


@pytest.mark.parametrize("block_hash", HASHES)
@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * SIZE), unique=True, max_size=3 * SCAN_LIMIT),
    st.data(),
)
def test_finding_agrees_with_a_plain_list(
    block_hash: BlockHash, firsts: list[tuple[int, ...]], data: st.DataObject
) -> None:
    children = Children(4 * SIZE, block_hash)
    nodes = {tokens: node(*tokens, 9, 9, 9) for tokens in firsts}
    for child in nodes.values():
        children.add(child)
    if nodes:
        gone = data.draw(st.lists(st.sampled_from(firsts), unique=True))
        for tokens in gone:
            children.remove(nodes.pop(tokens))
    assert len(children) == len(nodes)
    assert {id(child) for child in children} == {id(child) for child in nodes.values()}
    asked = data.draw(st.tuples(*[st.integers(0, 3)] * SIZE))
    assert children.find(first(*asked)) is nodes.get(asked)
    part = asked[: data.draw(st.integers(1, SIZE))]
    found, common = children.closest(first(*part))
    lengths = [
        next((i for i, (a, b) in enumerate(zip(part, tokens, strict=False)) if a != b), len(part))
        for tokens in nodes
    ]
    assert common == max(lengths, default=0)
    assert (found is None) == (common == 0)
    if found is not None:
        assert found.tokens.startswith(first(*part[:common]))


def test_a_colliding_hash_never_finds_other_tokens() -> None:
    children = Children(4 * SIZE, lambda block: 7)
    children.add(node(1, 2, 3))
    assert children.find(first(1, 2, 4)) is None
    other = node(1, 2, 4)
    children.add(other)
    assert children.find(first(1, 2, 4)) is other


def test_a_collision_takes_the_place_of_who_went() -> None:
    children = Children(4 * SIZE, lambda block: 7)
    nodes = [node(number, 2, 3) for number in range(3)]
    for child in nodes:
        children.add(child)
    children.remove(nodes[0])
    assert len(children) == 2
    assert children.find(first(0, 2, 3)) is None
    assert children.find(first(1, 2, 3)) is nodes[1]
    children.remove(nodes[1])
    children.remove(nodes[2])
    assert len(children) == 0
    assert list(children) == []


def test_only_the_collided_of_the_same_hash_moves_up() -> None:
    children = Children(4 * SIZE, lambda block: block[0] % 2)
    even = [node(number, 0, 0) for number in (0, 2)]
    odd = [node(number, 0, 0) for number in (1, 3)]
    for child in (*odd, *even):
        children.add(child)
    children.remove(even[0])
    assert children.find(first(2, 0, 0)) is even[1]
    assert children.find(first(1, 0, 0)) is odd[0]
    assert children.find(first(3, 0, 0)) is odd[1]


def test_an_open_child_is_found_by_likeness_alone() -> None:
    children = Children(4 * SIZE, default_block_hash)
    open_child = node(5, 6)
    children.add(node(1, 2, 3))
    assert not children.has_open
    children.add(open_child)
    assert children.has_open
    assert children.closest(first(5, 6, 7)) == (open_child, 2)
    assert children.find(first(5, 6, 7)) is None
    children.remove(open_child)
    assert not children.has_open
    assert children.closest(first(5, 6, 7)) == (None, 0)


def test_many_children_are_kept_in_order() -> None:
    children = Children(4 * SIZE, default_block_hash)
    nodes = [node(5, number, number) for number in range(50)]
    for child in nodes[::-1]:
        children.add(child)
    for number in range(50):
        assert children.closest(first(5, number, 99)) == (nodes[number], 2)
    assert children.closest(first(99)) == (None, 0)
    children.remove(nodes[49])
    assert children.closest(first(5, 49, 49))[1] == 1
    for child in nodes[:49]:
        children.remove(child)
    assert children.closest(first(5, 49, 49)) == (None, 0)
