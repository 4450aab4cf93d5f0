"""Tokens as bytes, block hashes, and namespaces.

Tokens decide, hashes only find. The tree keys a node's children by the hash of their first block
*under this prefix* (the prefix is the node itself, so nothing has to be chained on the way down)
and then compares the tokens: a collision costs a comparison, never a wrong answer.

Chained content hashes name a block to the outside world (events, routers in front of several
engines). They start from the namespace, so equal tokens in two namespaces never share a name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from radixkv.errors import RequestError

Namespace = tuple[str, ...]
# From a caller: `check_namespace` refuses the rest, which compiled code would do less kindly.
GivenNamespace = Namespace | Any
TokenIds = Sequence[int] | npt.NDArray[np.integer]
BlockHash = Callable[[bytes], int]

TOKEN_BYTES = 4
TOKEN_DTYPE = np.dtype("<i4")

_LISTS = (list, tuple, range)
_all_bits = np.bitwise_or.reduce
_TOO_WIDE = "token ids must fit a 32-bit signed integer"

default_block_hash: BlockHash = xxhash.xxh3_64_intdigest


def token_bytes(tokens: TokenIds) -> bytes:
    """Tokens as little-endian int32, four bytes each, so that comparing them is a memcmp.

    Raises
    ------
    RequestError
        If the tokens are not one-dimensional integers that fit an int32.
    """
    if isinstance(tokens, _LISTS):
        try:
            return array("i", tokens).tobytes()
        except OverflowError:
            raise RequestError(_TOO_WIDE) from None
        except TypeError as error:
            raise RequestError(f"token ids must be integers: {error}") from None
    ids = np.asarray(tokens)
    if not ids.size:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"token ids must be a flat list or array of integers, not {ids.ndim}-dimensional "
            f"{ids.dtype}"
        )
    if ids.dtype == TOKEN_DTYPE:
        return ids.tobytes()
    narrow = ids.astype(TOKEN_DTYPE)
    # All bits of all ids at once show that none is negative or too wide, at a third of the cost
    # of comparing the narrow ids with the wide ones.
    if int(_all_bits(ids)) >> 31 and np.count_nonzero(narrow != ids):
        raise RequestError(_TOO_WIDE)
    return narrow.tobytes()


def common_prefix(left: bytes | bytearray, right: bytes | bytearray) -> int:
    """Length in tokens of the common prefix of two byte strings, one of them short (a block)."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if difference == 0:
        return size // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)


def common_prefix_at(data: bytes | bytearray, offset: int, edge: bytes | bytearray) -> int:
    """Length in tokens of the common prefix of ``data[offset:]`` and ``edge``, of any length."""
    count = min(len(data) - offset, len(edge)) // TOKEN_BYTES
    if not count:
        return 0
    left = np.frombuffer(data, TOKEN_DTYPE, count, offset)
    right = np.frombuffer(edge, TOKEN_DTYPE, count)
    differs = left != right
    first = int(differs.argmax())
    return first if differs[first] else count


def check_namespace(namespace: GivenNamespace) -> Namespace:
    """Refuse anything but a tuple of strings: ("a", "bc") and ("ab", "c") must stay different."""
    if namespace == ():
        return namespace
    if not isinstance(namespace, tuple) or not all(isinstance(part, str) for part in namespace):
        raise RequestError(f"a namespace is a tuple of strings, not {namespace!r}")
    return namespace


def namespace_hash(namespace: Namespace) -> int:
    """The 64-bit root of a namespace's chain; parts are length-prefixed, never concatenated."""
    digest = xxhash.xxh3_64()
    for part in namespace:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.intdigest()


def chain_hashes(parent: int, data: bytes | bytearray, block_bytes: int) -> list[int]:
    """Content hashes of the full blocks in ``data``, each chained to the one before it.

    Parameters
    ----------
    parent : int
        Chained hash of the block before the first, or ``namespace_hash`` at the start.
    data : bytes
        Tokens as from `token_bytes`.
    block_bytes : int
        Bytes in a block: ``TOKEN_BYTES * block_size``.
    """
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = xxhash.xxh3_64_intdigest(data[start : start + block_bytes], seed=parent)
        hashes.append(parent)
    return hashes
