"""Schemas that refer to others: given by URI or in a folder, resolved as the standard has it, never fetched.

The jsonschema package judges the same instances, with the same schemas in a registry of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.schema.compiler import compile_schema, schema_rules
from ramify.grammar.schema.instance import validate
from ramify.grammar.schema.values.json_text import parse_json
from ramify.schema_bundle import finder
from tests.grammar.recogniser import Recogniser
from tests.grammar.schema_order import in_schema_order

DRAFT_04 = "http://json-schema.org/draft-04/schema#"
DRAFT_07 = "http://json-schema.org/draft-07/schema#"
STRING = {"type": "string"}
ORG = "https://example.org/"

CASES: dict[str, tuple[Any, dict[str, Any], list[Any], list[Any]]] = {
    "by pointer, through another": (
        {"$ref": "a.json#/$defs/x"},
        {"a.json": {"$defs": {"x": {"$ref": "b/c.json"}}}, "b/c.json": {"$ref": "../d.json"}}
        | {"d.json": {"type": "integer"}},
        [1],
        ["a", None],
    ),
    "relative to $id": (
        {"$id": f"{ORG}schemas/root.json", "items": {"$ref": "item.json"}, "type": "array"},
        {f"{ORG}schemas/item.json": {"const": "a"}, "item.json": {"const": "b"}},
        [["a"], []],
        [["b"]],
    ),
    "relative to an embedded $id": (
        {
            "$id": f"{ORG}root.json",
            "$defs": {"k": {"$id": "below/k.json", "$ref": "item.json"}},
            "$ref": "#/$defs/k",
        },
        {f"{ORG}below/item.json": {"const": "a"}, f"{ORG}item.json": {"const": "b"}},
        ["a"],
        ["b"],
    ),
    "by anchor": (
        {"$ref": f"{ORG}a#here"},
        {f"{ORG}a": {"$defs": {"x": {"$anchor": "here", "type": "null"}}}},
        [None],
        [1],
    ),
    "recursive": (
        {
            "$id": f"{ORG}tree",
            "type": "object",
            "properties": {"child": {"$ref": "node"}},
            "required": ["child"],
        },
        {f"{ORG}node": {"anyOf": [{"type": "null"}, {"$ref": "tree"}]}},
        [{"child": None}, {"child": {"child": None}}],
        [{}, {"child": 1}, {"child": {}}],
    ),
    "a boolean": ({"items": {"$ref": "never.json"}, "type": "array"}, {"never.json": False}, [[]], [[1]]),
    "$ref inside values and names": (
        {"const": {"$ref": "a.json"}, "properties": {"$ref": {"$ref": "b.json"}}},
        {"a.json": {"type": "integer"}, "b.json": {"type": "string"}},
        [{"$ref": "a.json"}],
        [1, {"$ref": 1}],
    ),
    "each by its draft": (
        {
            "$schema": DRAFT_07,
            "$id": f"{ORG}root",
            "type": "object",
            "properties": {"a": {"$ref": "old"}, "b": {"$ref": "seven"}},
        },
        {
            f"{ORG}old": {"$schema": DRAFT_04, "type": "number", "minimum": 3, "exclusiveMinimum": True},
            f"{ORG}seven": {
                "$ref": "#/definitions/s",
                "maxLength": 1,
                "definitions": {"s": {"type": "string"}},
            },
        },
        [{}, {"a": 4, "b": "long"}],
        [{"a": 3}, {"b": 1}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reference(name: str) -> None:
    schema, definitions, valid, invalid = CASES[name]
    source = constraint.json_schema(schema, definitions=definitions).source
    whole = parse_json(source)
    grammar = Recogniser(schema_rules(whole))
    for instance, right in [*((each, True) for each in valid), *((each, False) for each in invalid)]:
        assert grammar.accepts(in_schema_order(json.loads(source), instance)) == right, instance
        assert (validate(whole, instance) == []) == right, instance


@pytest.mark.parametrize("name", [name for name in CASES if name != "each by its draft"])
def test_the_table_agrees_with_jsonschema(name: str) -> None:
    schema, definitions, valid, invalid = CASES[name]
    registry = Registry().with_contents(definitions.items(), default_specification=DRAFT202012)
    default = validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema"})
    judge = validator_for(schema, default=default)(schema, registry=registry)
    assert [judge.is_valid(instance) for instance in valid + invalid] == [True] * len(valid) + [False] * len(
        invalid
    )


def test_the_schema_keeps_its_order_and_its_digits() -> None:
    source = '{"$ref": "a.json", "b": 0.10, "a": 123456789012345678901234567890}'
    found = constraint.json_schema(source, definitions={"a.json": '{"multipleOf": 0.10}'}).source
    assert found == (
        '{"$ref":"a.json","b":0.10,"a":123456789012345678901234567890,'
        '"$defs":{"a.json":{"multipleOf":0.10,"$id":"a.json"}}}'
    )


def test_only_what_is_needed_is_taken() -> None:
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}
    plain = constraint.json_schema(schema)
    assert constraint.json_schema(schema, definitions={"b.json": {"$ref": "c.json"}}) == plain
    used = constraint.json_schema({"$ref": "a.json"}, definitions={"a.json": {}, "b.json": {}})
    assert "b.json" not in used.source


def test_a_reference_to_nowhere_names_the_uri_and_the_remedy() -> None:
    made = constraint.json_schema(
        {"$id": f"{ORG}a/root", "items": {"$ref": "b.json"}},
        definitions={"b.json": {"$ref": "../gone.json#/x"}},
    )
    with pytest.raises(InvalidConstraint, match=r"to https://example.org/gone\.json\.") as refused:
        compile_schema(parse_json(made.source))
    assert refused.value.pointer == "/$defs/https:~1~1example.org~1a~1b.json/$ref"
    assert refused.value.remedy
    assert "definitions" in refused.value.remedy
    assert "(--schemas), as example.org/gone.json, or with its URI as its $id" in refused.value.remedy


@pytest.mark.parametrize(
    ("reference", "files"),
    [
        ("part/b.json", f" as {ORG[8:]}a/part/b.json or part/b.json, or"),
        ("../b.json#/x", f" as {ORG[8:]}b.json, or"),
        ("b", ""),
    ],
)
def test_the_remedy_names_the_files_that_are_looked_up(reference: str, files: str) -> None:
    schema = {"$id": f"{ORG}a/root", "items": {"$ref": reference}}
    with pytest.raises(InvalidConstraint, match="leads out") as refused:
        compile_schema(schema)
    assert f"(--schemas),{files} with its URI as its $id." in str(refused.value)


@pytest.mark.parametrize(
    ("definitions", "message"),
    [
        ({"a.json": [1]}, "definitions.'a.json'. is no JSON schema"),
        ({"a.json": "{"}, "definitions.'a.json'. is no JSON schema"),
        ({1: {}}, "the key 1"),
        ("/no/such/folder", "There is no folder"),
    ],
)
def test_definitions_that_are_none(definitions: Any, message: str) -> None:
    with pytest.raises(InvalidConstraint, match=message) as refused:
        constraint.json_schema({"$ref": "a.json"}, definitions=definitions)
    assert refused.value.field == "definitions"


# --- a folder -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    schemas = {
        "address.json": {"type": "string"},
        "deep/zip.json": {"type": "integer"},
        "named.json": {"$id": f"{ORG}elsewhere/it", "const": 1},
        "example.org/by/path.json": {"const": 2},
        "twice.json": {"$id": f"{ORG}twice.json", "const": 3},
        "other.json": {"$id": f"{ORG}twice.json", "const": 4},
        "same/one.json": {"$id": f"{ORG}same"},
        "same/two.json": {"$id": f"{ORG}same"},
    }
    for name, schema in schemas.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(schema))
    return tmp_path


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"$ref": "address.json"}, "x"),
        ({"$id": f"{ORG}root", "$ref": "address.json"}, "x"),
        ({"$ref": "deep/zip.json"}, 5),
        ({"$ref": f"{ORG}elsewhere/it"}, 1),
        ({"$ref": f"{ORG}by/path.json"}, 2),
        ({"$ref": f"{ORG}twice.json"}, 3),
    ],
)
def test_a_schema_of_a_folder(folder: Path, schema: Any, valid: Any) -> None:
    whole = parse_json(constraint.json_schema(schema, definitions=folder).source)
    assert validate(whole, valid) == []
    assert validate(whole, None) != []


def test_a_folder_is_read_again_when_it_has_changed(folder: Path) -> None:
    schema = {"$ref": "new.json"}
    before = constraint.json_schema(schema, definitions=str(folder))
    (folder / "new.json").write_text('{"const": 7}')
    assert before.source == '{"$ref":"new.json"}'
    assert "7" in constraint.json_schema(schema, definitions=str(folder)).source


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/passwd", "file:///etc/passwd", "deep/../address.json"]
)
def test_a_reference_does_not_leave_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "secret.json").write_text("{}")
    assert finder(folder)(name) is None


def test_one_uri_for_two_files_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConstraint, match=r"one\.json and .*two\.json have the same") as refused:
        constraint.json_schema({"$ref": f"{ORG}same"}, definitions=folder)
    assert refused.value.remedy


def test_a_file_that_is_no_schema_is_named(folder: Path) -> None:
    (folder / "bad.json").write_text("[1]")
    with pytest.raises(InvalidConstraint, match=r"bad\.json is no JSON schema") as refused:
        finder(folder)
    assert refused.value.remedy


def test_the_schemas_of_a_structural_tag(folder: Path) -> None:
    content = {"type": "json_schema", "json_schema": {"$ref": "deep/zip.json"}}
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"},
    }
    found = constraint.with_definitions(constraint.structural_tag(tag), finder(folder))
    inner = json.loads(found.source)["format"]["content"]["json_schema"]
    assert inner["$defs"]["deep/zip.json"]["type"] == "integer"
    plain = constraint.regex("a")
    assert constraint.with_definitions(plain, finder(folder)) is plain
