"""Compiled operators for CPUs: optional, built once for this machine, found by what they depend on.

Without them torch's own operators do the same work. `python -m radixkv.native.build` builds them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
from importlib import resources
from pathlib import Path

import torch

from radixkv.folders import cache_folder

logger = logging.getLogger(__name__)

SOURCES = ("attention.cpp", "blocks.cpp", "layer.cpp", "weights.cpp")
HEADERS = (
    "arena.h", "block.h", "bytes.h", "chunk.h", "elements.h", "gather.h", "merge.h", "multiply.h",
    "narrow.h", "paged.h", "softmax.h", "store.h", "tasks.h", "team.h", "tiles.h", "vectors.h",
    "wide.h",
)  # fmt: skip
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp")


def source_folder() -> Path:
    """Where the operators' sources lie, in the package."""
    return Path(str(resources.files(__name__)))


def missing_feature() -> str | None:
    """What this machine lacks for the compiled operators; None if nothing."""
    if platform.system() != "Linux":
        return "they need Linux"
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        return "they need a CPU with AVX-512 for bfloat16"
    return None


def compile_flags() -> list[str]:
    """The compiler's flags: what `missing_feature` looks for, and AMX where torch sees it.

    Not all that this CPU has: a folder may be shared with others that are told apart by less.
    """
    tiles = torch.cpu.get_capabilities().get("amx_bf16")
    cpu = ["-march=x86-64-v4", "-mavx512bf16", *(["-mamx-tile", "-mamx-bf16"] if tiles else [])]
    return [*FLAGS, *cpu]


def library_path() -> Path:
    """Where the compiled operators of this version, torch and CPU lie, or would lie."""
    sources = [(source_folder() / name).read_text() for name in (*SOURCES, *HEADERS)]
    cpu = torch.cpu.get_capabilities()
    features = [name for name in sorted(cpu) if cpu[name] is True]
    parts = [*sources, *compile_flags(), torch.__version__, *features]
    digest = hashlib.sha256("\0".join(parts).encode())
    return cache_folder() / "native" / f"radixkv-{digest.hexdigest()[:16]}.so"


@functools.cache
def is_available() -> bool:
    """Whether the compiled operators are there; loads them when first asked."""
    if missing_feature() is not None:
        return False
    path = library_path()
    if not path.is_file():
        logger.info("compiled operators are not built; python -m radixkv.native.build builds them")
        return False
    try:
        torch.ops.load_library(path)
    except OSError as error:
        logger.warning("the compiled operators cannot be loaded, torch's are used: %s", error)
        return False
    return True


def has_attention() -> bool:
    """Whether the compiled attention is there too: it needs AMX, and leave to use it."""
    if not (is_available() and hasattr(torch.ops.radixkv, "paged_attention")):
        return False
    allowed: bool = torch.ops.radixkv.allow_tiles()
    return allowed
