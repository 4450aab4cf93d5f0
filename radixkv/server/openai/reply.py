"""Reply: the way that chat and plain completions go alike, from a body to a response."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from radixkv.engine import RequestOutput
from radixkv.engine.beams import Params
from radixkv.errors import RadixKVError, RequestError, UnsupportedParameterError
from radixkv.inputs import params_for
from radixkv.llm import LLM
from radixkv.server.answer import Answer, arrivals
from radixkv.server.openai.chunks import DONE, ChunkWriter, error_event
from radixkv.server.openai.fields import SharedFields
from radixkv.server.openai.growth import Growth, growths
from radixkv.server.openai.jobs import (
    Job,
    begin,
    outputs_of,
    raise_failure,
    respond,
    streamed,
)
from radixkv.server.openai.models import check_model
from radixkv.server.openai.sampling import make_retention
from radixkv.server.openai.texts import Texts, texts_of
from radixkv.server.openai.usage import counts, usage_of
from radixkv.server.record import name_request
from radixkv.server.service import Service

B = TypeVar("B", bound=SharedFields)
log = logging.getLogger("radixkv.server")


class Reply(ABC, Generic[B]):
    """One request being answered.

    Parameters
    ----------
    service : Service
    key : str or None
        The caller's.
    body : SharedFields

    Raises
    ------
    RequestError
        If the body asks for what cannot be, as far as this shows without a tokenizer.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    chunk_text: ClassVar[tuple[str, str]]

    def __init__(self, service: Service, key: str | None, body: B) -> None:
        check_model(service, body.model)
        self.service = service
        self.body = body
        self.namespace = service.namespace(key, body.cache_salt)
        self.name = name_request()
        self.head = {
            "id": f"{self.prefix}-{self.name}",
            "object": self.kind,
            "created": int(time.time()),
            "model": service.model_name,
        }
        self.texts: Texts
        self.jobs: list[Job] = []
        self.num_tokens = 0
        self._check()

    def _check(self) -> None:
        body, most = self.body, self.service.config.max_n
        for name in ("n", "best_of", "beam_width"):
            if (getattr(body, name) or 0) > most:
                raise RequestError(f"{name} may be at most {most} on this server")
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream: true")
        if body.stream and body.prompt_logprobs is not None:
            raise UnsupportedParameterError(
                "prompt_logprobs does not go with stream; ask for the whole answer"
            )

    # -- what differs ----------------------------------------------------------------------------

    num_prompts = 1
    shows_generated = True

    @abstractmethod
    def prompts(self, llm: LLM) -> Iterable[tuple[Sequence[int], Params]]:
        """Tokens and parameters of each prompt, made where texts are worked on."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """The choices of an answer that comes at once."""

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What such an answer has beside choices and usage."""
        return {}

    @abstractmethod
    def chunks(
        self, writer: ChunkWriter, place: int, growth: Growth, usage: str | None
    ) -> Iterable[str]:
        """What a stream says of the growth of one prompt's continuation."""

    # -- what does not ---------------------------------------------------------------------------

    async def respond(self, request: Request) -> Response:
        """Answer a request, at once or as a stream, for as long as its client waits."""
        return await respond(request, self._respond())

    async def _respond(self) -> Response:
        answers = await begin(self.service, self.name, self.num_prompts, self._prepare)
        if self.body.stream:
            return await streamed(self._events(answers))
        outputs = await outputs_of(answers)
        if self.wants_table:
            # Log-probabilities may be a hundred thousand.
            raw = await self.service.on_texts(lambda _: self._rendered(outputs))
        else:
            raw = self._rendered(outputs)
        return Response(raw, media_type="application/json")

    def _rendered(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices, usage = self.whole(outputs), usage_of(outputs, generated=self.shows_generated)
        extras = self.extras(outputs)
        answer = {**self.head, "choices": choices, "usage": usage, **extras}
        return to_json(answer, inf_nan_mode="null")

    def _prepare(self, llm: LLM) -> list[Job]:
        self.texts = texts_of(llm)
        retention = make_retention(self.body, llm)
        prompts, given = zip(*self.prompts(llm), strict=True)
        for prompt, params in zip(prompts, params_for(prompts, given, llm.seed), strict=True):
            self.jobs.append(
                Job(
                    prompt=llm.engine.check_request(prompt, params),
                    params=params,
                    namespace=self.namespace,
                    retention=retention,
                )
            )
        if self.wants_table:
            _ = self.texts.table
        return self.jobs

    @property
    def wants_table(self) -> bool:
        """Whether tokens are shown by themselves."""
        params = self.jobs[0].params
        return params.logprobs is not None or self.body.prompt_logprobs is not None

    async def _events(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes]:
        options = self.body.stream_options
        tells = options is not None and bool(options.include_usage)
        running = tells and options is not None and bool(options.continuous_usage_stats)
        head = self.head | {"object": self.chunk_kind}
        writer = ChunkWriter(head, self.chunk_text, ', "usage": null' if tells else "")
        begun = False
        try:
            async for place, pieces in arrivals(answers):
                if not pieces:
                    output = answers[place].output
                    assert output is not None
                    raise_failure(output)
                    continue
                events: list[str] = []
                for growth in growths(pieces):
                    self.num_tokens += growth.num_tokens
                    usage = self._running_usage() if running else None
                    events += self.chunks(writer, place, growth, usage)
                if events:
                    yield "".join(events).encode()
                    begun = True
            if tells:
                outputs = [answer.output for answer in answers if answer.output is not None]
                usage_now = usage_of(outputs, generated=self.shows_generated)
                yield writer.total(usage_now).encode()
            yield DONE
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, RadixKVError):
                log.exception("a stream broke: %s", error)
            yield error_event(error)
        finally:
            for answer in answers:
                answer.cancel()

    def _running_usage(self) -> str:
        prompt = sum(len(job.prompt) for job in self.jobs)
        return json.dumps(counts(prompt, self.num_tokens))
