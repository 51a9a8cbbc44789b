"""Constraints made to hurt, by number: the same number is always the same constraint."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

Body = dict[str, Any] | bytes
"""Fields of a completion request that constrain it, or a whole body that is no JSON."""


def _schema(schema: Any) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _word(draw: random.Random, length: int = 8) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=length))


def deep_schema(draw: random.Random) -> Body:
    schema: Any = {"type": "integer"}
    for _ in range(draw.choice([20, 100, 250, 400])):
        schema = draw.choice(
            [
                {"type": "array", "items": schema},
                {"type": "object", "properties": {_word(draw): schema}, "required": []},
                {"anyOf": [schema, {"type": "null"}]},
                {"allOf": [schema]},
                {"not": {"not": schema}},
            ]
        )
    return _schema(schema)


def exponential_regex(draw: random.Random) -> Body:
    pattern = draw.choice(
        [
            "(a|b)*a(a|b){%d}" % draw.choice([10, 20, 40]),  # noqa: UP031 (braces)
            "(a*)*" * draw.randint(1, 20) + "b",
            "((a{0,%d}){0,%d}){0,%d}" % ((draw.choice([9, 60, 300]),) * 3),  # noqa: UP031
            "(x+x+)+y" * draw.randint(1, 6),
            "(.*a){%d}" % draw.choice([8, 40, 200]),  # noqa: UP031
            "[^a]*" * draw.choice([5, 50]) + "(ab|ba)*" * draw.choice([5, 20]),
            "(?=a)b",
            r"(a)\1",
            "[" * draw.randint(1, 3000),
            "(" * 3000 + "a" + ")" * 3000,
            r"\p{L}{%d}" % draw.choice([10, 500]),  # noqa: UP031
        ]
    )
    return draw.choice([{"regex": pattern}, _schema({"type": "string", "pattern": pattern})])


def huge_enum(draw: random.Random) -> Body:
    count = draw.choice([1_000, 10_000, 60_000])
    values = [_word(draw, 9) for _ in range(count)]
    return draw.choice([{"structured_outputs": {"choice": values}}, _schema({"enum": values})])


def huge_repeat(draw: random.Random) -> Body:
    count = draw.choice([1_000, 100_000, 10**6, 10**9, 10**30])
    return _schema(
        draw.choice(
            [
                {"type": "array", "items": {"type": "string"}, "minItems": count},
                {"type": "array", "items": {"type": "object"}, "maxItems": count},
                {"type": "string", "maxLength": count},
                {"type": "string", "minLength": count},
                {"type": "string", "minLength": 10, "maxLength": count, "pattern": "^(a|bc)*$"},
                {"type": "object", "minProperties": count},
                {"type": "object", "maxProperties": count, "additionalProperties": {"type": "null"}},
                {"type": "integer", "multipleOf": count + 1},
                {"type": "number", "minimum": -count, "maximum": count, "multipleOf": 0.07},
                {"type": "array", "uniqueItems": True, "minItems": count, "items": {"type": "boolean"}},
            ]
        )
    )


def cyclic(draw: random.Random) -> Body:
    return _schema(
        draw.choice(
            [
                {"$ref": "#"},
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
                {"allOf": [{"$ref": "#"}]},
                {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
                {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
                {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
                {"not": {"$ref": "#"}},
                {"$ref": "#/$defs/" + "a/" * 500},
                {"$ref": "http://" + _word(draw) + ".example/schema.json"},
                {"$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{j % 30}"} for j in range(i, i + 6)] +
                                    [{"type": "array", "items": {"$ref": f"#/$defs/{(i * 7) % 30}"}}]}
                           for i in range(30)}, "$ref": "#/$defs/0"},
            ]
        )
    )  # fmt: skip


def explosive(draw: random.Random) -> Body:
    wide = draw.choice([4, 8, 20])
    options = [
        {"type": "object", "properties": {_word(draw, 2): {"type": "string"}, "k": {"const": i}}}
        for i in range(wide)
    ]
    names = [_word(draw) for _ in range(wide * 100)]
    patterns = [f"^{_word(draw, 1)}.*{i}" for i in range(wide * 2)]
    return _schema(
        draw.choice(
            [
                {"allOf": [{"anyOf": options} for _ in range(draw.choice([2, 6, 20]))]},
                {"allOf": [{"oneOf": options} for _ in range(3)]},
                {"not": {"allOf": [{"anyOf": options}] * 4}},
                {"patternProperties": {pattern: {"type": "integer"} for pattern in patterns}},
                {"type": "object", "properties": {name: {"type": "integer"} for name in names}},
                {"type": "object", "properties": {_word(draw): {} for _ in range(wide)},
                 "minProperties": wide // 2, "maxProperties": wide - 1},
                {"dependentSchemas": {_word(draw): {"anyOf": options} for _ in range(wide)}},
                {"if": {"anyOf": options}, "then": {"oneOf": options}, "else": {"not": {"anyOf": options}}},
                {"unevaluatedProperties": False, "anyOf": options},
                {"propertyNames": {"pattern": "^(a|b)*a(a|b){12}$"}, "maxProperties": 30},
                {"type": "array", "contains": {"anyOf": options}, "minContains": 50, "maxContains": 90},
            ]
        )
    )  # fmt: skip


def no_schema(draw: random.Random) -> Body:
    return _schema(
        draw.choice([{"type": "strin"}, {"type": []}, [], 12, None, {"properties": []}, {"required": "a"},
                     {"minimum": "1"}, {"enum": []}, {"pattern": "("}, {"items": 3}, {"\ud800": 1},
                     {"const": "\udfff"}, {"type": "integer", "minimum": 2, "maximum": 1}, False])
    )  # fmt: skip


def bad_grammar(draw: random.Random) -> Body:
    return draw.choice(
        [
            {"ebnf": "root ::= root"},
            {"ebnf": 'root ::= root "a" | "a"'},
            {"ebnf": 'root ::= a\na ::= b b b b b b\nb ::= c c c c c c\nc ::= root | "x"'},
            {"ebnf": "root ::= (" * 500},
            {"ebnf": "".join(f'r{i} ::= r{i + 1} r{i + 1} | "{i}"\n' for i in range(60)) + "root ::= r0"},
            {"ebnf": 'root ::= ("a" | "b"){0,100000}'},
            {"ebnf": "\0\0\0"},
            {"ebnf": 'root ::= "' + "x" * 200_000 + '"'},
            {"response_format": {"type": "structural_tag", "format": {"type": _word(draw)}}},
            {"response_format": {"type": "lark", "lark": 'start: start start | "a"'}},
            {"response_format": {"type": "lark", "lark": "%import python.grammar\nstart: /(/"}},
        ]
    )


def bad_body(draw: random.Random) -> Body:
    return draw.choice(
        [
            b'{"model": "default", "prompt": "a", "regex": "\xff\xfe"}',
            b'{"model": "default", "prompt": "a", "max_tokens": 4, "regex": "' + b"[" * 20_000,
            b"\x80" * 1000,
            json.dumps({"model": "default", "prompt": "a", "regex": "a" * (10 << 20)}).encode(),
            b"[" * 100_000,
            b'{"a":' * 50_000,
        ]
    )


KINDS: dict[str, Callable[[random.Random], Body]] = {
    kind.__name__: kind
    for kind in (
        deep_schema, exponential_regex, huge_enum, huge_repeat, cyclic, explosive, no_schema, bad_grammar,
        bad_body,
    )
}  # fmt: skip


def hostile(number: int) -> tuple[str, Body]:
    """(kind, constraint) number `number`."""
    kind = list(KINDS)[number % len(KINDS)]
    return kind, KINDS[kind](random.Random(number))
