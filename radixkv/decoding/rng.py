"""One uniform number per (seed, branch, position), whatever else is in the batch.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is a block
cipher over a counter: it has no state to carry, so a sample can be drawn again after a preemption,
in another batch or on another row, and comes out the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.integer[Any]]

ROUNDS = 10
MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)[:, None]
KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)[:, None]
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def resolve_seed(seed: int | None) -> int:
    """Return ``seed``, or 64 fresh random bits where it is None."""
    return secrets.randbits(64) if seed is None else seed


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 on many counters at once.

    Parameters
    ----------
    counter : (4, rows) uint64
        Four 32-bit words a row.
    key : (2, rows) uint64
        Two 32-bit words a row.

    Returns
    -------
    (4, rows) uint64
        Four random 32-bit words a row.
    """
    even, odd = counter[0::2], counter[1::2]
    for _ in range(ROUNDS):
        product = MULTIPLIERS * even
        high, low = product >> HALF, product & LOW
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = (key + KEY_STEPS) & LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(
    seeds: Sequence[int] | Integers,
    branches: Sequence[int] | Integers,
    positions: Sequence[int] | Integers,
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), each a function of its own three keys alone.

    Parameters
    ----------
    seeds, branches, positions : sequence of int
        One each a row, in [0, 2**64).

    Returns
    -------
    (rows,) float64
        Multiples of 2**-53, so never 1.
    """
    seed, branch, position = (np.asarray(key, np.uint64) for key in (seeds, branches, positions))
    words = philox(
        np.stack([position & LOW, position >> HALF, branch & LOW, branch >> HALF]),
        np.stack([seed & LOW, seed >> HALF]),
    )
    bits: NDArray[np.uint64] = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return np.ldexp(bits.astype(np.float64), -53)
