"""Every JSON Schema keyword that is enforced: schemas with instances they allow and do not allow."""

from __future__ import annotations

from typing import Any

Case = tuple[Any, list[Any], list[Any]]
"""(schema, valid instances, invalid instances)"""

DEEP: Any = [[[[{"a": [1, {"b": None}]}]]]]
ANY = [None, True, False, 0, -1, 12, 1.5, "", 'ä\n"\\', [], [1, "a"], {}, {"a": {"b": 1}}, DEEP]
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}

DRAFT_04 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_07 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
DRAFT_2020 = {"$schema": "https://json-schema.org/draft/2020-12/schema"}

TREE_OF_ANYTHING = {
    "$id": "https://a.b/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}
STRICT_TREE = {
    **DRAFT_2020,
    "$id": "https://a.b/strict-tree",
    "$dynamicAnchor": "node",
    "$ref": "tree",
    "unevaluatedProperties": False,
    "$defs": {"tree": TREE_OF_ANYTHING},
}
LISTS = {
    **DRAFT_2020,
    "$id": "https://a.b/lists",
    "type": "object",
    "properties": {"numbers": {"$ref": "numbers"}, "strings": {"$ref": "strings"}, "any": {"$ref": "list"}},
    "additionalProperties": False,
    "$defs": {
        "list": {
            "$id": "list",
            "type": "array",
            "items": {"$dynamicRef": "#item"},
            "$defs": {"default": {"$dynamicAnchor": "item"}},
        },
        "numbers": {
            "$id": "numbers",
            "$ref": "list",
            "$defs": {"item": {"$dynamicAnchor": "item", "type": "number"}},
        },
        "strings": {
            "$id": "strings",
            "$ref": "list",
            "$defs": {"item": {"$dynamicAnchor": "item", "type": "string"}},
        },
    },
}
RECURSIVE = {
    **DRAFT_2019,
    "$id": "https://a.b/root",
    "$recursiveAnchor": True,
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/inner"}, "n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "$id": "inner",
            "$recursiveAnchor": True,
            "type": "array",
            "items": {"anyOf": [{"type": "null"}, {"$recursiveRef": "#"}]},
        }
    },
}

CASES: dict[str, Case] = {
    "true": (True, ANY, []),
    "empty": ({}, ANY, []),
    "annotations": (
        {
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [1],
            "$comment": "c",
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "x-vendor": 1,
            "type": "null",
        },
        [None],
        [0, False],
    ),
    # --- type
    "null": ({"type": "null"}, [None], [False, 0, "", [], {}, "null"]),
    "boolean": ({"type": "boolean"}, [True, False], [None, 0, 1, "true"]),
    "integer": ({"type": "integer"}, [0, 1, -1, 1234567890123456789], [1.5, "1", None, True]),
    "number": ({"type": "number"}, [0, -1, 1.5, -0.001, 1e-7, 2.5e30], ["1", None]),
    "string": (
        {"type": "string"},
        ["", "a", "é", "日本", "😀", "\x7f", '\n\t\r\b\f"\\/', "\x01"],
        [1, None, ["a"]],
    ),
    "array": ({"type": "array"}, [[], [1], [None, "a", [], {}]], [{}, "[]"]),
    "object": ({"type": "object"}, [{}, {"a": 1}, {"é\n": [{}]}, {"": 1}], [[], 1]),
    "several types": ({"type": ["string", "null", "integer"]}, ["a", None, 3], [1.5, True, []]),
    "type and number": ({"type": ["number", "integer"]}, [1, 1.5], ["1"]),
    # --- enum, const
    "enum": (
        {"enum": ["a", 'b"\n', 1, 1.5, None, True, {"x": [1, 2]}, "日本"]},
        ["a", 'b"\n', 1, 1.5, None, True, {"x": [1, 2]}, "日本"],
        ["b", 2, False, {"x": [1]}, {}],
    ),
    "enum and type": ({"type": "integer", "enum": [1, "a", 2.5, 3]}, [1, 3], ["a", 2.5]),
    "enum and bounds": ({"enum": [1, 2, 3, "x"], "minimum": 2}, [2, 3, "x"], [1]),
    "enum and pattern": ({"enum": ["ab", "cd", 7], "pattern": "^a"}, ["ab", 7], ["cd"]),
    "enum and maxLength": ({"enum": ["日本", "abc"], "maxLength": 2}, ["日本"], ["abc"]),
    "two enums": ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, [2, 3], [1, 4]),
    "const": ({"const": {"a": [1, "b"]}}, [{"a": [1, "b"]}], [{"a": [1]}, {}]),
    "const null": ({"const": None}, [None], [0, ""]),
    "const text": ({"const": "</script>\u2028é"}, ["</script>\u2028é"], ["</script>"]),
    "enum by value": (
        {"enum": [1.0, 1e1, 20, [2.50, {"a": 3.0}]]},
        [1, 10, 20, [2.5, {"a": 3}]],
        [0, 2.5, "1", True, [2, {"a": 3}], 100],
    ),
    "integer and const with a fraction of 0": ({"type": "integer", "const": 1.0}, [1], [0, "1", True]),
    "not enum by value": (
        {"type": ["number", "array"], "not": {"enum": [1.0, 2.50, 1e2, [1.0]]}},
        [2, 1.5, 10, [], [2]],
        [1, 2.5, 100, [1]],
    ),
    "unique by value": (
        {"items": {"enum": [1, 1.0, 2.5, 2.50]}, "uniqueItems": True, "type": "array"},
        [[1, 2.5], [2.5], []],
        [[1, 1], [2.5, 2.5]],
    ),
    # --- $dynamicRef with several anchors, $recursiveRef
    "a tree that an extension closes": (
        STRICT_TREE,
        [{}, {"data": 1}, {"children": [{"data": [1]}, {"children": []}]}],
        [{"daat": 1}, {"children": [{"daat": 1}]}, {"children": [1]}],
    ),
    "the tree alone": (
        {**DRAFT_2020, "$ref": "https://a.b/tree", "$defs": {"tree": TREE_OF_ANYTHING}},
        [{"data": 1}, {"children": [{"daat": 1}]}],
        [{"children": [1]}],
    ),
    "lists whose items the caller defines": (
        LISTS,
        [{}, {"numbers": [1, 2.5], "strings": ["a"], "any": [1, "a", None]}],
        [{"numbers": ["a"]}, {"strings": [1]}, {"numbers": [1], "strings": [1]}],
    ),
    "recursion to the outermost resource": (
        RECURSIVE,
        [{"n": 1}, {"a": [None, {"n": 2}, {"a": [], "n": 3}], "n": 1}],
        [{"a": [[]], "n": 1}, {"a": [{}], "n": 1}, {"a": [1], "n": 1}],
    ),
    # --- numbers
    "minimum": ({"type": "integer", "minimum": 3}, [3, 4, 10, 1000], [2, 0, -3, -4]),
    "minimum below 0": ({"type": "integer", "minimum": -12}, [-12, -11, -9, -1, 0, 5, 99], [-13, -20, -100]),
    "maximum": ({"type": "integer", "maximum": 10}, [10, 9, 0, -1, -1000], [11, 20, 100]),
    "maximum below 0": ({"type": "integer", "maximum": -5}, [-5, -6, -10, -55], [-4, 0, 5]),
    "between": (
        {"type": "integer", "minimum": -3, "maximum": 120},
        [-3, 0, 99, 100, 120],
        [-4, 121, 200, -30],
    ),
    "exclusive": ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 10}, [3, 9], [2, 10]),
    "bounds with fractions": ({"type": "integer", "minimum": 2.5, "maximum": 4.5}, [3, 4], [2, 5]),
    "both lower bounds": ({"type": "integer", "minimum": 3, "exclusiveMinimum": 3}, [4], [3]),
    "number bounds": (
        {"type": "number", "minimum": 0, "maximum": 1},
        [0, 1, 0.5, 0.999, 0.001],
        [-0.1, 1.1, 2, 10],
    ),
    "number above": ({"type": "number", "exclusiveMinimum": 0}, [0.1, 0.001, 1, 100.5], [0, -1, -0.5]),
    "number below": (
        {"type": "number", "exclusiveMaximum": -2.25},
        [-2.26, -3, -2.251, -100],
        [-2.25, -2.2, 0, 2.3],
    ),
    "number between": (
        {"type": "number", "minimum": -1.5, "maximum": 2.25},
        [-1.5, -1.49, -0.5, 0, 2.25, 2.249, 1.9],
        [-1.51, -2, 2.26, 2.3, 3],
    ),
    "narrow": (
        {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.26},
        [0.251, 0.2501],
        [0.25, 0.26, 0.3],
    ),
    "bounds on any type": ({"minimum": 5}, [5, 6.5, "a", None, [], {}], [4, -1]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 7, -7, 14, 700], [1, 8, -6, 71]),
    "multipleOf a power of 10": (
        {"type": "integer", "multipleOf": 100_000},
        [0, 100_000, -300_000, 1_000_000, 12_300_000],
        [1, 10_000, 50_000, 100_010, 110_000],
    ),
    "multipleOf a day": (
        {"type": "integer", "multipleOf": 86_400, "minimum": 1},
        [86_400, 172_800, 31_536_000, 86_400_000],
        [0, 3600, 43_200, 86_401, 86_410, 864_000 - 400],
    ),
    "multipleOf an hour in ms": (
        {"multipleOf": 3_600_000},
        [0, 3_600_000, 36_000_000, -7_200_000, "a"],
        [1, 360_000, 3_600_001, 1_800_000, 3_600_000.5],
    ),
    "multipleOf a fine step": (
        {"type": "number", "multipleOf": 0.0001},
        [0, 1, 0.0001, -0.5, 0.1],
        [0.00001, 1.23456, -0.00015],
    ),
    "multipleOf a fine step of 12.5": (
        {"type": "number", "multipleOf": 0.00125, "exclusiveMinimum": 0},
        [0.00125, 0.0025, 1, 0.1, 3.00375],
        [0, 0.001, 0.0012, 0.00126, 1.001, -0.00125],
    ),
    "no multipleOf": (
        {"type": "integer", "not": {"multipleOf": 86_400}},
        [1, 86_401, 43_200, 8640],
        [0, 86_400, -172_800, 864_000],
    ),
    "multipleOf and bounds": (
        {"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 21},
        [5, 10, 15, 20],
        [0, 3, 7, 25],
    ),
    "multipleOf from": (
        {"type": "integer", "multipleOf": 3, "minimum": 100},
        [102, 105, 999, 3000],
        [99, 100, 101, 3],
    ),
    "two multipleOf": (
        {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
        [0, 12, 24],
        [4, 6, 8],
    ),
    "cents": (
        {"type": "number", "multipleOf": 0.01, "minimum": 0.5},
        [0.5, 0.99, 1, 2.25, 10.1],
        [0.49, 0.505, 1.001],
    ),
    "whole numbers": ({"type": "number", "multipleOf": 1}, [0, 5, -12], [0.5]),
    # --- strings
    "minLength": (
        {"type": "string", "minLength": 2},
        ["ab", "日本", "a\n", "😀😀", "abc"],
        ["", "a", "😀", "\n"],
    ),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "a", "日本", '"\\', "😀😀"], ["abc", "日本語"]),
    "length range": ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", "abc"], ["", "abcd"]),
    "length zero": ({"type": "string", "maxLength": 0}, [""], ["a"]),
    "pattern": (
        {"type": "string", "pattern": "^[a-z]+[0-9]{2}$"},
        ["a12", "abc99"],
        ["12", "a1", "a123", "A12"],
    ),
    "pattern anywhere": ({"type": "string", "pattern": "b+c"}, ["bc", "abbcd", '\nbc"'], ["b", "cb", ""]),
    "pattern from start": ({"type": "string", "pattern": "^ab"}, ["ab", "abc"], ["cab", "a"]),
    "pattern to end": ({"type": "string", "pattern": "ab$"}, ["ab", "cab"], ["abc"]),
    "pattern alternatives": (
        {"type": "string", "pattern": "^a|b$"},
        ["a", "ax", "b", "xb"],
        ["xa", "bx", ""],
    ),
    "pattern escaped": ({"type": "string", "pattern": '^[\\\\"\\n]+$'}, ["\\", '"', "\n\\"], ["", "a", "/"]),
    "pattern unicode": ({"type": "string", "pattern": "^[α-ω]+$"}, ["αβγ"], ["abc", "αb"]),
    "pattern and length": (
        {"type": "string", "pattern": "^[a-z]([-a-z]*[a-z])?$", "minLength": 2, "maxLength": 4},
        ["ab", "a-b", "abcd"],
        ["a", "-a", "a-", "abcde"],
    ),
    "patterns": (
        {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]},
        ["ab", "ba", "xaxb"],
        ["a", "b", ""],
    ),
    "keywords of strings on any type": ({"maxLength": 1}, ["a", 12, None, ["abc"]], ["ab"]),
    # --- arrays
    "items": ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["a"], [1, None]]),
    "no items": ({"type": "array", "items": False}, [[]], [[1]]),
    "minItems": (
        {"type": "array", "items": {"type": "null"}, "minItems": 2},
        [[None, None], [None] * 5],
        [[], [None]],
    ),
    "maxItems": (
        {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        [[], [None], [None, None]],
        [[None] * 3],
    ),
    "maxItems 0": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "items range": (
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        [[None], [None] * 2],
        [[], [None] * 3],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        [[], [1], [1, "a"], [1, "a", None, 3]],
        [["a"], [1, 2]],
    ),
    "prefixItems and items": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
        [[], [1], [1, None, None]],
        [[None], [1, 2]],
    ),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "null"}],
            "items": False,
            "minItems": 2,
        },
        [[1, None]],
        [[], [1], [1, None, None]],
    ),
    "minItems past prefix": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "minItems": 3},
        [[1, None, None], [1, None, None, None]],
        [[1], [1, None]],
    ),
    "maxItems within prefix": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "maxItems": 1},
        [[], [1]],
        [[1, None], [None]],
    ),
    "draft-07 tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "integer"}],
            "additionalItems": {"type": "null"},
        },
        [[], [1], [1, None]],
        [[None], [1, 1]],
    ),
    "uniqueItems of one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
    "uniqueItems false": ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, [[1, 1]], [[2]]),
    # --- objects
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        [{}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}],
        [{"a": "x"}, {"b": 1}],
    ),
    "required": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"b": 1, "c": 2}],
        [{}, {"a": 1}, {"a": 1, "c": 1}],
    ),
    "all required": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["b", "a"]},
        [{"a": 1, "b": 2}],
        [{}, {"a": 1}, {"b": 2}],
    ),
    "required alone": ({"type": "object", "required": ["z"]}, [{"z": 1}, {"z": {}, "a": 1}], [{}, {"a": 1}]),
    "required beside": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z"]},
        [{"z": 1}, {"a": None, "z": 1}],
        [{}, {"a": None}],
    ),
    "escaped names": (
        {"type": "object", "properties": {'a"\\/~b\n': {"const": 1}}, "required": ['a"\\/~b\n']},
        [{'a"\\/~b\n': 1}],
        [{}],
    ),
    "additionalProperties false": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        [{}, {"a": 1}],
        [{"b": 1}, {"a": 1, "b": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"x": 1}, {"x": 1, "y": 2}],
        [{"x": "a"}],
    ),
    "additionalProperties beside": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "ab": {"type": "null"}},
            "additionalProperties": {"type": "integer"},
        },
        [{}, {"a": "x"}, {"a": "x", "b": 1}, {"": 1}, {"abc": 2, "b": 1}, {"A": 1}],
        [{"a": 1}, {"b": "x"}, {"ab": 1}, {"x": 1, "a": 1}],
    ),
    "additionalProperties true": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True},
        [{"a": None, "b": 1}, {"b": "x"}],
        [{"a": 1}, {"b": 1, "a": 2}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"x": 1, "xy": 2}],
        [{"a": 1}, {"x": "s"}],
    ),
    "patternProperties beside": (
        {
            "type": "object",
            "properties": {"xa": {"minimum": 5}, "b": {"type": "null"}},
            "patternProperties": {"^x": {"type": "integer"}},
            "additionalProperties": {"type": "boolean"},
        },
        [{"xa": 5}, {"b": None, "xb": 1, "c": True}],
        [{"xa": 4}, {"xa": "s"}, {"xb": True}, {"c": 1}, {"b": True}],
    ),
    "patterns that overlap": (
        {
            "type": "object",
            "patternProperties": {"a": {"minimum": 2}, "b": {"maximum": 4}},
            "additionalProperties": False,
        },
        [{"ab": 3}, {"a": 9, "b": 1}, {"ba": 2}, {"a": "s"}],
        [{"ab": 5}, {"ab": 1}, {"a": 1}, {"c": 1}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}},
        [{}, {"abc": 1}],
        [{"A": 1}, {"abcd": 1}, {"": 1}],
    ),
    "propertyNames and properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "B": {}},
            "propertyNames": {"pattern": "^[a-z]$"},
            "additionalProperties": {"type": "integer"},
        },
        [{"a": None}, {"b": 1}],
        [{"B": 1}, {"a": 1}, {"bb": 1}],
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
        [{}, {"a": 1}, {"c": 1}],
    ),
    "maxProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 1},
        [{}, {"a": 1}, {"c": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}],
    ),
    "count of others": (
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
        [{"a": None}, {"a": None, "b": None}],
        [{}, {"a": None, "b": None, "c": None}],
    ),
    "count of all": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}, "b": {"const": 2}},
            "required": ["a"],
            "additionalProperties": {"type": "null"},
            "minProperties": 2,
            "maxProperties": 3,
        },
        [{"a": 1, "b": 2}, {"a": 1, "x": None}, {"a": 1, "b": 2, "x": None}, {"a": 1, "x": None, "y": None}],
        [{"a": 1}, {"a": 1, "b": 2, "x": None, "y": None}],
    ),
    "impossible property": (
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        [{}, {"b": None}],
        [{"a": 1}],
    ),
    # --- logic
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    "anyOf beside": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": None}, {"b": None}, {"a": None, "b": None}],
        [{}],
    ),
    "anyOf with false": ({"anyOf": [False, {"const": 1}]}, [1], [2]),
    "oneOf types": (
        {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
        [1, "a", None],
        [True, 1.5],
    ),
    "oneOf tagged": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                    "required": ["kind", "lives"],
                },
                {
                    "type": "object",
                    "properties": {"kind": {"enum": ["dog", "wolf"]}, "name": {"type": "string"}},
                    "required": ["kind", "name"],
                },
            ]
        },
        [{"kind": "cat", "lives": 9}, {"kind": "wolf", "name": "x"}],
        [{"kind": "cat", "name": "x"}, {"kind": "dog"}, {"kind": "cow"}],
    ),
    "oneOf by keys": (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, "a"]),
    "allOf objects": (
        {
            "type": "object",
            "allOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "null"}, "a": {"minimum": 3}}},
            ],
        },
        [{"a": 3}, {"a": 4, "b": None}],
        [{"a": 2}, {"b": None}, {}],
    ),
    "allOf and anyOf": (
        {"allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 2}, {"const": 3}]}]},
        [2],
        [1, 3],
    ),
    "$ref": (
        {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
        [[1, 2]],
        [["a"]],
    ),
    "$ref beside": ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 3}, [3], [2, "a"]),
    "$ref to root": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}],
    ),
    "definitions": ({"definitions": {"a/b": {"type": "null"}}, "$ref": "#/definitions/a~1b"}, [None], [1]),
    "$anchor": ({"$defs": {"x": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, [None], [1]),
    "$id": (
        {
            "$id": "https://example.com/s",
            "$defs": {"x": {"type": "null"}},
            "$ref": "https://example.com/s#/$defs/x",
        },
        [None],
        [1],
    ),
    "recursion": (
        TREE,
        [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}]}],
        [{}, {"value": 1, "children": [{}]}, {"value": 1, "children": [1]}],
    ),
    "mutual recursion": (
        {
            "$defs": {
                "a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
                "b": {"type": "array", "items": {"$ref": "#/$defs/a"}},
            },
            "$ref": "#/$defs/a",
        },
        [None, [], [None, [None, []]]],
        [1, [1]],
    ),
    "impossible branch": (
        {
            "$defs": {
                "loop": {"type": "object", "properties": {"x": {"$ref": "#/$defs/loop"}}, "required": ["x"]}
            },
            "anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}],
        },
        [None],
        [{}, {"x": None}],
    ),
    # --- keywords that say nothing
    "not false": ({"type": "null", "not": False}, [None], [1]),
    "empty if": ({"type": "null", "if": {"const": 1}, "then": True}, [None], [1]),
    "unevaluated true": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "unevaluatedProperties": True},
        [{"a": None}],
        [{"a": 1}],
    ),
}

MAIL_IPV6 = [f"a@[IPv6:{ip}]" for ip in ("::1", "1:2::3:4:5:6", "1::5.6.7.8", "1:2:3:4:5:6:7:8")]
NO_ADDRESSES = [f"a@[{ip}]" for ip in ("127.0.0.300", "IPv6:1:2::3:4:5:6:7", "IPv6:1.2.3.4", "::1")]
LONG_NAME = ".".join(["a" * 63, "b" * 63, "c" * 63, "d-e.f"])

FORMATS = {
    "date": (
        ["2024-02-29", "1999-12-31", "2000-02-29"],
        ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "24-1-1"],
    ),
    "time": (
        ["23:59:59Z", "08:30:00.123+02:00", "00:59:59.999999999999999Z", "23:59:60Z", "23:59:60.5-00:00"],
        ["24:00:00Z", "12:60:00Z", "12:00:00", "23:58:60Z", "22:59:60+00:00", "23:59:60+01:00", "00:00:61Z"],
    ),
    "date-time": (
        ["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.5-11:30", "1998-12-31T23:59:60z"],
        ["2024-02-30T00:00:00Z", "2024-01-01 00:00:00Z", "1998-12-31T22:59:60Z"],
    ),
    "duration": (["P1Y2M3D", "PT36H", "P4W", "P1DT12H30M5S"], ["P", "PT", "1Y", "P1S", "P1D4W"]),
    "email": (
        ["a@b.com", "a.b+c@x-y.example.org", '"joe @ bloggs\\" "@b.c', '""@a', "a@[127.0.0.1]", *MAIL_IPV6],
        ["a", "@b", "a@", "a@-b", "a..b@c", '"a"b@c', '"a@b', '"\\"@a', '"é"@a', *NO_ADDRESSES],
    ),
    "hostname": (
        ["localhost", "www.example.com", "a-b.c", "a--b", "a.b.c.d.e.f.g.h.example", LONG_NAME],
        ["-a", "a-", "a..b", "a_b", "", "a" * 64, ".".join(["a" * 63] * 4), "ab--c.d"],
    ),
    "ipv4": (["0.0.0.0", "127.0.0.1", "255.255.255.255"], ["256.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::", "1:2:3:4:5:6:7::"],
        ["1:2:3", ":::", "12345::", "1::2::3", "1:2:3:4:5:6:7:8:9"],
    ),
    "uri": (
        ["https://a.b/c?d=e#f", "mailto:a@b.c", "urn:x:y", "http://[::1]:80/"],
        ["", "a/b", "://x", "http://a b", "http://%zz"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "x"]),
    "json-pointer": (["", "/a/b~0c", "/~1"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a/b", "2#", "0+1/x", "10"], ["", "/a", "01", "-1/a", "0##", "+1"]),
    "idn-email": (
        ["größe@beispiel.de", "a@b.com", "用户@例え.日本", '"δοκιμή"@example.com', "ü@[127.0.0.1]"],
        ["a", "@b", "a@", "a@-ö", '"ö@b'],
    ),
    "idn-hostname": (["bücher.example", "例え.日本", "localhost", "a-b.c"], ["-a", "a-", "a..b", "a b", ""]),
    "uri-reference": (
        ["", "a/b", "../x?y#z", "//host/path", "https://a.b", "#frag", "?q", "a:b"],
        ["\\\\x\\y", "a b", "1:b", "http://%zz", "#a#b"],
    ),
    "iri": (["https://例え.jp/パス?q=ü#ß", "urn:ö:y", "http://[::1]/"], ["", "a/ö", "http://ö b", "://x"]),
    "iri-reference": (["", "ö/ü", "//例え.jp", "https://a.b/é"], ["\\\\ö", "a b", "#a#b"]),
    "uri-template": (
        ["", "http://x.y/{a}/{b:3}{?c,d*}{#e}", "plain", "{+path}/here", "{a.b}"],
        ["{", "a}", "{}", "{a", "{a:0}", "{=a}", "a b", "{a,}"],
    ),
    "regex": (
        ["", "a+b*?", "^[a-z0-9_]{2,}$", "(a|(?:b(c)))d?", r"\\d\\.\\w", "x{3}", "[^a]"],
        ["(", "a)", "[a", "*a", "a**b(", "[z-a]", "a{2", "(((((a"],
    ),
    "byte": (["", "aGVsbG8=", "YQ==", "QUJD"], ["a", "aGVsbG8", "=", "YQ===", "a b="]),
}
