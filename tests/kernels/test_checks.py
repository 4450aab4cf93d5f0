"""The Triton functions and their twins refuse the same arguments with the same words."""

import pytest
import radixkv_kernels
import torch
from radixkv_kernels import torch_twins


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
        ("key_cache", torch.zeros(5, 2, 2, 8).to(torch.float8_e5m2), "got torch.float8_e5m2"),
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
