"""The tree as text."""

from __future__ import annotations

from helpers import cached, compute, make_cache

from radixkv.cache import EPHEMERAL

A, B, C = ([letter] * 4 for letter in range(1, 4))


def test_an_empty_cache() -> None:
    assert make_cache().render() == "(empty)"


def test_a_tree() -> None:
    cache = make_cache(num_blocks=32)
    cached(cache, A + B + C)
    first = compute(cache, A + B + [9], include_open=True)
    second = first.fork()
    cached(cache, [*A, 7], include_open=True, end=EPHEMERAL)
    cached(cache, [5] * 20, namespace=("model", "salt"))
    assert cache.render().splitlines() == [
        "root",
        "└─ 4 tokens in 1 blocks, held by 2, hits 2: 1 1 1 1",
        "   ├─ 4 tokens in 1 blocks, held by 2, hits 1: 2 2 2 2",
        "   │  ├─ 4 tokens in 1 blocks, held by 0, hits 0: 3 3 3 3",
        "   │  └─ 1 tokens in 1 blocks, held by 2, hits 0: 9",
        "   └─ 1 tokens in 1 blocks, held by 0, hits 0 ephemeral: 7",
        "root model/salt",
        "└─ 20 tokens in 5 blocks, held by 0, hits 0: 5 5 5 5 5 5 5 5 5 5 5 5…",
    ]
    cache.release(second)
    assert "held by 1" in cache.render()


def test_text_in_place_of_tokens() -> None:
    cache = make_cache()
    cached(cache, [72, 105, 33, 10] * 4)
    text = cache.render(lambda tokens: "".join(map(chr, tokens)))
    assert text.splitlines()[1].endswith("hits 0: 'Hi!\\nHi!\\nHi!\\n'…")


def test_exactly_a_preview() -> None:
    cache = make_cache()
    cached(cache, [1] * 12)
    assert not cache.render().endswith("…")


def test_a_very_deep_tree() -> None:
    cache = make_cache(num_blocks=5000, block_size=1)
    chain = list(range(1500))
    sequence = compute(cache, chain)
    for length in range(1, 1500):
        cache.release(cache.acquire(chain[:length]))
    assert len(cache.render().splitlines()) == 1501
    cache.release(sequence)
    cache.reset()
    assert cache.pool.num_free == 5000
