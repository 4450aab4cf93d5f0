"""Hugging Face transformers, in our own environment: ``generate``, or its continuous batching.

    python drive_hf.py generate|batching

``generate`` runs one left-padded batch. What all of its prompts share is computed once, kept for
the next run, and deep-copied and repeated for each batch, as its documentation shows for a shared
system prompt.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

from driver import Clock, Driver, Reply, Request, common_length, serve

SHORTEST_PREFIX = 16  # Below this many shared tokens a copy is not worth its while.


def shared_length(prompts: list[list[int]]) -> int:
    """Leading tokens that all prompts share; at least one of each is left over."""
    return min(common_length(prompts), min(map(len, prompts)) - 1)


def length_of(request: Request) -> dict[str, Any]:
    """Settings of `generate` by which every continuation runs to its full length."""
    return {"max_new_tokens": request["max_tokens"], "min_new_tokens": request["max_tokens"]}


class HuggingFace(Driver):
    def load(self, request: Request) -> Reply:
        import torch
        from transformers import AutoModelForCausalLM, GenerationMixin

        torch.set_num_threads(request["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(
            request["model"], dtype=request["dtype"], local_files_only=True
        ).eval()
        config = self.model.generation_config
        eos = config.eos_token_id
        self.padding = (eos[0] if isinstance(eos, list) else eos) or 0
        # The argument was renamed in 5.2x; the old name goes in 5.40.
        names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        return {}


class Generate(HuggingFace):
    def load(self, request: Request) -> Reply:
        super().load(request)
        self.reset()
        return {"note": "one left-padded batch, shared prefix from a deep copy"}

    def reset(self) -> None:
        self.kept_tokens: list[int] = []
        self.kept: Any = None

    def prefix(self, tokens: list[int]) -> tuple[Any, int]:
        """Keys and values of a prefix, and how many of its tokens were kept from the run before."""
        import torch
        from transformers import DynamicCache

        found = common_length([self.kept_tokens, tokens])
        if found < len(tokens):
            cache = self.kept_up_to(found) if found else DynamicCache(config=self.model.config)
            given = {self.cache_name: cache, "use_cache": True, "logits_to_keep": 1}
            with torch.inference_mode():
                self.model(input_ids=torch.tensor([tokens[found:]]), **given)
            self.kept, self.kept_tokens = cache, tokens
        return self.kept_up_to(len(tokens)), found

    def kept_up_to(self, length: int) -> Any:
        """A copy of what is kept of the first tokens."""
        cache = copy.deepcopy(self.kept)
        if surplus := len(self.kept_tokens) - length:
            cache.crop(-surplus)
        return cache

    def run(self, request: Request) -> Reply:
        import torch
        from transformers import StoppingCriteriaList

        prompts, kind = request["prompts"], request["kind"]
        width = request["width"] if kind in ("sample", "beam") else 1
        clock = Clock(len(prompts))

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            clock.note_all()
            return torch.zeros(len(input_ids), dtype=torch.bool)

        # The cache must have a row for each continuation, so each sample is a prompt of its own.
        rows = [p for p in prompts for _ in range(width)] if kind == "sample" else prompts
        length = max(map(len, rows))
        shared = shared_length(prompts)
        shared = shared if shared >= SHORTEST_PREFIX else 0
        ids, mask = self.padded(rows, shared, length)
        settings = length_of(request)
        if kind == "beam":
            settings |= {"num_beams": width, "num_return_sequences": width, "do_sample": False}
        elif kind == "sample":
            settings |= {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        else:
            settings |= {"do_sample": False}
        found = 0
        if shared:
            cache, found = self.prefix(prompts[0][:shared])
            cache.batch_repeat_interleave(len(rows) * (width if kind == "beam" else 1))
            settings[self.cache_name] = cache
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                pad_token_id=self.padding,
                stopping_criteria=StoppingCriteriaList([note]),
                **settings,
            )
        tokens = out[:, length:].tolist()
        return {
            "tokens": [tokens[i : i + width] for i in range(0, len(tokens), width)],
            "times": clock.times,
            "cached_tokens": [found] * len(prompts),
        }

    def padded(self, rows: list[list[int]], shared: int, length: int) -> tuple[Any, Any]:
        """Token ids and mask; int64 (rows, length): the padding stands behind what is shared."""
        import torch

        ids, mask = [], []
        for row in rows:
            gap = length - len(row)
            ids.append(row[:shared] + [self.padding] * gap + row[shared:])
            mask.append([1] * shared + [0] * gap + [1] * (len(row) - shared))
        return torch.tensor(ids), torch.tensor(mask)


class ContinuousBatching(HuggingFace):
    """Its manager lives for one call here, and with it the prefixes: each run begins cold."""

    def load(self, request: Request) -> Reply:
        super().load(request)
        if not hasattr(self.model, "generate_batch"):
            raise RuntimeError("this version of transformers has no continuous batching")
        self.batch_tokens = max(request["max_len"], 2048)
        self.pages = -(-request["max_len"] * request["max_seqs"] // 256) + request["max_seqs"]
        return {"note": "its blocks are shared within a run, not between runs"}

    def reset(self) -> None:
        pass

    def run(self, request: Request) -> Reply:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        prompts, kind = request["prompts"], request["kind"]
        if kind == "beam":
            raise RuntimeError("its continuous batching has no beam search")
        width = request["width"] if kind == "sample" else 1
        settings = GenerationConfig(
            do_sample=kind == "sample",
            num_return_sequences=width,
            max_new_tokens=request["max_tokens"],
            eos_token_id=-1,  # Nothing ends a text before its length.
            pad_token_id=self.padding,
            **({"temperature": 1.0, "top_p": 1.0, "top_k": 0} if kind == "sample" else {}),
        )
        sizes = ContinuousBatchingConfig(
            num_blocks=self.pages, max_batch_tokens=self.batch_tokens, seed=0
        )
        clock = Clock(len(prompts))
        done = list(
            self.model.generate_batch(
                prompts,
                generation_config=settings,
                continuous_batching_config=sizes,
                record_timestamps=True,
                warmup=False,
            ).values()
        )
        if errors := [each.error for each in done if each.error]:
            raise RuntimeError(errors[0])
        if len(done) != width * len(prompts):
            raise RuntimeError(f"{len(done)} of {width * len(prompts)} continuations came back")
        groups = [done[i : i + width] for i in range(0, len(done), width)]
        return {
            "tokens": [[each.generated_tokens for each in group] for group in groups],
            "times": [[t - clock.start for t in group[-1].timestamps or ()] for group in groups],
        }


if __name__ == "__main__":
    serve({"generate": Generate, "batching": ContinuousBatching}[sys.argv[1]])
