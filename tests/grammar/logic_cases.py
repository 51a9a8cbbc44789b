"""Keywords that combine, negate and count, and the forms of older drafts: as in `keyword_cases`."""

from __future__ import annotations

from typing import Any

from tests.grammar.keyword_cases import DRAFT_04, DRAFT_07, DRAFT_2019, DRAFT_2020, Case

OBJECT: dict[str, Any] = {"type": "object"}
ARRAY: dict[str, Any] = {"type": "array"}
INT, STR = {"type": "integer"}, {"type": "string"}
FEW = {"enum": ["a", "b", 1]}

LOGIC_CASES: dict[str, Case] = {
    # --- not
    "not type": ({"not": {"type": ["string", "number"]}}, [None, True, [], {}], ["a", 1, 1.5]),
    "not integer": ({"type": "number", "not": INT}, [1.5, -0.25], [1, 0, -3]),
    "not enum": (
        {"not": {"enum": ["a", 1, None, [1], {"b": 2}]}},
        ["b", 2, [], [2], {"b": 3}],
        ["a", 1, None, [1], {"b": 2}],
    ),
    "not const": ({**STR, "not": {"const": ""}}, ["a", "\n"], [""]),
    "not bounds": ({"type": "number", "not": {"minimum": 2, "maximum": 5}}, [1.5, 5.5, -3], [2, 3.5, 5]),
    "not multipleOf": ({"type": "integer", "not": {"multipleOf": 3}}, [1, 2, -4, 100], [0, 3, -6, 99]),
    "not pattern": ({**STR, "not": {"pattern": "^a"}}, ["", "ba"], ["a", "ab"]),
    "not length": ({**STR, "not": {"maxLength": 2}}, ["abc"], ["", "ab"]),
    "not format": ({**STR, "not": {"format": "ipv4"}}, ["", "1.2.3", "a"], ["1.2.3.4"]),
    "not required": ({**OBJECT, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, {"a": None, "b": 1}]),
    "not properties": (
        {"not": {**OBJECT, "properties": {"a": STR}}},
        [1, {"a": 1}],
        [{}, {"a": "x"}, {"b": 1}],
    ),
    "not additionalProperties": (
        {**OBJECT, "properties": {"a": INT}, "not": {"properties": {"a": {}}, "additionalProperties": False}},
        [{"b": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1}, {"a": "x", "b": 1}],
    ),
    "not patternProperties": (
        {**OBJECT, "not": {"patternProperties": {"^x": INT}}},
        [{"x": "a"}, {"a": 1, "xy": None}],
        [{}, {"x": 1}, {"a": "b"}],
    ),
    "not propertyNames": (
        {**OBJECT, "not": {"propertyNames": {"maxLength": 1}}},
        [{"ab": 1}, {"a": 1, "bc": 1}],
        [{}, {"a": 1}],
    ),
    "not items": ({**ARRAY, "not": {"items": INT}}, [["a"], [1, None]], [[], [1, 2]]),
    "not prefixItems": (
        {**ARRAY, "not": {"prefixItems": [INT, STR]}},
        [["a"], [1, 2], ["a", "b"]],
        [[], [1], [1, "a", 3]],
    ),
    "not count": ({**ARRAY, "not": {"minItems": 1, "maxItems": 2}}, [[], [1, 2, 3]], [[1], [1, 2]]),
    "not contains": ({**ARRAY, "not": {"contains": INT}}, [[], ["a"]], [[1], ["a", 1]]),
    "not anyOf": ({"not": {"anyOf": [STR, {"minimum": 3}]}}, [2, 1.5], ["a", 3, None]),
    "not oneOf": ({"not": {"oneOf": [INT, {"minimum": 2}]}}, [2, 1.5, 3], [1, 2.5]),
    "not not": ({"not": {"not": INT}}, [1], ["a", None]),
    # --- oneOf
    "oneOf overlapping": ({"oneOf": [INT, {"type": "number", "minimum": 2}]}, [1, 2.5, -3], [2, 3, 1.5]),
    "oneOf lengths": (
        {**STR, "oneOf": [{"minLength": 2}, {"maxLength": 3}]},
        ["", "a", "abcd"],
        ["ab", "abc"],
    ),
    "oneOf required": (
        {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "c": 1}],
        [{}, {"c": 1}, {"a": 1, "b": 1}],
    ),
    "oneOf open objects": (
        {"oneOf": [{**OBJECT, "properties": {"a": INT}}, {**OBJECT, "properties": {"b": STR}}]},
        [{"a": 1, "b": 2}, {"a": "x"}],
        [{}, {"a": 1}, {"b": "x"}, {"a": "x", "b": 1}],
    ),
    "oneOf of one": ({"oneOf": [INT]}, [1], ["a"]),
    # --- if, then, else
    "if": (
        {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"multipleOf": 2}},
        [0, 2, 8, 10, 30],
        [1, 9, 11, 12],
    ),
    "if then": ({"if": STR, "then": {"maxLength": 1}}, ["a", 12, None], ["ab"]),
    "if else": ({"if": STR, "else": INT}, ["abc", 3], [None, 1.5]),
    "if a property": (
        {
            **OBJECT,
            "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        [{"k": "x", "v": 1}, {"k": "y"}, {"k": "y", "z": 1}],
        [{"k": "x"}, {"k": "y", "v": 1}, {}],
    ),
    # --- dependent
    "dependentRequired": (
        {**OBJECT, "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b", "c"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1, "c": 1}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    "dependentSchemas": (
        {
            **OBJECT,
            "properties": {"a": {}, "b": {}},
            "dependentSchemas": {"a": {"properties": {"b": INT}, "maxProperties": 2}},
        },
        [{}, {"b": "x"}, {"a": 1, "b": 1}],
        [{"a": 1, "b": "x"}, {"a": 1, "b": 1, "c": 1}],
    ),
    "dependencies": (
        {**DRAFT_07, **OBJECT, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        [{}, {"a": 1, "b": 1}, {"c": 1, "d": 1}],
        [{"a": 1}, {"c": 1}],
    ),
    # --- conditions that some property must meet
    "one property for two conditions": (
        {**OBJECT, "not": {"anyOf": [{"additionalProperties": STR}, {"additionalProperties": INT}]}},
        [{"k": None}, {"a": "x", "b": 1}, {"a": "x", "b": True}],
        [{}, {"k": "x"}, {"a": 1, "b": 2}],
    ),
    "one property at most for two conditions": (
        {
            **OBJECT,
            "maxProperties": 1,
            "not": {"anyOf": [{"additionalProperties": STR}, {"additionalProperties": INT}]},
        },
        [{"k": None}, {"k": []}],
        [{}, {"k": "x"}, {"k": 1}, {"a": "x", "b": 1}],
    ),
    "names of one property for two conditions": (
        {
            **OBJECT,
            "if": {"propertyNames": {"pattern": "^a"}},
            "then": False,
            "else": {"not": {"patternProperties": {"b$": INT}}},
        },
        [{"b": "x"}, {"c": 1, "ab": None}],
        [{}, {"a": 1}, {"b": 1}, {"ab": "x"}],
    ),
    "oneOf of closed objects": (
        {
            "oneOf": [
                {**OBJECT, "properties": {f"a{i}": STR, f"b{i}": INT}, "additionalProperties": False}
                for i in range(6)
            ]
        },
        [{"a0": "x"}, {"a5": "x", "b5": 1}, {"b3": 2}],
        [{}, {"a0": 1}, {"a0": "x", "a1": "x"}, {"c": 1}],
    ),
    "oneOf of objects without a type": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": i}}, "required": ["kind"], "additionalProperties": INT}
                for i in range(20)
            ]
        },
        [{"kind": 3}, {"kind": 19, "n": 1}],
        [{}, {"kind": 20}, {"kind": 3, "n": "x"}, "a", 1],
    ),
    "conditions of many properties": (
        {
            **OBJECT,
            "properties": {f"{letter}{i}": {"type": "boolean"} for i in range(12) for letter in "ab"},
            "allOf": [
                {
                    "if": {"properties": {f"a{i}": {"const": True}}, "required": [f"a{i}"]},
                    "then": {"required": [f"b{i}"]},
                }
                for i in range(12)
            ],
        },
        [{}, {"a0": False, "a3": True, "b3": False}, {"b1": True, "x": 1}],
        [{"a0": True}, {"a3": True, "b3": False, "a11": True}],
    ),
    "a maxLength just below the pattern's": (
        {**STR, "pattern": r"^[^.\s]{1,32}(\.[^.\s]{1,32}){1,3}$", "maxLength": 128},
        ["a.b", ".".join(["x" * 32] * 3), ".".join(["x" * 31] * 4), ".".join(["x" * 32] * 3 + ["x" * 29])],
        ["a", "a.b.c.d.e", ".".join(["x" * 32] * 4), ".".join(["x" * 32] * 3 + ["x" * 30]), "x" * 33 + ".a"],
    ),
    # --- contains
    "contains": ({**ARRAY, "contains": INT}, [[1], ["a", 1, None]], [[], ["a"]]),
    "minContains": ({**ARRAY, "contains": INT, "minContains": 2}, [[1, 2], [1, "a", 2]], [[], [1], ["a", 1]]),
    "maxContains": ({**ARRAY, "contains": INT, "maxContains": 1}, [[1], ["a", 1]], [[], [1, 2]]),
    "minContains 0": (
        {**ARRAY, "contains": INT, "minContains": 0, "maxContains": 1},
        [[], ["a"], [1]],
        [[1, 2]],
    ),
    "contains and items": (
        {**ARRAY, "items": {"enum": [1, 2, 3]}, "contains": {"const": 2}, "maxItems": 3},
        [[2], [1, 2, 3]],
        [[1], [], [2, 4], [2, 1, 1, 1]],
    ),
    "contains and prefixItems": (
        {**ARRAY, "prefixItems": [INT, STR], "contains": {"const": "x"}},
        [[1, "x"], [1, "a", "x"]],
        [[], [1, "a"], ["x"]],
    ),
    # --- uniqueItems
    "uniqueItems": (
        {**ARRAY, "items": FEW, "uniqueItems": True},
        [[], ["a"], ["a", 1, "b"], [1, "b"]],
        [["a", "a"], ["a", 1, "a"]],
    ),
    "uniqueItems of booleans": (
        {**ARRAY, "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
        [[True, False]],
        [[True], [True, True]],
    ),
    "uniqueItems of a tuple": (
        {**ARRAY, "prefixItems": [FEW, FEW], "items": False, "uniqueItems": True},
        [[1, "a"], ["b"]],
        [[1, 1]],
    ),
    "uniqueItems of values": (
        {**ARRAY, "items": {"enum": [[1], {"a": 1}]}, "uniqueItems": True},
        [[[1], {"a": 1}]],
        [[[1], [1]]],
    ),
    "uniqueItems of strings": (
        {**ARRAY, "items": STR, "uniqueItems": True},
        [[], ["a"], ["a", "ab", "é"]],
        [["a", "a"], ["", "b", ""]],
    ),
    "uniqueItems of numbers": (
        {**ARRAY, "items": {"type": "number"}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
        [[1, 1.5], [0, -1, 100.25]],
        [[1], [1, 1], [1.5, 2, 1.5], [1, 2, 3, 4]],
    ),
    "uniqueItems of unique items": (
        {**ARRAY, "uniqueItems": True, "items": {**ARRAY, "items": STR, "uniqueItems": True}},
        [[], [[]], [["a"], ["b"]], [["a", "b"], ["b", "a"], ["a"]]],
        [[[], []], [["a", "a"]], [["a", "b"], ["a", "b"]]],
    ),
    "uniqueItems of objects": (
        {**ARRAY, "items": {**OBJECT, "properties": {"a": INT, "b": STR}}, "uniqueItems": True},
        [[{"a": 1}, {"a": 1, "b": "x"}, {}]],
        [[{"a": 1}, {"a": 1}], [{}, {}]],
    ),
    "uniqueItems of many": (
        {**ARRAY, "items": {"enum": [f"v{i}" for i in range(30)]}, "uniqueItems": True},
        [["v1", "v11", "v2"]],
        [["v1", "v2", "v1"]],
    ),
    "minProperties of a map": (
        {**OBJECT, "additionalProperties": INT, "minProperties": 2},
        [{"a": 1, "b": 1}],
        [{}, {"a": 1}],
    ),
    "some items repeat": (
        {**ARRAY, "items": FEW, "not": {"uniqueItems": True}},
        [["a", "a"], [1, "b", 1]],
        [[], ["a"], ["a", 1]],
    ),
    # --- unevaluated
    "unevaluatedProperties": (
        {
            **OBJECT,
            "properties": {"a": {}},
            "allOf": [{"properties": {"b": INT}}],
            "unevaluatedProperties": False,
        },
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"b": "x"}],
    ),
    "unevaluatedProperties and anyOf": (
        {
            "anyOf": [
                {"properties": {"a": INT}, "required": ["a"]},
                {"properties": {"b": INT}, "required": ["b"]},
            ],
            "unevaluatedProperties": False,
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}, {"a": 1, "c": 1}, {"b": 1, "a": "x"}],
    ),
    "unevaluatedProperties and if": (
        {
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"properties": {"b": {}}},
            "unevaluatedProperties": STR,
        },
        [{"a": 1, "b": 2}, {"a": "x"}, {"a": 1, "c": "x"}],
        [{"a": 2}, {"a": 1, "c": 1}, {"b": 1}],
    ),
    "unevaluatedProperties nested": (
        {"properties": {"a": {}}, "allOf": [{"unevaluatedProperties": INT}], "unevaluatedProperties": False},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{"b": "x"}, {"a": "x"}],
    ),
    "unevaluatedItems": (
        {**ARRAY, "prefixItems": [INT], "allOf": [{"prefixItems": [True, STR]}], "unevaluatedItems": False},
        [[], [1], [1, "a"]],
        [[1, "a", 2], ["a"]],
    ),
    "unevaluatedItems and contains": (
        {**ARRAY, "contains": INT, "unevaluatedItems": STR},
        [[1], ["a", 1]],
        [["a"], [1, None]],
    ),
    # --- references
    "$dynamicRef": (
        {**DRAFT_2020, "$dynamicAnchor": "n", **OBJECT, "properties": {"next": {"$dynamicRef": "#n"}}},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}],
    ),
    "$recursiveRef": (
        {**DRAFT_2019, "$recursiveAnchor": True, **OBJECT, "properties": {"next": {"$recursiveRef": "#"}}},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}],
    ),
    "$id inside": (
        {
            "$id": "https://example.com/root",
            "$defs": {"a": {"$id": "part", "$defs": {"x": INT}, "$anchor": "here", **STR}},
            "properties": {"x": {"$ref": "part#/$defs/x"}, "y": {"$ref": "part#here"}, "z": {"$ref": "part"}},
        },
        [{"x": 1, "y": "a", "z": "b"}],
        [{"x": "a"}, {"y": 1}, {"z": 1}],
    ),
    "$ref to any place": (
        {"properties": {"a": INT, "b": {"$ref": "#/properties/a"}}},
        [{"a": 1, "b": 2}],
        [{"b": "x"}],
    ),
    "$ref alone counts in draft-07": (
        {
            **DRAFT_07,
            "definitions": {"n": INT},
            "properties": {"a": {"$ref": "#/definitions/n", "maximum": 3}},
        },
        [{"a": 5}],
        [{"a": "x"}],
    ),
    "anchors of draft-07": (
        {**DRAFT_07, "definitions": {"n": {"$id": "#here", **INT}}, "items": {"$ref": "#here"}},
        [[1]],
        [["a"]],
    ),
    # --- older forms
    "draft-04": (
        {
            **DRAFT_04,
            "id": "http://example.com/s",
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
            "maximum": 5,
            "exclusiveMaximum": False,
        },
        [4, 5],
        [3, 6],
    ),
    "multipleOf quarters": (
        {"type": "number", "multipleOf": 0.25, "minimum": -1},
        [0, 0.25, 1.75, -0.5, 12.5],
        [0.3, 0.125, -1.25],
    ),
    "multipleOf 2.5": ({"type": "number", "multipleOf": 2.5}, [0, 2.5, 5, 100, -7.5], [1, 2.25, 3.5]),
    "two fractions": (
        {"type": "number", "allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.75}]},
        [0, 1.5, 3],
        [0.5, 0.75, 1],
    ),
    "multipleOf up to": (
        {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1},
        [0, 0.5, 1],
        [0.35, 1.1],
    ),
    "lookahead": ({**STR, "pattern": "^(?!foo)(?=.*b)[a-z]+$"}, ["ab", "bar"], ["foob", "aa", "a1b"]),
    "propertyNames enum": (
        {**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        [{}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
}
