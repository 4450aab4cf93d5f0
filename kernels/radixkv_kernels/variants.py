"""The kernels' variants that `radixkv_kernels.report` compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triton.compiler import ASTSource

from radixkv_kernels.ahead import Figures, compile_for, kernel_source
from radixkv_kernels.attention_jit import attend_kernel, merge_kernel
from radixkv_kernels.kv_jit import copy_blocks_kernel, write_kv_kernel
from radixkv_kernels.launch import EXPONENTS, WARPS, row_tile
from radixkv_kernels.tiles import (
    Tile,
    choose_tile,
    launch_options,
    merge_heads,
    merge_warps,
    width_of,
)

GROUP, KV_HEADS, BLOCK_SIZE = 3, 8, 16
CODES = {"fp8e4nv": 4, "fp8e5": 5, "i8": 8}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1, "fp8e5": 1, "i8": 1}

# What each feature sets; the pointers of all others are None and their switches off.
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "window": {"WINDOW": 512},
    "chunk": {"CHUNK": 8192},
    "softcap": {"SOFTCAP": 50.0},
    "bidirectional": {"CAUSAL": False},
    "order": {"order_ptr": "*i32"},
    "sinks": {"sink_ptr": "*fp32"},
    "ALiBi": {"slope_ptr": "*fp32"},
    "LSE": {"lse_ptr": "*fp32"},
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with one set of compile-time arguments.

    Attributes
    ----------
    name : str
        What it is, for people.
    compile : callable
        Figures for a target.
    tile : callable or None
        The tile that an attention kernel uses on a target.
    tile_bytes : int
        Bytes of a key and a value together, columns added by padding included.
    """

    name: str
    compile: Callable[[str], Figures]
    tile: Callable[[str], Tile] | None = None
    tile_bytes: int = 0


def attention(
    dtype: str, key_dim: int, value_dim: int, many_rows: bool, *features: str, cache: str = ""
) -> Variant:
    """`attend_kernel` for queries of `dtype`, cached in `cache` (default: the same)."""
    cache = cache or dtype
    widths = (width_of(key_dim), width_of(value_dim))

    def tile_for(target: str) -> Tile:
        return choose_tile(target, 17 if many_rows else 16, *widths, BYTES[cache])

    def compiled(target: str) -> Figures:
        tile = tile_for(target)
        source = attention_source(dtype, key_dim, value_dim, tile, features, cache, target)
        return compile_for(target, source, **launch_options(tile, target))

    size = f"D {key_dim}" if key_dim == value_dim else f"D {key_dim}/{value_dim}"
    cached = "" if cache == dtype else f" over {cache}"
    rows = "many rows" if many_rows else "16 rows"
    name = ", ".join([f"attend {dtype}{cached}", size, rows, *features])
    return Variant(name, compiled, tile_for, sum(widths) * BYTES[cache])


def attention_source(
    dtype: str,
    key_dim: int,
    value_dim: int,
    tile: Tile,
    features: tuple[str, ...],
    cache: str,
    target: str,
) -> ASTSource:
    """What the launch in `radixkv_kernels.attention` would compile."""
    decode = {"fp8e4nv": 4, "fp8e5": 5}.get(cache, 0) if target == "sm_80" else 0
    cached = "*u8" if decode else f"*{cache}"
    switches = {"WINDOW": 0, "CHUNK": 0, "SOFTCAP": 0.0, "CAUSAL": True}
    types = {
        "query_ptr": f"*{dtype}",
        "key_ptr": cached,
        "value_ptr": cached,
        "out_ptr": f"*{dtype}",
        "partial_ptr": "*fp32",
        "partial_lse_ptr": "*fp32",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("table_ptr", "position_ptr", "item_ptr", "num_items_ptr"), "*i32")
    types |= {name: "i32" for name in attend_kernel.arg_names if "stride" in name}
    if BYTES[cache] == 1:
        types |= dict.fromkeys(("key_scale_ptr", "value_scale_ptr"), "*fp32")
    for feature in features:
        for name, setting in FEATURES[feature].items():
            (types if name.endswith("_ptr") else switches)[name] = setting
    unaligned = {name for name, type_ in types.items() if type_ in ("*i32", "*fp32", "fp32")}
    unaligned -= {"query_ptr", "key_ptr", "value_ptr", "out_ptr", "partial_ptr", "partial_lse_ptr"}
    return kernel_source(
        attend_kernel,
        types,
        {
            **switches,
            "KV_HEADS": KV_HEADS,
            "GROUP": GROUP,
            "KEY_DIM": key_dim,
            "VALUE_DIM": value_dim,
            "KEY_WIDTH": width_of(key_dim),
            "VALUE_WIDTH": width_of(value_dim),
            "BLOCK_SIZE": BLOCK_SIZE,
            "ROWS": tile.rows,
            "TOKENS": tile.tokens,
            "DECODE": decode,
            "UPCAST": False,
        },
        unaligned | {"table_stride"},
    )


def merge(dtype: str, value_dim: int, *features: str) -> Variant:
    """`merge_kernel` into an output of `dtype`."""
    types = {
        "partial_ptr": "*fp32",
        "partial_lse_ptr": "*fp32",
        "merge_ptr_ptr": "*i32",
        "merge_idx_ptr": "*i32",
        "out_ptr": f"*{dtype}",
        "out_stride_token": "i32",
        "out_stride_head": "i32",
    }
    for feature in features:
        types |= FEATURES[feature]
    heads = KV_HEADS * GROUP
    source = kernel_source(
        merge_kernel,
        types,
        {
            "NUM_HEADS": heads,
            "VALUE_DIM": value_dim,
            "HEADS": merge_heads(heads, value_dim),
            "VALUE_WIDTH": width_of(value_dim),
        },
        {"merge_ptr_ptr", "merge_idx_ptr", "order_ptr", "sink_ptr"},
    )
    return Variant(
        ", ".join([f"merge {dtype}", f"D {value_dim}", *features]),
        lambda target: compile_for(target, source, num_warps=merge_warps(target)),
    )


def write(
    dtype: str, cache_dtype: str, heads: int, key_dim: int, value_dim: int, *, scaled: bool = False
) -> Variant:
    """`write_kv_kernel` from contiguous keys and values."""
    strides = [f"{rows}_stride_{axis}" for rows in ("key", "value") for axis in ("token", "head")]
    rows, columns = row_tile(max(key_dim, value_dim))
    code = CODES.get(cache_dtype, 0)
    kept = "*u8" if code in EXPONENTS.values() else f"*{cache_dtype}"
    types = dict.fromkeys(("key_ptr", "value_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), kept)
    types |= {"slot_ptr": "*i64", "num_tokens": "i32"} | dict.fromkeys(strides, "i32")
    if scaled:
        types |= dict.fromkeys(("key_scale_ptr", "value_scale_ptr"), "*fp32")
    source = kernel_source(
        write_kv_kernel,
        types,
        {"key_stride_dim": 1, "value_stride_dim": 1}
        | {"HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
        | {"KEY_CODE": code, "VALUE_CODE": code, "ROWS": rows, "COLUMNS": columns},
        {"slot_ptr", "num_tokens", "key_scale_ptr", "value_scale_ptr"},
    )
    name = f"write {dtype}" if dtype == cache_dtype else f"write {dtype} to {cache_dtype}"
    name += ", scales" if scaled else ""
    return Variant(name, lambda target: compile_for(target, source, num_warps=WARPS))


def copy(word: str, words: int) -> Variant:
    """`copy_blocks_kernel` for blocks of so many words."""
    rows, columns = row_tile(words)
    source = kernel_source(
        copy_blocks_kernel,
        {"source_ptr": f"*{word}", "target_ptr": f"*{word}", "pair_ptr": "*i64"}
        | {"num_pairs": "i32"},
        {"WORDS": words, "ROWS": rows, "COLUMNS": columns},
        {"num_pairs"},
    )
    return Variant(f"copy {word}", lambda target: compile_for(target, source, num_warps=WARPS))


def covering() -> list[Variant]:
    """Few variants in which each kernel, dtype, head size, tile size and feature is there once."""
    return [
        write("bf16", "bf16", 8, 128, 128),
        write("fp32", "bf16", 3, 80, 64),
        write("bf16", "fp8e4nv", 8, 128, 128),
        write("fp16", "fp8e5", 8, 192, 128, scaled=True),
        write("bf16", "i8", 8, 128, 128, scaled=True),
        copy("i16", 16 * 8 * 128),
        attention("bf16", 64, 64, False, "order", "ALiBi"),
        attention("fp16", 64, 64, True, "chunk"),
        attention("bf16", 128, 128, False),
        attention("bf16", 128, 128, True, "window", "sinks", "LSE"),
        attention("bf16", 80, 80, False, "bidirectional"),
        attention("bf16", 256, 256, False, "window", "softcap"),
        attention("bf16", 192, 128, True),
        attention("bf16", 512, 512, True),
        attention("fp32", 80, 80, False, "softcap"),
        attention("bf16", 128, 128, False, cache="fp8e4nv"),
        attention("fp16", 64, 64, False, cache="fp8e5"),
        attention("bf16", 128, 128, True, cache="i8"),
        merge("bf16", 128, "sinks", "LSE"),
        merge("fp32", 80, "order"),
    ]


def everything() -> list[Variant]:
    """Each dtype with each head size and tile size, and each feature with both tile sizes."""
    few_and_many = (False, True)
    sizes = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
    dtypes = [("bf16", ""), ("fp16", ""), ("fp32", "")]
    dtypes += [("bf16", cache) for cache in ("fp8e4nv", "fp8e5", "i8")]
    variants = [
        *covering(),
        *(
            attention(dtype, *size, many, cache=cache)
            for dtype, cache in dtypes
            for size in [*sizes, *([(512, 512)] if dtype != "fp32" else [])]
            for many in few_and_many
        ),
        *(
            attention("bf16", 128, 128, many, feature)
            for feature in FEATURES
            for many in few_and_many
        ),
        *(merge(dtype, dim) for dtype in ("bf16", "fp16", "fp32") for dim in (64, 128, 256)),
    ]
    return list({variant.name: variant for variant in variants}.values())
