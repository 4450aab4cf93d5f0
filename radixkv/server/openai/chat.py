"""POST /v1/chat/completions."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from radixkv.engine import Completion, RequestOutput
from radixkv.engine.beams import Params
from radixkv.errors import RequestError, UnsupportedParameterError
from radixkv.llm import LLM
from radixkv.model.loading import render_chat
from radixkv.server.body import documented, parsed
from radixkv.server.keys import ApiKey, TheService
from radixkv.server.openai.chunks import ChunkWriter
from radixkv.server.openai.fields import Count, SharedFields
from radixkv.server.openai.growth import Growth
from radixkv.server.openai.logprobs import chat_entry, prompt_entries
from radixkv.server.openai.messages import plain_messages
from radixkv.server.openai.reply import Reply
from radixkv.server.openai.sampling import make_params, num_branches
from radixkv.server.openai.texts import characters_of
from radixkv.server.openai.tools import CallReader, check_form, check_tools, hides_calls
from radixkv.server.service import Service


class ChatBody(SharedFields):
    """A conversation to be answered."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None

    hints: ClassVar[dict[str, str]] = {
        **SharedFields.hints,
        "prompt": "this is the chat endpoint; give messages, or use /v1/completions",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "chat_template": "conversations are rendered by the model's own template only",
        "echo": "only /v1/completions has it",
        "audio": "models here speak text",
    }

    @property
    def most_tokens(self) -> int | None:
        """The most new tokens, by whichever name they were given."""
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise RequestError("max_tokens and max_completion_tokens are the same; give one")
        return next(iter(both), None)


class ChatReply(Reply[ChatBody]):
    """The answer to a conversation."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    chunk_text = ('"delta": {"content": ', "}")

    def __init__(self, service: Service, key: str | None, body: ChatBody) -> None:
        super().__init__(service, key, body)
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader] = {}

    def _check(self) -> None:
        super()._check()
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true")
        self.tools = body.tools or []
        check_tools(self.tools)
        if body.tool_choice not in (None, "none", "auto"):
            raise UnsupportedParameterError(
                f"tool_choice {reprlib.repr(body.tool_choice)} is not supported: a call cannot be "
                'forced; use "auto", or response_format with a JSON schema'
            )
        if self.tools and body.parallel_tool_calls is False:
            raise UnsupportedParameterError(
                "parallel_tool_calls: false is not supported: how many calls a model makes is its "
                "own choice"
            )
        if body.tool_choice == "none":
            self.tools = []

    def prompts(self, llm: LLM) -> Iterable[tuple[Sequence[int], Params]]:
        body = self.body
        characters = characters_of(body.messages) + characters_of(self.tools)
        self.texts.check_length(characters, llm.engine.max_model_len)
        if self.tools:
            check_form(llm.loaded)
            if hides_calls(llm.loaded):
                body.skip_special_tokens = False
        opens = body.add_generation_prompt
        tokens = render_chat(
            llm.loaded,
            plain_messages(body.messages),
            True if opens is None else opens,
            tools=self.tools,
            variables=body.chat_template_kwargs,
        )
        room = llm.engine.door.room(len(tokens), num_branches(body))
        most = body.most_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        yield (
            tokens,
            make_params(body, max_tokens=room if most is None else most, logprobs=logprobs),
        )

    # -- at once ---------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        (output,) = outputs
        return [self._choice(one) for one in output.outputs]

    def _choice(self, one: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": one.text, "refusal": None}
        ending = one.finish_reason
        if self.tools:
            reader = CallReader()
            parts = [*reader.push(one.text), *reader.finish()]
            calls = [part.as_json() for part in parts if not isinstance(part, str)]
            if calls:
                said = "".join(part for part in parts if isinstance(part, str))
                message |= {"content": said or None, "tool_calls": calls}
                ending = "tool_calls" if ending == "stop" else ending
        entries = None
        if one.logprobs is not None:
            table = self.texts.table
            pairs = zip(one.token_ids, one.logprobs, strict=True)
            entries = [chat_entry(table, token, its) for token, its in pairs]
        return {
            "index": one.index,
            "message": message,
            "logprobs": entries and {"content": entries, "refusal": None},
            "finish_reason": ending,
            "stop_reason": one.stop_reason,
        }

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        if output.prompt_logprobs is None:
            return {}
        prompt, entries = output.prompt_token_ids, output.prompt_logprobs
        return {"prompt_logprobs": prompt_entries(self.texts.table, prompt, entries)}

    # -- as a stream -----------------------------------------------------------------------------

    def chunks(
        self, writer: ChunkWriter, place: int, growth: Growth, usage: str | None
    ) -> Iterator[str]:
        index = growth.index
        if index not in self._begun:
            self._begun.add(index)
            yield writer.delta(index, {"role": "assistant", "content": ""})
        text, ending = growth.text, growth.ending
        if self.tools:
            text = yield from self._said(writer, growth)
            if ending == "stop" and self._readers[index].num_calls:
                ending = "tool_calls"
        if not (text or ending or growth.logprobs or usage):
            return
        logprobs = "null"
        if growth.logprobs:
            entries = [chat_entry(self.texts.table, *pair) for pair in growth.logprobs]
            logprobs = json.dumps({"content": entries, "refusal": None})
        yield writer.text(index, text, ending, logprobs, usage, growth.stop_reason)

    def _said(self, writer: ChunkWriter, growth: Growth) -> Generator[str, None, str]:
        """Give what comes before and with calls; return the text behind them."""
        reader = self._readers.setdefault(growth.index, CallReader())
        number = reader.num_calls
        parts = reader.push(growth.text)
        if growth.ending is not None:
            parts += reader.finish()
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            if text:
                yield writer.text(growth.index, text)
                text = ""
            call = {"index": number, **part.as_json()}
            number += 1
            yield writer.delta(growth.index, {"tool_calls": [call]})
        return text


router = APIRouter(tags=["openai"])
Body = Annotated[ChatBody, Depends(parsed(ChatBody))]


@router.post("/v1/chat/completions", openapi_extra=documented(ChatBody))
async def chat_completions(
    request: Request, service: TheService, key: ApiKey, body: Body
) -> Response:
    """Answer a conversation, at once or as a stream."""
    return await ChatReply(service, key, body).respond(request)
