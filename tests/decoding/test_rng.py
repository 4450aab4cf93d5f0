"""Philox against its authors' known answers, and uniforms as functions of their keys alone."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.decoding import resolve_seed
from radixkv.decoding.rng import philox, uniforms

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([FULL] * 4, [FULL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers_of_random123(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == answer


def test_a_row_depends_on_its_own_keys_alone() -> None:
    keys = [
        (s, b, p) for s in (0, 1, 2**40, 2**64 - 1) for b in (0, 1, 2**40) for p in (0, 1, 2**40)
    ]
    together = uniforms(*zip(*keys, strict=True))
    assert len(set(together.tolist())) == len(keys)
    for key, value in zip(keys, together, strict=True):
        assert uniforms(*([part] for part in key)) == [value]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_uniform_along_each_key(axis: int) -> None:
    count, cells = 50_000, 100
    keys = [[3] * count, [5] * count, [11] * count]
    keys[axis] = list(range(count))
    values = uniforms(*keys)
    assert values.min() >= 0
    assert values.max() < 1
    hits = np.bincount((values * cells).astype(int), minlength=cells)
    chi_square = ((hits - count / cells) ** 2 / (count / cells)).sum()
    assert chi_square < 149.4  # 99 degrees of freedom, p = 0.0008
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / count**0.5


def test_the_largest_uniform_is_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "radixkv.decoding.rng.philox", lambda counter, key: np.full_like(counter, FULL)
    )
    assert uniforms([1], [2], [3]).tolist() == [1 - 2.0**-53]


def test_resolve_seed() -> None:
    assert resolve_seed(0) == 0
    assert resolve_seed(2**64 - 1) == 2**64 - 1
    fresh = {resolve_seed(None) for _ in range(50)}
    assert len(fresh) == 50
    assert all(0 <= seed < 2**64 for seed in fresh)
