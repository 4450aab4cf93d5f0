"""JSON schemas, patterns and expressions: refused, or obeyed by whatever is generated."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pydantic
import pytest
from grammars import allowed_ids

from radixkv.decoding import Constraint, GrammarCompiler, SamplingParams
from radixkv.decoding.vocabulary import Vocabulary
from radixkv.errors import RequestError, UnsupportedParameterError


class Item(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=5)
    count: int = pydantic.Field(ge=0, le=20)


class Order(pydantic.BaseModel):
    items: list[Item] = pydantic.Field(max_length=2)
    note: str | None = None


def text(low: int = 0, high: int = 6) -> dict[str, Any]:
    return {"type": "string", "minLength": low, "maxLength": high}


def tagged(tag: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": tag}, "value": value},
        "required": ["kind", "value"],
    }


TAKEN: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"a": text(2, 4), "b": {"type": "integer"}},
        "required": ["a"],
    },
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "number", "minimum": 0.5, "maximum": 0.75},
    {"type": "integer", "multipleOf": 7},
    {"type": ["integer", "null"], "minimum": 3},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, text()], "items": False},
    {"enum": [1, "a", None, {"x": [1.5]}, True, 'q"\n']},
    {"type": "string", "enum": ["a", "b"]},
    {"const": {"é": "\\"}},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "string", "pattern": "^..$"},
    {"type": "string", "pattern": r"^\s\D\W\S$"},
    {"type": "string", "pattern": "^[^a]$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "integer", "maximum": 9}, text(1, 3)]},
    {"oneOf": [{"type": "integer"}, text(), {"type": "null"}]},
    {"oneOf": [tagged("i", {"type": "integer"}), tagged("s", text())]},
    {"allOf": [{"type": "integer", "minimum": 3, "maximum": 30}]},
    {
        "$defs": {"leaf": {"type": "integer"}},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/leaf"}, "y": {"$ref": "#/properties/x"}},
    },
    {
        "type": "object",
        "additionalProperties": {"type": "integer", "maximum": 5},
        "minProperties": 1,
    },
    {"type": "object", "patternProperties": {"^x[a-z]$": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": text()},
    Order.model_json_schema(),
]


def fits(value: Any, schema: Any, root: Any) -> bool:
    """Whether a value is valid; a validator of what the schemas above use, and no more."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        found = root
        for name in schema["$ref"].split("/")[1:]:
            found = found[name]
        return fits(value, found, root)
    for keyword, enough in (("anyOf", any), ("allOf", all)):
        if keyword in schema and not enough(fits(value, its, root) for its in schema[keyword]):
            return False
    if "oneOf" in schema and sum(fits(value, its, root) for its in schema["oneOf"]) != 1:
        return False
    if "enum" in schema and json.dumps(value) not in map(json.dumps, schema["enum"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }  # fmt: skip
    named = schema.get("type", [])
    named = [named] if isinstance(named, str) else named
    right = [kind for kind in named if isinstance(value, kinds[kind])]
    if named and (not right or (isinstance(value, bool) and "boolean" not in named)):
        return False
    if isinstance(value, str):
        low, high = schema.get("minLength", 0), schema.get("maxLength", 1 << 30)
        # As ECMAScript has them.
        pattern = schema.get("pattern", "").replace(r"\s", r"[\s\ufeff]")
        pattern = pattern.replace(r"\W", "[^A-Za-z0-9_]")
        pattern = pattern.replace(r"\D", "[^0-9]")
        if schema.get("format") == "date":
            pattern = r"^\d{4}-\d\d-\d\d$"
        return low <= len(value) <= high and re.search(pattern, value) is not None
    if isinstance(value, int | float):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and schema.get("exclusiveMinimum", value - 1) < value
            and value < schema.get("exclusiveMaximum", value + 1)
            and value % schema.get("multipleOf", 1 if isinstance(value, int) else value or 1) == 0
        )
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        each = [*first, *[schema.get("items", True)] * (len(value) - len(first))]
        return schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99) and all(
            fits(item, its, root) for item, its in zip(value, each, strict=False)
        )
    return not isinstance(value, dict) or object_fits(value, schema, root)


def object_fits(value: dict[str, Any], schema: Mapping[str, Any], root: Any) -> bool:
    if len(value) < schema.get("minProperties", 0) or set(schema.get("required", ())) - set(value):
        return False
    for name, its in value.items():
        patterns = [p for p in schema.get("patternProperties", {}) if re.search(p, name)]
        inner = [schema["patternProperties"][pattern] for pattern in patterns]
        if name in schema.get("properties", {}):
            inner.append(schema["properties"][name])
        if not inner:
            inner = [schema.get("additionalProperties", True)]
        if not all(fits(its, each, root) for each in inner):
            return False
        if not fits(name, schema.get("propertyNames", True), root):
            return False
    return True


# A vocabulary of all bytes.
BYTES = GrammarCompiler(Vocabulary([bytes([byte]) for byte in range(256)]), 256)


def written(constraint: Constraint, rng: random.Random, most: int = 400) -> bytes | None:
    """A random text that the grammar ends with, byte by byte; None if it is too long."""
    state, found = BYTES.compile(constraint).start(), bytearray()
    while len(found) < most:
        allowed = sorted(allowed_ids(state))
        if state.ended or (state.complete and rng.random() < 0.5):
            return bytes(found)
        # Quotes and brackets close more often, so that texts end.
        closing = [byte for byte in allowed if chr(byte) in '"]}']
        byte = rng.choice(closing if closing and rng.random() < 0.3 else allowed)
        state.push(byte)
        found.append(byte)
    return None


@pytest.mark.parametrize("schema", TAKEN, ids=lambda schema: json.dumps(schema)[:60])
def test_whatever_is_written_is_valid(schema: dict[str, Any]) -> None:
    constraint = SamplingParams(json_schema=schema).constraint
    assert constraint is not None
    rng, found = random.Random(1), set()
    for _ in range(80):
        text = written(constraint, rng)
        if text is not None:
            value = json.loads(text.decode())
            assert fits(value, schema, schema), text
            found.add(text)
    assert len(found) >= min(2, len(schema.get("enum", "ab")), 1 if "const" in schema else 2)


def test_pydantic_s_own_validation_agrees() -> None:
    constraint = SamplingParams(json_schema=Order).constraint
    assert constraint is not None
    rng = random.Random(2)
    texts = [text for _ in range(60) if (text := written(constraint, rng)) is not None]
    orders = [Order.model_validate_json(text) for text in texts]
    assert {len(order.items) for order in orders} == {0, 1, 2}


def test_json_object_is_an_object_of_anything() -> None:
    constraint = SamplingParams(json_object=True).constraint
    assert constraint is not None
    rng = random.Random(3)
    values = [json.loads(text) for _ in range(60) if (text := written(constraint, rng))]
    assert {type(value) for value in values} == {dict}
    assert any(values)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "at /: a grammar cannot promise 'uniqueItems'"),
        ({"not": {"type": "integer"}}, "cannot promise 'not'; name what is allowed"),
        ({"properties": {"a": {"if": {}}}}, "at /properties/a: a grammar cannot promise 'if'"),
        ({"items": {"nullable": True}}, "at /items: a grammar cannot promise 'nullable'"),
        ({"$ref": "#/$defs/x", "minimum": 3}, "'minimum' beside '$ref' would not be obeyed"),
        ({"type": "object", "anyOf": [{}]}, "'type' beside 'anyOf' would not be obeyed"),
        ({"anyOf": []}, "'anyOf' must be a list of schemas, at least one"),
        ({"$ref": "https://x.y/z"}, "'https://x.y/z' is no reference within the schema"),
        ({"$ref": "#name"}, "'#name' is no reference within the schema"),
        ({"allOf": [{}, {}]}, "'allOf' of several schemas cannot be promised"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "some value may fit two schemas"),
        ({"oneOf": [{"type": "integer"}, {"enum": [1.5, "a"]}]}, "some value may fit two schemas"),
        ({"oneOf": [tagged("a", {}), {"type": "object"}]}, "some value may fit two schemas"),
        ({"enum": [1], "minimum": 3}, "'minimum' beside 'enum' would not be obeyed"),
        ({"enum": [1, "a"], "type": "integer"}, "'a' of 'enum' is not of the type beside it"),
        ({"const": True, "type": "integer"}, "True of 'const' is not of the type beside it"),
        ({"enum": []}, "'enum' must be a list of at least one value"),
        ({"type": []}, "'type' must name at least one type"),
        ({"minimum": 3}, "'minimum' without a 'type' would not be obeyed; add the type"),
        ({"type": "object", "required": ["a"]}, "required 'a' is not among the properties"),
        ({"minItems": 2}, "'minItems' without a 'type' would not be obeyed"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "'minLength' beside 'pattern'"),
        ({"type": "string", "pattern": "a", "format": "date"}, "'format' beside 'pattern'"),
        ({"type": "string", "pattern": 'a"'}, "at /: pattern names '\"': a quote, a backslash"),
        ({"type": "string", "pattern": r"\\"}, "a quote, a backslash"),
        ({"type": "string", "pattern": r"\n"}, "a quote, a backslash"),
        ({"type": "string", "pattern": r"\x22"}, "a quote, a backslash"),
        ({"type": "string", "pattern": "a^b"}, "'^' stands inside"),
        ({"patternProperties": {'"': {}}, "type": "object"}, "a quote, a backslash"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf' can be promised of integers only"),
        ({"type": "integer", "multipleOf": 3, "minimum": 2}, "'multipleOf' beside 'minimum'"),
        ({"properties": {"a": {}}, "patternProperties": {"^a$": {}}}, "beside 'properties'"),
        ({"properties": 3}, "'properties' must be an object of schemas, not 3"),
        ({"items": 3}, "at /items: must be an object, true or false, not 3"),
        ({"const": float("nan")}, "json_schema cannot be written as JSON"),
        ({"const": {1, 2}}, "json_schema cannot be written as JSON"),
        ("{", "json_schema is no JSON: Expecting"),
        ("[" * 100_000, "json_schema is no JSON"),
        (3, "json_schema must be a dict, its JSON, or a pydantic model's class"),
        ("true", "json_schema must be a dict"),
        (int, "json_schema must be a dict"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_schemas_of_which_not_all_can_be_promised(schema: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(json_schema=schema)
    assert message in str(caught.value)


def test_a_schema_may_be_deep_but_not_bottomless() -> None:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"items": deep}
    assert SamplingParams(json_schema=deep).constraint is not None
    for _ in range(1000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="is nested more than 64 schemas deep"):
        SamplingParams(json_schema=deep)


def test_a_class_whose_schema_fails() -> None:
    class Odd(pydantic.BaseModel, arbitrary_types_allowed=True):
        value: random.Random

    with pytest.raises(RequestError, match="gives no schema"):
        SamplingParams(json_schema=Odd)


def test_parameters_stay_comparable_and_can_be_derived() -> None:
    one = SamplingParams(json_schema={"type": "integer"})
    assert one.json_schema == '{"type": "integer"}'
    assert replace(one, n=2).constraint == one.constraint
    assert hash(one) == hash(SamplingParams(json_schema='{"type":  "integer"}'))
    # Properties are written in the schema's order, so another order is another grammar.
    left = SamplingParams(json_schema={"properties": {"a": {}, "b": {}}})
    right = SamplingParams(json_schema={"properties": {"b": {}, "a": {}}})
    assert left.constraint != right.constraint
    assert SamplingParams().constraint is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "a", "grammar": "b"}, "regex and grammar exclude each other"),
        ({"json_object": True, "json_schema": {}}, "json_schema and json_object exclude each"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"grammar": 3}, "grammar must be a text that is not empty, got 3"),
        ({"regex": "a\0"}, "regex must not hold a null character"),
        ({"grammar": "\ud800"}, "grammar holds what is no character"),
        ({"regex": "a^b"}, "'^' stands inside"),
        ({"regex": "a$|b"}, "'$' stands inside"),
        ({"regex": r"\Aa"}, r"the escape '\\A' is not known"),
    ],
    ids=str,
)
def test_refused_when_the_parameters_are_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_json", "use json_schema"),
        ("guided_regex", "use regex"),
        ("guided_choice", "use regex (as in 'yes|no')"),
        ("response_format", "use json_schema (a schema) or json_object=True"),
        ("structured_outputs", "use json_schema, regex or grammar"),
        ("ebnf", "use grammar"),
    ],
)
def test_other_engines_names(name: str, hint: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        SamplingParams(**{name: 1})
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [".", "^.{2}$", r"a\.b", r"[.]", r"[^\n.]", r"\d\w\s\x41\u00e9", r"\^\$", "[$^]", "(?:a|b)+?"],
)
def test_expressions_mean_what_they_mean_in_python(pattern: str) -> None:
    constraint = SamplingParams(regex=pattern).constraint
    assert constraint is not None
    rng, found = random.Random(1), set()
    for _ in range(40):
        text = written(constraint, rng, 20)
        assert text is not None
        found.add(text.decode())
    for each in found:
        assert re.fullmatch(pattern, each, re.ASCII), repr(each)
    assert "\n" not in "".join(found) or r"\s" in pattern
