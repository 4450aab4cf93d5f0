"""Tokens as bytes, common prefixes, namespaces, chained hashes."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import chain_hashes, namespace_hash, token_bytes
from radixkv.cache.hashing import check_namespace, common_prefix, common_prefix_at
from radixkv.errors import RequestError

TOKENS = [0, 1, 258, 2**31 - 1]


@pytest.mark.parametrize(
    "given_as",
    [
        TOKENS,
        tuple(TOKENS),
        array("i", TOKENS),
        np.array(TOKENS),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.uint64),
        np.array(TOKENS, ">i4"),
        np.array([0, 9, 1, 9, 258, 9, 2**31 - 1])[::2],
        [np.int64(token) for token in TOKENS],
        [np.uint32(token) for token in TOKENS],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_become_four_little_endian_bytes_each(given_as: Any) -> None:
    assert token_bytes(given_as) == bytes.fromhex("00000000 01000000 02010000 ffffff7f")


def test_negative_tokens_are_integers_too() -> None:
    assert token_bytes([-1]) == token_bytes(np.array([-1])) == b"\xff\xff\xff\xff"
    assert token_bytes(range(2)) == b"\0\0\0\0\1\0\0\0"


@pytest.mark.parametrize("tokens", [[], (), np.array([]), np.array([], np.int64)], ids=str)
def test_no_tokens_are_no_bytes(tokens: Any) -> None:
    assert token_bytes(tokens) == b""


@pytest.mark.parametrize(
    "tokens",
    [
        [2**31],
        [-(2**31) - 1],
        np.array([2**31]),
        np.array([1, -(2**31) - 1]),
        np.array([2**63], np.uint64),
        [2**80],
    ],
    ids=str,
)
def test_tokens_that_do_not_fit_are_refused(tokens: Any) -> None:
    with pytest.raises(RequestError, match="32-bit"):
        token_bytes(tokens)


@pytest.mark.parametrize(
    "tokens",
    [[1.0], ["a"], [[1]], [None], "abc", b"abc", 5, np.array([1.5]), np.array([[1]]), {1: 2}],
    ids=str,
)
def test_what_is_no_flat_list_of_integers_is_refused(tokens: Any) -> None:
    with pytest.raises(RequestError, match="integers"):
        token_bytes(tokens)


small = st.lists(st.integers(0, 2), max_size=9)


@given(small, small)
def test_common_prefixes_are_counted_in_tokens(left: list[int], right: list[int]) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(token_bytes(left), token_bytes(right)) == expected
    data = token_bytes([7, *left])
    assert common_prefix_at(data, 4, bytearray(token_bytes(right))) == expected


def test_tokens_that_share_bytes_are_still_different() -> None:
    assert common_prefix(token_bytes([1, 0x0102]), token_bytes([1, 0x0202])) == 1
    assert common_prefix(token_bytes([1, 0x010203]), token_bytes([1, 0x020203])) == 1
    assert common_prefix(token_bytes([1, 2**30]), token_bytes([1, 0])) == 1
    assert common_prefix(token_bytes([1, -(2**31)]), token_bytes([1, 0])) == 1


def test_namespaces_are_never_concatenated() -> None:
    names = [(), ("",), ("", ""), ("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"), ("bc", "a")]
    assert len({namespace_hash(name) for name in names}) == len(names)


def test_a_namespace_hash_is_the_same_everywhere() -> None:
    assert namespace_hash(()) == 0x2D06800538D394C2  # xxh3 of nothing
    assert namespace_hash(("a", "bc")) == 0xF42EE0DF2A023EF1
    assert namespace_hash(("é",)) == namespace_hash(("é",)) != namespace_hash(("e",))


@pytest.mark.parametrize("namespace", ["model", ["model"], (1,), ("a", None), None], ids=str)
def test_a_namespace_is_a_tuple_of_strings(namespace: Any) -> None:
    with pytest.raises(RequestError, match="tuple of strings"):
        check_namespace(namespace)


def test_a_good_namespace_passes() -> None:
    assert check_namespace(("model", "adapter")) == ("model", "adapter")
    assert check_namespace(()) == ()


def test_a_chained_hash_names_everything_before_it() -> None:
    root = namespace_hash(("m",))
    first = chain_hashes(root, token_bytes([1, 2, 3, 4, 5]), 8)
    assert len(first) == 2, "only full blocks have names"
    assert len(chain_hashes(root, token_bytes([1, 2, 3, 4])[:-1], 8)) == 1
    assert chain_hashes(first[0], token_bytes([3, 4]), 8) == first[1:]
    other = chain_hashes(root, token_bytes([9, 2, 3, 4]), 8)
    assert other[1] != first[1], "equal blocks after different ones have different names"
    assert chain_hashes(namespace_hash(("n",)), token_bytes([1, 2]), 8) != first[:1]
    assert chain_hashes(root, b"", 8) == []
