"""What a request's text must obey: one grammar, as the user wrote it, in a form to compile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from radixkv.decoding.regex import checked_regex
from radixkv.decoding.schema import check_schema
from radixkv.errors import RequestError

Kind = Literal["json_schema", "regex", "grammar"]

ANY_OBJECT = '{"type": "object"}'


class Constraint(NamedTuple):
    """One grammar. Equal ones are compiled once.

    Parameters
    ----------
    name : str
        The parameter that asked for it, for messages.
    kind : "json_schema", "regex" or "grammar"
    text : str
        What is compiled: JSON, a regular expression, or rules in GBNF.
    """

    name: str
    kind: Kind
    text: str


def constraint_of(
    *, json_schema: str | None, regex: str | None, grammar: str | None, json_object: bool
) -> Constraint | None:
    """The one constraint among checked parameters; None for none.

    Raises
    ------
    RequestError
        If there are several.
    """
    given: list[Constraint] = []
    if json_schema is not None:
        given.append(Constraint("json_schema", "json_schema", json_schema))
    if regex is not None:
        given.append(Constraint("regex", "regex", checked_regex(regex)))
    if grammar is not None:
        given.append(Constraint("grammar", "grammar", grammar))
    if json_object:
        given.append(Constraint("json_object", "json_schema", ANY_OBJECT))
    if len(given) > 1:
        names = " and ".join(constraint.name for constraint in given)
        raise RequestError(f"{names} exclude each other; a text obeys one of them")
    return given[0] if given else None


def schema_text(value: object) -> str:
    """A JSON schema as JSON, if a grammar can promise all that it says.

    Parameters
    ----------
    value : str, mapping, or a class with ``model_json_schema`` as pydantic's models have it

    Raises
    ------
    RequestError
        If it is no schema, or asks for what a grammar cannot promise; see `check_schema`.
    """
    schema = _schema_of(value)
    check_schema(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema cannot be written as JSON: {error}") from None
    return grammar_text("json_schema", text)


def _schema_of(value: object) -> Mapping[str, Any]:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        try:
            value = value.model_json_schema()
        except Exception as error:  # pydantic's, for a model that has no schema
            raise RequestError(f"json_schema: {value!r} gives no schema: {error}") from error
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json_schema is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RequestError(
            "json_schema must be a dict, its JSON, or a pydantic model's class, like "
            f'{{"type": "object", "properties": ...}}, got {value!r}'
        )
    return value


def grammar_text(name: str, value: object) -> str:
    """A non-empty text that can be handed to the compiler.

    Raises
    ------
    RequestError
        If it is anything else.
    """
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a text that is not empty, got {value!r}")
    if "\0" in value:
        raise RequestError(f"{name} must not hold a null character")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} holds what is no character: {error}") from None
    return value
