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
from ramify.grammar.schema.compiler import compile_schema
from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.schema.document.json_values import parse_json
from ramify.grammar.schema.instance import validate
from ramify.schema_bundle import MAX_FOLDER_BYTES, MAX_REFERENCES, MAX_SOURCE_BYTES, finder
from tests.grammar.languages import schema_rules
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
    "relative to the $id of a given schema": (
        {"$ref": "a.json"},
        {
            "a.json": {"$id": f"{ORG}y/a.json", "$ref": "b.json"},
            "b.json": STRING,
            f"{ORG}y/b.json": {"type": "integer"},
        },
        [1],
        ["a"],
    ),
    "inside a given schema with an $id": (
        {"$ref": "a.json#/$defs/b", "$defs": {"a.json": {}}},
        {
            "a.json": {"$id": f"{ORG}y/a.json", "$defs": {"b": {"$ref": "b.json"}}},
            "b.json": STRING,
            f"{ORG}y/b.json": {"type": "integer"},
        },
        [1],
        ["a"],
    ),
    "with dots": (
        {"$ref": "./a.json", "$defs": {"a.json": {"type": "null"}}},
        {"a.json": {"anyOf": [{"$ref": "b/./../c.json"}]}, "./c.json": STRING},
        ["a"],
        [1, None],
    ),
    "relative to a relative $id": (
        {"$id": "schemas/root.json", "$ref": "item.json"},
        {"schemas/item.json": {"$ref": "../other.json"}, "other.json": STRING},
        ["a"],
        [1],
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


OUR_OWN = (
    *("each by its draft", "with dots", "relative to a relative $id"),
    *("relative to the $id of a given schema", "inside a given schema with an $id"),
)
"""Cases in which jsonschema finds none, reads another draft, or resolves by the key in place of the $id."""


@pytest.mark.parametrize("name", CASES)
def test_a_reference(name: str) -> None:
    schema, definitions, valid, invalid = CASES[name]
    source = constraint.json_schema(schema, definitions=definitions).source
    whole = parse_json(source)
    grammar = Recogniser(schema_rules(whole))
    for instance, right in [*((each, True) for each in valid), *((each, False) for each in invalid)]:
        assert grammar.accepts(in_schema_order(json.loads(source), instance)) == right, instance
        assert (validate(whole, instance) == []) == right, instance


@pytest.mark.parametrize("name", [name for name in CASES if name not in OUR_OWN])
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


def test_a_cycle_through_a_name_embeds_each_schema_once() -> None:
    definitions = {"a/x.json": {"not": {"$ref": "a/x.json"}, "anyOf": [{"$ref": "b/y.json"}]}}
    definitions |= {"b/y.json": {"items": {"$ref": "a/x.json#/not"}, "then": {"$ref": "b/y.json"}}}
    for base in (None, f"{ORG}deep/root", "urn:a:b", "deep/root"):
        root = {"$ref": "a/x.json"} if base is None else {"$ref": "a/x.json", "$id": base}
        whole = parse_json(constraint.json_schema(root, definitions=definitions).source)
        assert len(whole["$defs"]) == 2
        SchemaDocument(whole)


def test_the_size_is_refused_while_schemas_are_embedded() -> None:
    taken = 0

    def find(uri: str) -> str:
        nonlocal taken
        taken += 1
        return json.dumps({"$ref": f"{taken}.json", "description": "x" * 100_000})

    for given in (
        constraint.json_schema({"$ref": "a.json"}),
        constraint.structural_tag({"a": [{"json_schema": {"$ref": "a.json"}}] * 20}),
    ):
        taken = 0
        with pytest.raises(InvalidConstraint, match=f"at most {MAX_SOURCE_BYTES}"):
            constraint.with_definitions(given, find)
        assert taken == 11


def test_more_references_than_the_limit_are_refused() -> None:
    anywhere = [{"$ref": str(i)} for i in range(MAX_REFERENCES)] + [{"$ref": "2"}]
    constraint.json_schema({"anyOf": anywhere}, definitions={"2": {"$id": ORG}})
    with pytest.raises(InvalidConstraint, match=f"More than {MAX_REFERENCES} references") as refused:
        constraint.json_schema({"anyOf": [*anywhere, {"$ref": "more"}]}, definitions={})
    assert refused.value.pointer == f"/anyOf/{MAX_REFERENCES + 1}/$ref"
    assert refused.value.remedy


NO_URI: list[tuple[Any, dict[str, Any], str]] = [
    ({"items": {"$ref": "http://[x"}}, {}, "/items/$ref"),
    ({"$ref": "//[x"}, {}, "/$ref"),
    ({"$ref": "http://\u2100/x"}, {}, "/$ref"),
    ({"$ref": "x" * 3000}, {}, "/$ref"),
    ({"$ref": "\ud800"}, {}, "/$ref"),
    ({"$id": "http://[x", "$ref": "a.json"}, {}, "/$id"),
    ({"allOf": [{"$id": "http://[x", "$ref": "a.json"}]}, {}, "/allOf/0/$id"),
    ({"$ref": "a/b"}, {"a/b": {"$ref": "http://[x"}}, "/$defs/a~1b/$ref"),
    ({"$ref": "a.json", "$defs": []}, {"a.json": {}}, "/$defs"),
]


@pytest.mark.parametrize(("schema", "definitions", "pointer"), NO_URI)
def test_a_wrong_uri_is_refused(schema: Any, definitions: dict[str, Any], pointer: str) -> None:
    source = json.dumps(schema)
    with pytest.raises(InvalidConstraint) as refused:
        constraint.json_schema(source, definitions=definitions)
    assert refused.value.pointer == pointer
    assert refused.value.remedy
    json.dumps(str(refused.value), ensure_ascii=False).encode()
    tag = constraint.structural_tag(f'{{"format": [{{"json_schema": {source}}}]}}')
    with pytest.raises(InvalidConstraint) as refused:
        constraint.with_definitions(tag, finder(definitions))
    assert refused.value.pointer == f"/format/0/json_schema{pointer}"


@pytest.mark.parametrize(("schema", "pointer"), [(one, at) for one, given, at in NO_URI if not given])
def test_a_wrong_uri_is_refused_by_the_compiler(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        compile_schema(schema)
    assert refused.value.pointer == pointer
    assert refused.value.remedy


def test_half_of_a_surrogate_pair_cannot_be_put_beside_another() -> None:
    with pytest.raises(InvalidConstraint, match="cannot be written") as refused:
        constraint.json_schema('{"$ref": "a.json", "title": "\\ud800"}', definitions={"a.json": {}})
    assert refused.value.remedy


def test_two_schemas_with_one_id_are_refused() -> None:
    definitions = {name: {"$id": f"{ORG}same", "const": name} for name in ("a.json", "b.json")}
    schema = {"anyOf": [{"$ref": "a.json"}, {"$ref": "b.json"}]}
    with pytest.raises(InvalidConstraint, match=f"the same .id '{ORG}same'") as refused:
        constraint.json_schema(schema, definitions=definitions)
    assert refused.value.remedy


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
        ({"a.json": {"minimum": float("nan")}}, "NaN is no JSON number"),
        ({"a.json": '{"minimum": Infinity}'}, "Infinity is no JSON number"),
        ({"a.json": {"const": "\ud800"}}, "definitions.'a.json'. is no JSON schema"),
        ({"\ud800": {}}, "is no URI"),
        ({"http://[x": {}}, "is no URI"),
        ({"a.json": {"$id": "http://[x"}}, "is no URI"),
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


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b'{"a": NaN}', b" " * MAX_SOURCE_BYTES + b"{}"])
def test_a_file_that_is_no_schema_is_refused_where_it_is_needed(folder: Path, text: bytes) -> None:
    (folder / "bad.json").write_bytes(text)
    find = finder(folder)
    assert find("address.json")
    with pytest.raises(InvalidConstraint, match=r"bad\.json, which a \$ref leads to, is no") as refused:
        find("bad.json")
    assert refused.value.remedy


def test_a_folder_is_kept_in_memory(folder: Path) -> None:
    (folder / "dangling.json").symlink_to(folder / "none")
    (folder / "folder.json").mkdir()
    find = finder(folder)
    assert find("dangling.json") is None
    assert find("folder.json") is None
    (folder / "address.json").unlink()
    (folder / "deep/zip.json").write_text("{")
    assert find("address.json") == '{"type": "string"}'
    assert find("deep/zip.json") == '{"type": "integer"}'


def test_a_folder_that_is_too_large(folder: Path) -> None:
    large = folder / "large.json"
    large.write_text(json.dumps({"title": "x" * (MAX_SOURCE_BYTES - 100)}))
    for i in range(MAX_FOLDER_BYTES // MAX_SOURCE_BYTES):
        (folder / f"large-{i}.json").hardlink_to(large)
    with pytest.raises(InvalidConstraint, match=f"more than {MAX_FOLDER_BYTES} bytes") as refused:
        finder(folder)
    assert refused.value.remedy


def test_a_cycle_through_a_name_in_a_folder(folder: Path) -> None:
    (folder / "deep/zip.json").write_text('{"type": "array", "items": {"$ref": "deep/zip.json#"}}')
    whole = parse_json(constraint.json_schema({"$ref": "deep/zip.json"}, definitions=folder).source)
    assert list(whole["$defs"]) == ["deep/zip.json"]
    compile_schema(whole)
    assert validate(whole, [[[]]]) == []
    assert validate(whole, [[1]])


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
