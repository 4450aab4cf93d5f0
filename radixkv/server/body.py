"""A request's body: parsed off the event loop if it is large, and refused where it is not known."""

from __future__ import annotations

import asyncio
import difflib
import reprlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from radixkv.decoding.unknown import ALIASES
from radixkv.errors import RequestError, UnsupportedParameterError
from radixkv.llm import LLM
from radixkv.server.config import ServerConfig
from radixkv.server.keys import TheService

LARGE_BYTES = 1 << 16
"""From here on a body is parsed on the thread for texts: it may take milliseconds."""

MOST_TOLD = 4
"""So many unknown fields are named: looking for what is near takes a millisecond for each."""

LONGEST_NAME = 64
"""A longer field's name is near none of ours."""

BYTES_A_VALUE, BYTES_A_PART = 8, 128
"""Of the bytes that a body may have, a value (a token id, say) stands for so many, and an object,
a list or a field for so many. They are made in one go, in which nothing else runs: 2 MiB of
``[],`` would keep the event loop waiting for a second."""

_NO_SIGNS = bytes(set(range(256)) - set(b'"[{:,'))

BODY_SECONDS = 60.0
"""A body that has not come by then does not come."""

Schema = dict[str, Any]

Salt = Annotated[str, Field(min_length=1, max_length=256)]
"""What is cached with a salt is found with the same salt alone."""


class Body(BaseModel):
    """Base of all bodies. Values are taken as they are typed: "1" is no number here."""

    model_config = ConfigDict(
        extra="allow", strict=True, json_schema_extra={"additionalProperties": False}
    )

    # What other servers or other versions of the API have, and what to say of it here.
    hints: ClassVar[Mapping[str, str]] = {}

    def refuse_unknown(self) -> None:
        """Raise UnsupportedParameterError for what is given and is no field, in parts as well."""
        if self.model_extra:
            raise UnsupportedParameterError(self.tell_unknown(self.model_extra))
        for name in self.model_fields_set:
            value = getattr(self, name)
            for part in value if isinstance(value, list) else (value,):
                if not isinstance(part, Body):
                    break  # Lists are of one kind.
                part.refuse_unknown()

    @classmethod
    def tell_unknown(cls, names: Iterable[str]) -> str:
        """What to say of fields that are not known; empty if all are."""
        known = sorted(field.alias or name for name, field in cls.model_fields.items())
        unknown = (name for name in names if name not in known)
        return "; ".join(_hint(name, known, cls.hints) for name in islice(unknown, MOST_TOLD))


def _hint(name: str, known: list[str], hints: Mapping[str, str]) -> str:
    if name in hints:
        return f"{name!r} is not supported: {hints[name]}"
    if len(name) > LONGEST_NAME:
        return f"unknown field {reprlib.repr(name)}; the fields are {', '.join(known)}"
    near = difflib.get_close_matches(name.lower(), [*known, *ALIASES], n=1, cutoff=0.6)
    if near:
        return f"unknown field {name!r}; did you mean {_as_field(near[0], known)!r}?"
    return f"unknown field {name!r}; the fields are {', '.join(known)}"


def _as_field(name: str, known: list[str]) -> str:
    """The field behind a name that another engine has for it."""
    return name if name in known else ALIASES[name].split(" ")[0]


B = TypeVar("B", bound=Body)


def parsed(kind: type[B]) -> Callable[..., Coroutine[Any, Any, B]]:
    """A dependency that gives a request's body as ``kind``.

    FastAPI would parse it on the event loop, twice over: to objects, and from these to the model.
    """

    def parse(raw: bytes) -> B:
        try:
            body = kind.model_validate_json(raw)
        except ValidationError as error:
            told = _telling(error)
            if told["type"] == "missing" and not told["loc"][1:] and len(raw) < LARGE_BYTES:
                # Perhaps it is there under a name that is nearly right.
                unknown = kind.tell_unknown(from_json(raw))
                told["msg"] += f"; {unknown}" if unknown else ""
            raise RequestValidationError([told]) from None
        body.refuse_unknown()
        return body

    async def dependency(request: Request, service: TheService) -> B:
        if (coding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            # What is small when it comes may be gigabytes when it is unpacked.
            raise HTTPException(415, f"bodies in {reprlib.repr(coding)} are not taken; send JSON")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                raw = await request.body()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the client left before its body was complete") from None
        if len(raw) < LARGE_BYTES:
            return parse(raw)

        def parse_large(_: LLM) -> B:
            check_parts(raw, max(service.config.max_body_bytes, ServerConfig.max_body_bytes))
            return parse(raw)

        return await service.on_texts(parse_large)

    return dependency


def check_parts(raw: bytes, most_bytes: int) -> None:
    """Refuse a body that is made of too much, before anything is made of it.

    Parameters
    ----------
    raw : bytes
        JSON, or not.
    most_bytes : int
        As many as a body may have.

    Raises
    ------
    RequestError
    """
    values, parts = counted(raw)
    most_values, most_parts = most_bytes // BYTES_A_VALUE, most_bytes // BYTES_A_PART
    if values > most_values:
        raise RequestError(
            f"the body has {values} values in lists and objects; this server takes {most_values} "
            "in one request"
        )
    if parts > most_parts:
        raise RequestError(
            f"the body has {parts} objects, lists and fields; this server takes {most_parts} in "
            "one request"
        )


def counted(raw: bytes) -> tuple[int, int]:
    """Commas of a JSON text; and its objects, lists and fields. Others run most of that time."""
    # In strings alone there are backslashes; without them each quote begins or ends one.
    if b"\\" in raw:
        raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    signs = np.frombuffer(raw.translate(None, _NO_SIGNS), np.uint8)
    in_string = np.cumsum(signs == ord('"'), dtype=np.uint8) & 1
    outside = signs[in_string == 0]
    commas = int(np.count_nonzero(outside == ord(",")))
    return commas, len(outside) - commas - int(np.count_nonzero(outside == ord('"')))


def _telling(error: ValidationError) -> dict[str, Any]:
    """What is wrong with the first field that is; of alternatives, what tells most."""
    details: list[Any] = error.errors(include_url=False, include_context=False, include_input=False)
    first = [its for its in details if its["loc"][:1] == details[0]["loc"][:1]]
    found: dict[str, Any] = next(
        (its for its in first if not its["type"].endswith("_type")), first[0]
    )
    return found


def documented(kind: type[Body]) -> Schema:
    """The body's part of a route in the OpenAPI document: ``openapi_extra`` of `parsed` routes."""
    schema = kind.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema that stands without its definitions; none of ours refers to itself."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(part, definitions) for name, part in schema.items()}
