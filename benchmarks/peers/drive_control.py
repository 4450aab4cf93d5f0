"""The books of vLLM and SGLang, without models: what a request costs their prefix caches.

    python drive_control.py vllm | sglang-rust | sglang-python

Each request goes through the calls that the engine's own scheduler makes for it, with the whole
output at once, and no more than those: its tokens are handed over in the form that its requests
have. All is one process and one request at a time, so nothing else can hold blocks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import itertools
import json
import os
import sys
import time
import types
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from driver import Driver, Reply, Request, serve

sys.path.insert(0, str(Path(__file__).parents[1]))

import workloads

Stages = list[float]
BLOCK_SIZE = 16
# Requests that are timed at least, however long they take.
FEWEST = 20
# Imported by SGLang for images, and of use to no book: its build for CPUs is on no registry.
IMAGES = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


def stand_in(name: str) -> None:
    """Have an empty module under this name, whose members are all classes without contents."""

    def member(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (), {})

    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__getattr__ = member
    sys.modules[name] = module


class Books:
    """One prefix cache.

    Attributes
    ----------
    stages : tuple of str
        The names of what `serve` times.
    evicted : int
        Blocks so far.
    """

    stages: tuple[str, ...]
    evicted = 0

    def prepare(self, request: workloads.Request) -> Any:
        """The tokens as this engine's requests have them; not timed."""
        raise NotImplementedError("the books must say how they take tokens")

    def serve(self, number: int, prepared: Any) -> tuple[Stages, int]:
        """Seconds of each stage, and the prompt tokens that were found."""
        raise NotImplementedError("the books must serve")

    def free_and_cached(self) -> int:
        """Blocks that are free or may be evicted: all of them, once no request is running."""
        raise NotImplementedError("the books must balance")

    def unused(self) -> int:
        """Blocks that can be had without evicting."""
        raise NotImplementedError("the books must say what is left")


class VLLMBooks(Books):
    """`KVCacheManager` with the default hash, as the scheduler uses it."""

    stages = ("hash", "lookup", "allocate", "free")

    def __init__(self, num_blocks: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request as VLLMRequest

        layer = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        # One block is the pool's own and never handed out.
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], layer)])
        digest = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(digest)
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, digest)
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self.make = VLLMRequest
        self.params = SamplingParams(max_tokens=1 << 16)
        self._watch_evictions(self.manager.block_pool)

    def _watch_evictions(self, pool: Any) -> None:
        evict = pool._maybe_evict_cached_block

        def watched(block: Any) -> bool:
            evicted: bool = evict(block)
            self.evicted += evicted
            return evicted

        pool._maybe_evict_cached_block = watched

    def prepare(self, request: workloads.Request) -> tuple[list[int], list[int]]:
        return request.prompt.tolist(), request.output.tolist()

    def serve(self, number: int, prepared: tuple[list[int], list[int]]) -> tuple[Stages, int]:
        prompt, output = prepared
        clock, manager = time.perf_counter, self.manager
        begin = clock()
        request = self.make(str(number), prompt, self.params, None, block_hasher=self.hasher)
        hashed = clock()
        blocks, found, _ = manager.get_computed_blocks(request)
        looked_up = clock()
        if manager.allocate_slots(request, len(prompt) - found, found, blocks) is None:
            raise RuntimeError("vLLM's block pool is too small for the prompt")
        request.num_computed_tokens = len(prompt)
        allocated = clock()
        request.append_output_token_ids(output)
        rehashed = clock()
        if manager.allocate_slots(request, len(output)) is None:
            raise RuntimeError("vLLM's block pool is too small for the output")
        request.num_computed_tokens += len(output)
        again = clock()
        manager.free(request)
        freed = clock()
        stages = [
            hashed - begin + rehashed - allocated,
            looked_up - hashed,
            allocated - looked_up + again - rehashed,
            freed - again,
        ]
        return stages, found

    def free_and_cached(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def unused(self) -> int:
        queue = self.manager.block_pool.free_block_queue
        return sum(block.block_hash is None for block in queue.get_all_free_blocks())


class SGLangBooks(Books):
    """A radix cache over the paged allocator: the tree in Rust (its default) or in Python."""

    stages = ("match", "lock", "evict", "allocate", "insert", "unlock")

    def __init__(self, num_blocks: int, rust: bool) -> None:
        import torch

        # Before the stand-ins: it must find for itself that there is nothing for images.
        importlib.import_module("transformers.image_utils")
        for module in IMAGES:
            stand_in(module)
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self.torch, self.key = torch, RadixKey
        self.match_params, self.insert_params = MatchPrefixParams, InsertParams
        self.evict_params = EvictParams
        self.allocator = PagedTokenToKVPoolAllocator(
            num_blocks * BLOCK_SIZE, BLOCK_SIZE, torch.float16, "cpu", None, False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=BLOCK_SIZE,
        )
        self.cache = self.rust_cache(params) if rust else RadixCache(params)

    def rust_cache(self, params: Any) -> Any:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = "rust"
        cache = UnifiedRadixCache(params)
        core = type(cache.tree_core).__name__
        if "Rust" not in core:
            raise RuntimeError(f"SGLang fell back to {core}: its Rust tree does not load here")
        return cache

    def free_and_cached(self) -> int:
        tokens = self.allocator.available_size() + self.cache.evictable_size()
        return tokens // BLOCK_SIZE

    def unused(self) -> int:
        return self.allocator.available_size() // BLOCK_SIZE

    def prepare(self, request: workloads.Request) -> tuple[array[int], array[int]]:
        return array("q", request.prompt.tobytes()), array("q", request.tokens.tobytes())

    def serve(self, number: int, prepared: tuple[array[int], array[int]]) -> tuple[Stages, int]:
        prompt, tokens = prepared
        clock, cache, allocator = time.perf_counter, self.cache, self.allocator
        begin = clock()
        # Its scheduler, too, leaves the last token of a prompt to be computed.
        match = cache.match_prefix(self.match_params(key=self.key(prompt, limit=len(prompt) - 1)))
        found, node = match.device_prefix_len, match.last_device_node
        cached = cache.path_device_indices(node)
        matched = clock()
        lock = cache.lock(node)
        locked = clock()
        need = -(-(len(tokens) - found) // BLOCK_SIZE) * BLOCK_SIZE
        if (missing := need - allocator.available_size()) > 0:
            went = cache.evict(self.evict_params(num_tokens=missing))
            self.evicted += went.num_tokens_evicted // BLOCK_SIZE
        evicted = clock()
        slots = allocator.alloc(need)
        if slots is None:
            raise RuntimeError("SGLang's pool is too small for the request")
        allocated = clock()
        full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        values = self.torch.cat((cached, slots))
        # What was found is the tree's own; the tree in Rust would free it as duplicates.
        cache.insert(
            self.insert_params(
                key=self.key(tokens, limit=full), value=values[:full], prev_prefix_len=found
            )
        )
        if full < len(tokens):
            allocator.free(values[full:])
        inserted = clock()
        cache.unlock(lock)
        unlocked = clock()
        times = [begin, matched, locked, evicted, allocated, inserted, unlocked]
        return [after - before for before, after in itertools.pairwise(times)], found


BOOKS: dict[str, Callable[[int], Books]] = {
    "vllm": VLLMBooks,
    "sglang-rust": lambda num_blocks: SGLangBooks(num_blocks, rust=True),
    "sglang-python": lambda num_blocks: SGLangBooks(num_blocks, rust=False),
}


class Control(Driver):
    """Answers ``run`` with a workload served on a fresh cache."""

    def __init__(self) -> None:
        self.made: tuple[str, Any] = ("", None)

    def load(self, request: Request) -> Reply:
        BOOKS[sys.argv[1]](64)
        return {}

    def reset(self) -> None:
        pass

    def workload(self, spec: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Requests that fill the cache, and those to time; kept until another is asked for."""
        name = json.dumps(spec, sort_keys=True)
        if self.made[0] != name:
            self.made = (name, workloads.make(**spec))
        fill, timed = self.made[1]
        return fill, timed

    def run(self, request: Request) -> Reply:
        fill, timed = self.workload(request["workload"])
        books = BOOKS[sys.argv[1]](request["num_blocks"])
        served = fill_up(books, fill, workloads.further(**request["workload"]))
        gc.collect()
        gc.freeze()
        stages, found, cpu, evicted = [], 0, 0.0, books.evicted
        until = time.perf_counter() + request["seconds"]
        for number, each in enumerate(timed, served):
            prepared = books.prepare(each)
            begin = time.process_time()
            times, hits = books.serve(number, prepared)
            cpu += time.process_time() - begin
            stages.append([round(1e6 * seconds, 3) for seconds in times])
            found += hits
            if len(stages) >= FEWEST and time.perf_counter() > until:
                break
        gc.unfreeze()
        if (blocks := books.free_and_cached()) != request["num_blocks"]:
            raise RuntimeError(f"{blocks} blocks are left of {request['num_blocks']}")
        timed = timed[: len(stages)]
        return {
            "digest": workloads.digest(timed),
            "names": books.stages,
            "stages_us": stages,
            "cpu_us": 1e6 * cpu / len(timed),
            "hit_rate": found / sum(each.prompt_length for each in timed),
            "evicted": (books.evicted - evicted) / len(timed),
        }


def fill_up(books: Books, fill: list[workloads.Request], more: Iterator[workloads.Request]) -> int:
    """Serve what fills the books, and more until they are full; how many requests that took."""
    for number, each in enumerate(fill):
        books.serve(number, books.prepare(each))
    served = len(fill)
    unused = books.unused()
    # Who is not full after as many again never will be; what it then evicts is reported.
    for each in itertools.islice(more, len(fill)):
        # Counting walks over all blocks, so it is done anew only where the end may be near.
        if unused < workloads.own_blocks(each, BLOCK_SIZE):
            unused = books.unused()
            if unused < workloads.own_blocks(each, BLOCK_SIZE):
                break
        books.serve(served, books.prepare(each))
        unused -= workloads.own_blocks(each, BLOCK_SIZE)
        served += 1
    return served


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    serve(Control)
