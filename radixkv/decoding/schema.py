"""JSON schemas: whether a grammar can promise all that one says.

xgrammar passes over what it cannot enforce, or warns on the process's standard error. Here such a
schema is refused, with what to write instead: whatever is generated to its end under a schema that
was taken is valid by it. Some of what would be valid is never generated: objects have no other
properties than those named, in the order in which they are named, unless ``additionalProperties``
says so; a ``pattern`` is matched against the whole string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from radixkv.decoding.regex import check_json_pattern
from radixkv.errors import RequestError

Schema = Mapping[str, Any]

MAX_DEPTH = 64

# What no context-free grammar of a useful size can promise, or xgrammar does not.
REFUSED = {
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "additionalItems": "use prefixItems and items",
    "contains": "leave it out and check the result",
    "dependencies": "use anyOf with an object for each case",
    "dependentRequired": "use anyOf with an object for each case",
    "dependentSchemas": "use anyOf with an object for each case",
    "else": "use anyOf with a schema for each case",
    "if": "use anyOf with a schema for each case",
    "maxContains": "leave it out and check the result",
    "minContains": "leave it out and check the result",
    "not": "name what is allowed",
    "nullable": 'use "type": [..., "null"]',
    "then": "use anyOf with a schema for each case",
    "uniqueItems": "leave it out and check the result",
}
RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
NEEDS_TYPE = {*RANGE, "multipleOf", "pattern", "format", "minLength", "maxLength"}
OF_OBJECTS = {
    "required", "additionalProperties", "minProperties", "maxProperties", "propertyNames",
    "patternProperties", "unevaluatedProperties",
}  # fmt: skip
OF_ARRAYS = {"minItems", "maxItems", "unevaluatedItems"}
# Whatever says something about the value, beside the combinations themselves.
OBEYED = {*NEEDS_TYPE, *OF_OBJECTS, *OF_ARRAYS, "type", "enum", "const", "items", "prefixItems"}
OBEYED |= {"properties", "$ref", "anyOf", "oneOf", "allOf"}
INNER = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")


def check_schema(schema: object) -> None:
    """Refuse what would be passed over; whatever else is wrong is found by compiling.

    Raises
    ------
    RequestError
        Naming the place, the keyword, and what to write instead.
    """
    _Checker(schema).check(schema, "", 0)


class _Checker:
    def __init__(self, root: object) -> None:
        self._root = root

    def check(self, schema: object, place: str, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise _refusal(place, f"must be an object, true or false, not {schema!r}")
        if depth > MAX_DEPTH:
            raise _refusal(place, f"is nested more than {MAX_DEPTH} schemas deep")
        for keyword, hint in REFUSED.items():
            if schema.get(keyword, False) is not False:
                raise _refusal(place, f"a grammar cannot promise {keyword!r}; {hint}")
        self._check_alternatives(schema, place)
        _check_values(schema, place)
        _check_types(schema, place)
        _check_strings(schema, place)
        _check_numbers(schema, place)
        _check_objects(schema, place)
        for name, inner in _schemas_within(schema, place):
            if name == "propertyNames" and isinstance(inner, Mapping):
                inner = {"type": "string", **inner}
            self.check(inner, f"{place}/{name}", depth + 1)

    def _check_alternatives(self, schema: Schema, place: str) -> None:
        """References and combinations: xgrammar does not look at what stands beside them."""
        for keyword in ("$ref", "anyOf", "oneOf", "allOf"):
            if keyword not in schema:
                continue
            beside = sorted(schema.keys() & OBEYED - {keyword})
            if beside:
                raise _refusal(place, f"{beside[0]!r} beside {keyword!r} would not be obeyed; "
                                      "put it inside")  # fmt: skip
            if keyword != "$ref" and (not isinstance(schema[keyword], list) or not schema[keyword]):
                raise _refusal(place, f"{keyword!r} must be a list of schemas, at least one")
        reference = schema.get("$ref", "#")
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            raise _refusal(
                place, f"{reference!r} is no reference within the schema, like '#/$defs/Item'"
            )
        if len(schema.get("allOf", ())) > 1:
            raise _refusal(
                place, "'allOf' of several schemas cannot be promised; write them as one"
            )
        branches = [self._resolved(branch) for branch in schema.get("oneOf", ())]
        for index, branch in enumerate(branches):
            if not all(_disjoint(branch, other) for other in branches[:index]):
                raise _refusal(
                    place,
                    "some value may fit two schemas of 'oneOf', which a grammar cannot exclude; "
                    "use anyOf, or a required property whose const tells them apart",
                )

    def _resolved(self, schema: Any) -> Any:
        """What a reference within the schema leads to; what leads nowhere is left to compiling."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            found: Any = self._root
            for name in schema["$ref"].split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                found = found.get(name) if isinstance(found, Mapping) else None
            schema = found
        return schema


def _schemas_within(schema: Schema, place: str) -> Iterator[tuple[str, object]]:
    for keyword in INNER:
        if keyword in schema:
            yield keyword, schema[keyword]
    for keyword in NAMED:
        group = schema.get(keyword, {})
        if not isinstance(group, Mapping):
            raise _refusal(place, f"{keyword!r} must be an object of schemas, not {group!r}")
        for name, inner in group.items():
            if keyword == "patternProperties":
                check_json_pattern(str(name), f"json_schema at {place}/{keyword}")
            yield f"{keyword}/{name}", inner
    for keyword in LISTED:
        group = schema.get(keyword, [])
        if not isinstance(group, list):
            raise _refusal(place, f"{keyword!r} must be a list of schemas, not {group!r}")
        for index, inner in enumerate(group):
            yield f"{keyword}/{index}", inner


def _check_values(schema: Schema, place: str) -> None:
    """``enum`` and ``const``: xgrammar takes the values as they are, whatever stands beside."""
    for keyword in ("enum", "const"):
        if keyword not in schema:
            continue
        beside = sorted(schema.keys() & OBEYED - {keyword, "type"})
        if beside:
            raise _refusal(place, f"{beside[0]!r} beside {keyword!r} would not be obeyed; "
                                  "name only values that fit it")  # fmt: skip
        values = schema[keyword] if keyword == "enum" else [schema[keyword]]
        if not isinstance(values, list) or not values:
            raise _refusal(place, "'enum' must be a list of at least one value")
        types = _types(schema)
        for value in values:
            if types and not _types_of(value) & types:
                raise _refusal(place, f"{value!r} of {keyword!r} is not of the type beside it")


def _check_types(schema: Schema, place: str) -> None:
    if "type" in schema:
        if not schema["type"]:
            raise _refusal(place, "'type' must name at least one type")
        return
    loose = schema.keys() & NEEDS_TYPE
    if "properties" not in schema:
        loose |= schema.keys() & OF_OBJECTS
    if "items" not in schema and "prefixItems" not in schema:
        loose |= schema.keys() & OF_ARRAYS
    if loose:
        raise _refusal(place, f"{min(loose)!r} without a 'type' would not be obeyed; add the type")


def _check_strings(schema: Schema, place: str) -> None:
    groups = [{"pattern"}, {"format"}, {"minLength", "maxLength"}]
    found = [min(group & schema.keys()) for group in groups if group & schema.keys()]
    if len(found) > 1:
        raise _refusal(place, f"{found[1]!r} beside {found[0]!r} would not be obeyed; keep one")
    if isinstance(pattern := schema.get("pattern"), str):
        check_json_pattern(pattern, f"json_schema at {place or '/'}: pattern")


def _check_numbers(schema: Schema, place: str) -> None:
    if "multipleOf" in schema:
        if "number" in _types(schema):
            raise _refusal(place, "'multipleOf' can be promised of integers only; leave it out")
        if beside := sorted(schema.keys() & RANGE):
            raise _refusal(place, f"'multipleOf' beside {beside[0]!r} would not be obeyed; "
                                  "keep one, or use enum")  # fmt: skip


def _check_objects(schema: Schema, place: str) -> None:
    named = schema.get("properties", {})
    required = schema.get("required", [])
    if isinstance(named, Mapping) and isinstance(required, Sequence):
        missing = [name for name in required if name not in named]
        if missing:
            raise _refusal(place, f"required {missing[0]!r} is not among the properties; add it")
    for keyword in ("patternProperties", "propertyNames"):
        if keyword in schema and named:
            raise _refusal(
                place, f"{keyword!r} beside 'properties' would not be obeyed; name all of them"
            )
    if "patternProperties" in schema and "propertyNames" in schema:
        raise _refusal(place, "'patternProperties' beside 'propertyNames' would not be obeyed")


def _types(schema: Schema) -> frozenset[str]:
    """The types that a schema names; empty for none."""
    named = schema.get("type", ())
    return frozenset([named] if isinstance(named, str) else map(str, named))


def _types_of(value: object) -> frozenset[str]:
    """All names that JSON schema has for a value's type."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"number", "integer"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"object"} if isinstance(value, Mapping) else {"array"})


def _disjoint(left: Any, right: Any) -> bool:
    """Whether no value fits both, as far as types, values and telling properties show it."""
    if not isinstance(left, Mapping) or not isinstance(right, Mapping):
        return left is False or right is False
    kinds, others = _kinds(left), _kinds(right)
    if kinds and others and not kinds & others:
        return True
    if (values := _values(left)) is not None and (those := _values(right)) is not None:
        return not any(value == other for value in values for other in those)
    telling = set(left.get("required", ())) & set(right.get("required", ()))
    objects = _types(left) == _types(right) == {"object"}
    return objects and any(
        _disjoint(left.get("properties", {}).get(name), right.get("properties", {}).get(name))
        for name in telling
    )


def _kinds(schema: Schema) -> frozenset[str]:
    """The types of what fits, where an integer is a number."""
    values = _values(schema)
    named = _types(schema) if values is None else frozenset().union(*map(_types_of, values))
    return frozenset("number" if kind == "integer" else kind for kind in named)


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _refusal(place: str, what: str) -> RequestError:
    return RequestError(f"json_schema at {place or '/'}: {what}")
