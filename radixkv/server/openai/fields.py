"""What chat and plain completions have in common: OpenAI's fields, and vLLM's beside them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from radixkv.server.body import Body, Salt

MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_STOPS = 64
MOST_WORDS = 1024

Words = Annotated[list[str], Field(max_length=MOST_WORDS, fail_fast=True)]
Strings = str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]


def _retention(value: str | float | int) -> str | float | int:
    if isinstance(value, str) and value not in ("default", "ephemeral"):
        raise ValueError('must be "default", "ephemeral" or a number of seconds')
    if not isinstance(value, str) and not 0 < value < 1e9:
        raise ValueError("seconds must be above 0 and below 1e9")
    return value


class StreamOptions(Body):
    """What else a stream tells."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """A schema as ``response_format`` wraps it; it is kept to whatever ``strict`` says."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What form the text has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """The same, as vLLM has it."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None


class SharedFields(Body):
    """Null stands for a field that is not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    bad_words: str | Words | None = None
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    stop: Strings | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MOST_WORDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None

    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    cache_salt: Salt | None = None
    cache_retention: Annotated[str | int | float, AfterValidator(_retention)] | None = None

    # None of these can change a result here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    hints: ClassVar[dict[str, str]] = {
        "prompt_cache_retention": "use cache_retention",
        "reasoning_effort": "no model here has levels of it; see chat_template_kwargs",
        "lora_request": "this version serves no adapters",
        "priority": "requests are served the longest cached prefix first, in the order they come",
        "kv_transfer_params": "blocks are not moved between servers",
        "truncate_prompt_tokens": "a prompt that is too long is refused, never cut",
        "logits_processors": "this version has none",
        "prompt_embeds": "prompts are texts or token ids",
    }

    @field_validator("store")
    @classmethod
    def _nothing_is_stored(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("nothing is stored here; leave it out")
        return value
