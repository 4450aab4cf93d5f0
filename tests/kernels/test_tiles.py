"""Tiles: every GPU, head size and dtype has one; what the compiler makes of them is elsewhere."""

import pytest
import torch
from radixkv_kernels import Tile
from radixkv_kernels.attention import decoded_by_hand
from radixkv_kernels.tiles import choose_tile, launch_options, merge_heads, width_of

TARGETS = ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "cpu"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("bytes_each", "most"), [(1, 512), (2, 512), (4, 256)])
def test_every_head_size_has_a_tile(target, bytes_each, most):
    for dim in range(1, most + 1):
        few = choose_tile(target, 16, width_of(dim), 16, bytes_each)
        assert few.rows == 16
        assert few == choose_tile(target, 1, 16, width_of(dim), bytes_each)
        many = choose_tile(target, 17, width_of(dim), width_of(dim), bytes_each)
        assert many.rows > 16
        assert many == choose_tile(target, 10**6, width_of(dim), width_of(dim), bytes_each)


def test_widths_hold_the_head_and_waste_less_than_half():
    for dim in range(1, 257):
        width = width_of(dim)
        assert width & (width - 1) == 0
        assert dim <= width < max(2 * dim, 17)


@pytest.mark.parametrize(
    ("heads", "dim", "expected"), [(32, 128, 8), (3, 64, 4), (1, 256, 1), (5, 16, 8), (9, 200, 4)]
)
def test_heads_of_a_merge(heads, dim, expected):
    assert merge_heads(heads, dim) == expected


@pytest.mark.parametrize("sizes", [(8, 64), (16, 8), (24, 64), (16, 48)], ids=str)
def test_refuses_sizes_that_matrix_units_lack(sizes):
    with pytest.raises(ValueError, match="rows and tokens must be powers of two from 16"):
        Tile(*sizes, 4, 3)


def test_registers_are_an_option_of_nvidia_alone():
    tile = Tile(16, 64, 4, 3, 128)
    assert launch_options(tile, "sm_90") == {"num_warps": 4, "num_stages": 3, "maxnreg": 128}
    assert launch_options(tile, "gfx942") == {"num_warps": 4, "num_stages": 3}


def test_who_decodes_by_hand():
    for dtype, exponent in ((torch.float8_e4m3fn, 4), (torch.float8_e5m2, 5)):
        found = {target: decoded_by_hand(dtype, target) for target in TARGETS}
        assert {t: bits for t, bits in found.items() if bits} == dict.fromkeys(
            ("sm_75", "sm_80"), exponent
        )
    assert not any(decoded_by_hand(torch.bfloat16, target) for target in TARGETS)
