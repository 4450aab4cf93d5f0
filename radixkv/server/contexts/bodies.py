"""What a client sends: a body for each operation, and lists of operations."""

from __future__ import annotations

import string
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from radixkv.cache import DEFAULT_RETENTION, EPHEMERAL, Retention
from radixkv.decoding import SamplingParams
from radixkv.errors import RequestError
from radixkv.server.body import Body, Salt

# A client may choose ids, so that it can name a branch before the server has heard of it. They
# must be as hard to guess as the server's own: 128 random bits.
ContextId = Annotated[str, StringConstraints(pattern=r"^ctx-[A-Za-z0-9_-]{22,64}$")]
Seconds = Annotated[StrictFloat | StrictInt, Field(gt=0, le=10**9, allow_inf_nan=False)]

MAX_OPERATIONS = 1024
MAX_BRANCHES = 4096
"""Of one fork or join; a server has fewer contexts by default."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "messages" if value and isinstance(value[0], dict) else "tokens"
    return None


_ONE_OF = Discriminator(
    _kind,
    custom_error_type="content",
    custom_error_message="Input should be a text, a list of token ids, or a list of messages",
)
Tokens = Annotated[list[StrictInt], Field(fail_fast=True), Tag("tokens")]
Continuation = Annotated[Annotated[str, Tag("text")] | Tokens, _ONE_OF]
Content = Annotated[
    Annotated[str, Tag("text")] | Tokens | Annotated[Messages, Tag("messages")], _ONE_OF
]


class Retained(Body):
    """How long blocks will be wanted: "default", "ephemeral", or a time to live in seconds."""

    cache_retention: Literal["default", "ephemeral"] | Seconds = "default"

    @property
    def retention(self) -> Retention:
        if isinstance(self.cache_retention, str):
            return EPHEMERAL if self.cache_retention == "ephemeral" else DEFAULT_RETENTION
        return Retention.for_seconds(self.cache_retention)


class Open(Retained):
    """A new context."""

    content: Content = ""
    cache_salt: Salt | None = None


class Append(Body):
    """Text, token ids or messages behind what a context says."""

    content: Content


class Generate(Body):
    """A continuation; all other fields are those of `SamplingParams`."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    def refuse_unknown(self) -> None:
        """All is handed on; `params` says what is not known."""

    @property
    def params(self) -> SamplingParams:
        """What they ask for.

        Raises
        ------
        RequestError
            If one is unknown (the nearest known one is named) or has a value that cannot work.
        """
        fields = dict(self.model_extra or {})
        try:
            if isinstance(bias := fields.get("logit_bias"), dict):
                # JSON has no other keys than strings.
                fields["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
            return SamplingParams(**fields)
        except TypeError as error:
            raise RequestError(f"a sampling parameter is of the wrong type: {error}") from None


def _token_id(key: str) -> int | str:
    return int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key


class StreamedGenerate(Generate):
    """The same, for its own route: text as it comes, if it is streamed."""

    stream: StrictBool = False


class Score(Body):
    """A continuation that is not kept."""

    content: Continuation


class Choose(Body):
    """Continuations, of which the likeliest is kept."""

    options: Annotated[list[Continuation], Field(min_length=1, fail_fast=True)]


class Fork(Body):
    """Branches."""

    n: Annotated[StrictInt, Field(ge=1)]
    ids: Annotated[list[ContextId], Field(max_length=MAX_BRANCHES, fail_fast=True)] | None = None


class Majority(Body):
    """A vote over what was generated: the whole text, stripped, or the last number in it."""

    majority: Literal["text", "number"]


class Answers(Body):
    """A vote over answers that the client found, one a branch; None does not vote."""

    answers: Annotated[list[str | StrictInt | None], Field(fail_fast=True)]


class Scores(Body):
    """Scores that the client gave, one a branch; the highest wins."""

    scores: Annotated[list[StrictFloat | StrictInt], Field(fail_fast=True)]


class Join(Body):
    """The end of branches, and what comes of them."""

    branches: Annotated[list[str], Field(max_length=MAX_BRANCHES, fail_fast=True)]
    mode: Literal["best", "append", "all"] = "best"
    by: Literal["mean_logprob", "total_logprob"] | Majority | Answers | Scores = "mean_logprob"
    template: str = "{text}\n"

    @field_validator("template")
    @classmethod
    def _is_plain(cls, template: str) -> str:
        """Format specifications can ask for any width, and fields for anything about a text."""
        for _, name, width, conversion in string.Formatter().parse(template):
            if name is not None and (name not in ("text", "index") or width or conversion):
                raise ValueError("a template can hold {text} and {index} alone")
        return template

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        given = getattr(self.by, "answers", None) or getattr(self.by, "scores", None)
        if given is not None and len(given) != len(self.branches):
            raise ValueError(f"{len(self.branches)} branches, but {len(given)} answers or scores")
        return self


class Checkpoint(Body):
    """A place to come back to, under a name: one of the server's own unless given."""

    name: Name | None = None


class Rollback(Body):
    """Back to a checkpoint, the last one unless named."""

    checkpoint: Name | None = None


class Cancel(Body):
    """The end of what is running on a context, or of that one with a name."""

    name: Name | None = None


class Close(Retained):
    """The end of a context and its branches."""

    cache_retention: Literal["default", "ephemeral"] | Seconds = "ephemeral"


class Read(Body):
    """What a context says and holds."""


Operand = (
    Open | Append | Generate | Score | Choose | Fork | Join | Checkpoint | Rollback | Cancel
) | (Close | Read)
KINDS = (
    "open",
    "append",
    "generate",
    "score",
    "choose",
    "fork",
    "join",
    "checkpoint",
    "rollback",
    "cancel",
    "close",
    "read",
)


class Operation(Body):
    """One operation on one context: the field that is given says which.

    ``name`` is what `Cancel` calls a generation, a score or a choice by.
    """

    context: ContextId
    name: Name | None = None
    open: Open | None = None
    append: Append | None = None
    generate: Generate | None = None
    score: Score | None = None
    choose: Choose | None = None
    fork: Fork | None = None
    join: Join | None = None
    checkpoint: Checkpoint | None = None
    rollback: Rollback | None = None
    cancel: Cancel | None = None
    close: Close | None = None
    read: Read | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ValueError(f"an operation has one of {', '.join(KINDS)}")
        return self

    @property
    def operand(self) -> Operand:
        """Whichever was given."""
        found = (getattr(self, kind) for kind in KINDS)
        operand: Operand = next(each for each in found if each is not None)
        return operand


class Operations(Body):
    """Operations that are carried out in order, all between two steps of the engine."""

    operations: Annotated[
        list[Operation], Field(min_length=1, max_length=MAX_OPERATIONS, fail_fast=True)
    ]
