"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json

from radixkv.decoding.checks import in_vocabulary
from radixkv.errors import RequestError
from radixkv.llm import LLM
from radixkv.model.loading import render_chat
from radixkv.server.body import Body, documented, parsed
from radixkv.server.keys import ApiKey, TheService
from radixkv.server.openai.messages import plain_messages
from radixkv.server.openai.models import check_model
from radixkv.server.openai.texts import characters_of, texts_of
from radixkv.server.openai.tools import check_tools

LONGEST = 8
"""A text that is counted may be so many times longer than the model's context."""


class TokenizeBody(Body):
    """A text, or a conversation, to be turned into token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    hints: ClassVar[dict[str, str]] = {"text": "it is prompt, or messages"}


class DetokenizeBody(Body):
    """Token ids to be turned into a text."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20, fail_fast=True)]


router = APIRouter(tags=["tokens"])


@router.post("/tokenize", openapi_extra=documented(TokenizeBody))
async def tokenize(
    service: TheService, key: ApiKey, body: Annotated[TokenizeBody, Depends(parsed(TokenizeBody))]
) -> Response:
    """The token ids of a text, or of a conversation in the model's chat format."""
    check_model(service, body.model)
    raw = await service.on_texts(lambda llm: to_json(_tokenize(llm, body)))
    return Response(raw, media_type="application/json")


def _tokenize(llm: LLM, body: TokenizeBody) -> dict[str, Any]:
    texts, length = texts_of(llm), llm.engine.max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages")
    texts.check_length(characters_of([body.prompt, body.messages, body.tools]), LONGEST * length)
    if body.messages is None:
        assert body.prompt is not None
        chat = (body.tools, body.add_generation_prompt, body.chat_template_kwargs)
        if any(given is not None for given in chat):
            raise RequestError(
                "tools, add_generation_prompt and chat_template_kwargs go with messages"
            )
        special = body.add_special_tokens
        tokens = texts.tokens(body.prompt, add_special_tokens=True if special is None else special)
    else:
        if body.add_special_tokens is not None:
            raise RequestError("add_special_tokens goes with prompt; a chat template adds its own")
        check_tools(body.tools or [])
        opens = body.add_generation_prompt
        tokens = render_chat(
            llm.loaded,
            plain_messages(body.messages),
            True if opens is None else opens,
            tools=body.tools or (),
            variables=body.chat_template_kwargs,
        )
    names = [texts.table[token].text for token in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": names}


@router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
async def detokenize(
    service: TheService,
    key: ApiKey,
    body: Annotated[DetokenizeBody, Depends(parsed(DetokenizeBody))],
) -> dict[str, str]:
    """The text of token ids."""
    check_model(service, body.model)
    return await service.on_texts(lambda llm: {"prompt": _detokenize(llm, body.tokens)})


def _detokenize(llm: LLM, tokens: list[int]) -> str:
    if llm.loaded.tokenizer is None:
        raise RequestError(f"{llm.loaded.name} has no tokenizer")
    in_vocabulary("tokens", tokens, llm.loaded.vocab_size)
    return texts_of(llm).text(tokens, skip_special_tokens=False)
