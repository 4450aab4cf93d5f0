"""A token for many sequences at once does what a token for each does, one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache import PrefixCache, Sequence
from radixkv.config import CacheConfig
from radixkv.errors import RadixKVError, SequenceClosedError


def several(num_blocks: int = 40) -> tuple[PrefixCache, list[Sequence]]:
    """Sequences at other places in their blocks, two of them with a block in common."""
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=3))
    sequences = [cache.acquire(range(length)) for length in (2, 3, 4, 7)]
    for sequence in sequences:
        cache.commit(sequence, include_open=True)
    return cache, [*sequences, cache.fork(sequences[0])]


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def state(cache: PrefixCache, sequences: list[Sequence]) -> list[object]:
    cache.check()
    each = [(s.tokens.tolist(), s.block_table.tolist(), s.num_computed) for s in sequences]
    return [each, cache.take_copies(), cache.stats(), cache.render()]


def test_together_and_one_by_one_are_the_same() -> None:
    together, mine = several()
    alone, others = several()
    for step in range(9):
        tokens = [step, step, step, 9, step + 1]
        assert together.append_each(mine, packed(tokens)) == 5
        for sequence, token in zip(others, tokens, strict=True):
            sequence.append(token)
        together.commit_each(mine)
        for sequence in others:
            alone.commit(sequence)
        assert state(together, mine) == state(alone, others)


def test_it_says_how_far_the_blocks_went() -> None:
    cache, sequences = several(num_blocks=9)
    done = 5
    for _ in range(20):
        before = [sequence.num_tokens for sequence in sequences]
        done = cache.append_each(sequences, packed([5, 6, 7, 8, 9]))
        now = [sequence.num_tokens for sequence in sequences]
        grown = [count + (place < done) for place, count in enumerate(before)]
        assert now == grown
        cache.commit_each(sequences)
        cache.check()
        if done < 5:
            break
    assert done < 5


def test_what_has_ended_or_was_promised_is_refused() -> None:
    cache, sequences = several()
    cache.release(sequences[1])
    with pytest.raises(SequenceClosedError):
        cache.append_each(sequences, packed([1] * 5))
    assert [s.num_tokens for s in sequences] == [3, 3, 4, 7, 2]
    with pytest.raises(SequenceClosedError):
        cache.commit_each(sequences)
    late = cache.acquire([1, 2, 3, 4])
    cache.commit(late, pending=True)
    with pytest.raises(RadixKVError, match="settle or abort it first"):
        cache.append_each([late], packed([1]))
    cache.settle()
    assert cache.append_each([late], packed([1])) == 1
