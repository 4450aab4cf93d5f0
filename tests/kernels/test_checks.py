"""The Triton functions and their twins refuse the same arguments with the same words."""

from dataclasses import replace

import pytest
import radixkv_kernels
import torch
from radixkv_kernels import torch_twins, unshared_work_list


@pytest.fixture(params=[radixkv_kernels, torch_twins], ids=lambda module: module.__name__)
def kernels(request):
    return request.param


def arguments():
    return {
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 4),
        "key_cache": torch.zeros(5, 2, 2, 8),
        "value_cache": torch.zeros(5, 2, 2, 4),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("key", torch.zeros(3, 16), r"key must have shape \(T, Hkv, D\), got \(3, 16\)"),
        ("key", torch.zeros(4, 2, 8), r"value must have shape \(4, 2, 4\), got \(3, 2, 4\)"),
        ("key", torch.zeros(3, 2, 8).long(), "key must be one of .*, got torch.int64"),
        ("value", torch.zeros(3, 1, 4), r"value must have shape \(3, 2, 4\)"),
        ("value", torch.zeros(3, 2, 5), r"value_cache must have shape \(5, 2, 2, 5\)"),
        ("value", torch.zeros(3, 2, 0), "must be positive"),
        ("value", torch.zeros(3, 2, 4, device="meta"), "value is on meta, but key is on cpu"),
        ("key_cache", torch.zeros(5, 4, 8), r"\(num_blocks, block_size, Hkv, D\), got \(5, 4, 8\)"),
        ("key_cache", torch.zeros(5, 2, 2, 9), r"key_cache must have shape \(5, 2, 2, 8\)"),
        ("key_cache", torch.zeros(5, 2, 2, 16)[..., ::2], "key_cache must be contiguous"),
        ("key_cache", torch.zeros(5, 2, 2, 8).to(torch.int16), "got torch.int16"),
        ("key_scale", torch.ones(1), r"key_scale must have shape \(2,\), got \(1,\)"),
        ("value_scale", torch.ones(2).half(), "value_scale must be one of"),
        ("value_scale", torch.ones(4)[::2], "value_scale must be contiguous"),
        ("value_cache", torch.zeros(6, 2, 2, 4), r"value_cache must have shape \(5, 2, 2, 4\)"),
        ("value_cache", torch.zeros(2, 5, 2, 4).transpose(0, 1), "value_cache must be contiguous"),
        ("slot_mapping", torch.zeros(4).long(), r"slot_mapping must have shape \(3,\)"),
        ("slot_mapping", torch.zeros(3), "slot_mapping must be one of"),
        ("slot_mapping", torch.zeros(6).long()[::2], "slot_mapping must be contiguous"),
    ],
)
def test_write_kv_refuses(kernels, name, bad, message):
    with pytest.raises(ValueError, match=message):
        kernels.write_kv(**{**arguments(), name: bad})


WORK = unshared_work_list([2, 1])


def attention_arguments():
    return {
        "query": torch.zeros(3, 4, 8),
        "key_cache": torch.zeros(5, 2, 2, 8),
        "value_cache": torch.zeros(5, 2, 2, 4),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "work": WORK,
        "positions": torch.zeros(3, dtype=torch.int32),
        "scale": 1.0,
    }


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"query": torch.zeros(3, 32)}, r"query must have shape \(T, H, D\), got \(3, 32\)"),
        ({"query": torch.zeros(3, 3, 8)}, "3 query heads cannot share 2 KV heads"),
        ({"query": torch.zeros(3, 0, 8)}, "0 query heads cannot share 2 KV heads"),
        ({"query": torch.zeros(3, 4, 8).double()}, "query must be one of .*, got torch.float64"),
        ({"query": torch.zeros(3, 4, 16)[..., ::2]}, "the last axis of query must be contiguous"),
        ({"query": torch.zeros(2, 4, 8)}, r"positions must have shape \(2,\), got \(3,\)"),
        ({"key_cache": torch.zeros(5, 2, 2, 9)}, r"key_cache must have shape \(5, 2, 2, 8\)"),
        ({"key_cache": torch.zeros(5, 2, 2, 8).half()}, "key_cache must be one of"),
        (
            {"key_cache": torch.zeros(5, 2, 2, 8).to(torch.int8)},
            "key_cache is torch.int8, but value_cache torch.float32",
        ),
        ({"value_cache": torch.zeros(5, 3, 2, 4)}, r"value_cache must have shape \(5, 2, 2, 4\)"),
        (
            {"query": torch.zeros(3, 4, 257), "key_cache": torch.zeros(5, 2, 2, 257)},
            r"D and Dv must be in \[1, 256\] for torch.float32, got 257 and 4",
        ),
        ({"value_cache": torch.zeros(5, 2, 2, 0)}, "got 8 and 0"),
        ({"block_tables": torch.zeros(2, 3)}, "block_tables must be one of"),
        ({"block_tables": torch.zeros(6).int()}, r"block_tables must have shape \(R, max_blocks\)"),
        ({"positions": torch.zeros(3).long()}, "positions must be one of"),
        ({"positions": torch.zeros(3, device="meta").int()}, "positions is on meta, but query is"),
        ({"out": torch.zeros(3, 4, 5)}, r"out must have shape \(3, 4, 4\)"),
        ({"out": torch.zeros(3, 4, 4).half()}, "out must be one of"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \(4,\)"),
        ({"alibi_slopes": torch.zeros(4).half()}, "alibi_slopes must be one of"),
        ({"key_scale": torch.zeros(4)}, r"key_scale must have shape \(2,\)"),
        ({"value_scale": torch.zeros(4)[::2]}, "value_scale must be contiguous"),
        ({"work": unshared_work_list([2, 2])}, "the work list has 4 queries, but query has 3"),
        ({"work": replace(WORK, items=WORK.items[:, :5])}, r"work.items must have shape \(2, 6\)"),
        ({"work": replace(WORK, num_items=WORK.num_items.long())}, "work.num_items must be one"),
        ({"work": replace(WORK, order=WORK.merge_ptr)}, r"work.order must have shape \(3,\)"),
        ({"work": replace(WORK, max_queries=0)}, "max_queries must be positive"),
        ({"work": WORK.padded(65536, 3, 0, 2)}, "items at most 65535: got 2 and 65536"),
        ({"window": -1}, "must not be negative"),
        ({"chunk": -1}, "must not be negative"),
        ({"softcap": -1.0}, "must not be negative"),
        ({"causal": False, "window": 3}, "causal=False goes with no window"),
        ({"causal": False, "chunk": 3}, "causal=False goes with no window"),
        ({"causal": False, "alibi_slopes": torch.zeros(4)}, "causal=False goes with no window"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_paged_attention_refuses(kernels, bad, message):
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(**{**attention_arguments(), **bad})


def test_paged_attention_refuses_partials_of_another_size():
    partials = radixkv_kernels.allocate_partials(WORK, 4, 4)
    with pytest.raises(ValueError, match=r"partials\[0\] must have shape \(0, 4, 4\)"):
        radixkv_kernels.paged_attention(
            **attention_arguments(), partials=(torch.zeros(1, 4, 4), partials[1])
        )


CACHE = torch.zeros(4, 2, 1, 8)


@pytest.mark.parametrize(
    ("caches", "sources", "targets", "message"),
    [
        ([CACHE], [0, 1], [2], "2 sources for 1 targets"),
        ([CACHE], [0, 1, 2], [3, 3, 0], r"blocks \[3\] are targets of more than one copy"),
        ([CACHE], [0, 3], [3, 3], r"blocks \[3\] are targets of more than one copy"),
        ([CACHE], [4], [0], r"block ids must be in \[0, 4\) for caches\[0\]"),
        ([CACHE], [0], [-1], r"block ids must be in \[0, 4\)"),
        ([CACHE], [7], [7], r"block ids must be in \[0, 4\)"),
        ([CACHE, CACHE[:3].clone()], [0], [3], r"in \[0, 3\) for caches\[1\]"),
        ([CACHE, CACHE], [0], [1], "the same cache is listed twice"),
        ([CACHE.transpose(0, 1)], [0], [1], r"caches\[0\] must be contiguous"),
        ([torch.zeros(())], [], [], r"caches\[0\] must be \(num_blocks, ...\)"),
        ([torch.zeros(4, dtype=torch.complex128)], [], [], "8 byte elements"),
        ([CACHE, torch.zeros(4, device="meta")], [], [], r"caches\[1\] is on meta, caches\[0\] on"),
    ],
)
def test_copy_blocks_refuses(kernels, caches, sources, targets, message):
    with pytest.raises(ValueError, match=message):
        kernels.copy_blocks(caches, sources, targets)


def test_block_ids_are_integers(kernels):
    with pytest.raises(TypeError, match="float"):
        kernels.copy_blocks([CACHE], [0.0], [1])
