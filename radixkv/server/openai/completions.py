"""POST /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, WithJsonSchema
from starlette.responses import Response

from radixkv.decoding.checks import in_vocabulary
from radixkv.engine import Completion, RequestOutput
from radixkv.engine.beams import Params
from radixkv.errors import RequestError, UnsupportedParameterError
from radixkv.inputs import Prompt
from radixkv.llm import LLM
from radixkv.server.body import documented, parsed
from radixkv.server.keys import ApiKey, TheService
from radixkv.server.openai.chunks import ChunkWriter
from radixkv.server.openai.fields import Count, SharedFields
from radixkv.server.openai.growth import Growth
from radixkv.server.openai.logprobs import CompletionLogprobs, prompt_entries
from radixkv.server.openai.reply import Reply
from radixkv.server.openai.sampling import make_params

MAX_TOKENS = 16
"""Where a request does not say; OpenAI's."""

MOST_PROMPTS = 4096
"""More are not even looked at; how many a server serves is its ``max_n``."""

_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_LISTS = {"type": "array", "items": _IDS, "minItems": 1}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, _LISTS]}


def is_ids(value: object) -> bool:
    """Whether this is a list of token ids; it may be empty."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_prompts(value: Any) -> list[Prompt]:
    """A list of prompts, also of one; each a text or token ids."""
    if isinstance(value, str) or (value and is_ids(value)):
        return [value]
    many = value if isinstance(value, list) else []
    if len(many) > MOST_PROMPTS:
        raise ValueError(f"has {len(many)} prompts; {MOST_PROMPTS} are the most")
    if many and (set(map(type, many)) == {str} or all(map(is_ids, many))):
        return many
    raise ValueError("must be a text, token ids, or a list of texts or of lists of token ids")


Prompts = Annotated[Any, AfterValidator(as_prompts), WithJsonSchema(PROMPT_SCHEMA)]


class CompletionBody(SharedFields):
    """Prompts to be continued."""

    prompt: Prompts
    logprobs: Count | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    hints: ClassVar[dict[str, str]] = {
        **SharedFields.hints,
        "messages": "this endpoint takes a prompt; use /v1/chat/completions",
        "max_completion_tokens": "here it is max_tokens",
        "top_logprobs": "here logprobs is the number of them",
        "suffix": "texts are continued, not filled in",
        "tools": "only /v1/chat/completions has them",
    }


class CompletionReply(Reply[CompletionBody]):
    """The continuations of prompts."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    chunk_text = ('"text": ', "")

    def _check(self) -> None:
        super()._check()
        body = self.body
        self.num_prompts = len(body.prompt)
        if self.num_prompts > self.service.config.max_n:
            raise RequestError(
                f"{self.num_prompts} prompts; a request may have {self.service.config.max_n} on "
                "this server"
            )
        self.most = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        # Whoever only wants a prompt read back, and its log-probabilities, asks for no tokens.
        self.shows_generated = not (body.echo and self.most == 0)
        self.scores_prompt = bool(body.echo) and body.logprobs is not None
        if self.scores_prompt and body.stream:
            raise UnsupportedParameterError(
                "echo with logprobs does not go with stream; ask for the whole answer"
            )
        self.echoes = [""] * self.num_prompts
        self._begun: set[int] = set()
        self._columns: dict[int, CompletionLogprobs] = {}

    def prompts(self, llm: LLM) -> Iterable[tuple[Sequence[int], Params]]:
        body = self.body
        if self.scores_prompt and body.prompt_logprobs is None:
            body = body.model_copy(update={"prompt_logprobs": body.logprobs})
        params = make_params(
            body, max_tokens=self.most if self.shows_generated else 1, logprobs=body.logprobs
        )
        for place, prompt in enumerate(body.prompt):
            yield self._tokens(llm, place, prompt), params

    def _tokens(self, llm: LLM, place: int, prompt: Prompt) -> Sequence[int]:
        body = self.body
        if isinstance(prompt, str):
            if body.echo:
                self.echoes[place] = prompt
            self.texts.check_length(len(prompt), llm.engine.max_model_len)
            special = body.add_special_tokens
            return self.texts.tokens(
                prompt, add_special_tokens=True if special is None else special
            )
        if min(prompt, default=0) < 0:
            raise RequestError("prompt: token ids are at least 0")
        in_vocabulary("prompt", prompt, llm.loaded.vocab_size)
        if body.echo:
            skip = body.skip_special_tokens
            self.echoes[place] = self.texts.text(
                list(prompt), skip_special_tokens=True if skip is None else skip
            )
        return prompt

    # -- at once ---------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        return [
            self._choice(place * len(output.outputs), place, output, one)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]

    def _choice(
        self, first: int, place: int, output: RequestOutput, one: Completion
    ) -> dict[str, Any]:
        shown = self.shows_generated
        choice: dict[str, Any] = {
            "index": first + one.index,
            "text": self.echoes[place] + one.text * shown,
            "logprobs": self._logprobs(output, one),
            "finish_reason": one.finish_reason if shown else "length",
            "stop_reason": one.stop_reason if shown else None,
        }
        if self.body.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            choice["prompt_logprobs"] = prompt_entries(
                self.texts.table, output.prompt_token_ids, output.prompt_logprobs
            )
        return choice

    def _logprobs(self, output: RequestOutput, one: Completion) -> dict[str, Any] | None:
        if one.logprobs is None:
            return None
        pairs: list[Any] = []
        if self.scores_prompt:
            assert output.prompt_logprobs is not None
            pairs += zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if self.shows_generated:
            pairs += zip(one.token_ids, one.logprobs, strict=True)
        return CompletionLogprobs(self.texts.table).columns(pairs)

    # -- as a stream -----------------------------------------------------------------------------

    def chunks(
        self, writer: ChunkWriter, place: int, growth: Growth, usage: str | None
    ) -> Iterator[str]:
        index = place * (self.body.n or 1) + growth.index
        text, ending, reason = growth.text, growth.ending, growth.stop_reason
        if not self.shows_generated:
            text, ending, reason = "", ending and "length", None
        if index not in self._begun:
            self._begun.add(index)
            text = self.echoes[place] + text
        if not (text or ending or growth.logprobs or usage):
            return
        logprobs = "null"
        if growth.logprobs:
            columns = self._columns.setdefault(index, CompletionLogprobs(self.texts.table))
            logprobs = json.dumps(columns.columns(growth.logprobs))
        yield writer.text(index, text, ending, logprobs, usage, reason)


router = APIRouter(tags=["openai"])
Body = Annotated[CompletionBody, Depends(parsed(CompletionBody))]


@router.post("/v1/completions", openapi_extra=documented(CompletionBody))
async def completions(request: Request, service: TheService, key: ApiKey, body: Body) -> Response:
    """Continue prompts, at once or as a stream."""
    return await CompletionReply(service, key, body).respond(request)
