"""Every spelling of a constraint on the OpenAI surface."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.messages import Enforcement, Finish, TextChunk, Unenforced
from ramify.runtime.generation import GenerationResult
from ramify.runtime.server.openai.bodies import choice_extras
from tests.server.conftest import refused
from tests.server.fake_frontend import MODEL, FakeFrontend, events

CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: Any = {"model": MODEL, "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TAG = {
    "type": "triggered_tags",
    "triggers": ["<a"],
    "tags": [{"begin": "<a>", "content": {"type": "regex", "pattern": "x"}, "end": "</a>"}],
}
OLDER = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
POINT = {"$ref": "x.json"}
X = {"x.json": {"multipleOf": 0.10}}
NATURAL = constraint.json_schema(json.dumps(SCHEMA))
LARK = 'start: "a"'
GBNF = 'root ::= "a"'


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def wrapped(**options: Any) -> dict[str, Any]:
    return form("json_schema", json_schema={"name": "n", "schema": SCHEMA} | options)


SPELLINGS: dict[str, tuple[dict[str, Any], Constraint | None]] = {
    "text": (form("text"), None),
    "json_schema": (wrapped(strict=True), NATURAL),
    "description": (wrapped(description="A shape."), NATURAL),
    "whitespace": (
        wrapped(whitespace="compact"),
        constraint.json_schema(json.dumps(SCHEMA), whitespace="compact"),
    ),
    "any order": (wrapped(any_order=True), constraint.json_schema(json.dumps(SCHEMA), any_order=True)),
    "definitions": (
        wrapped(schema=POINT, definitions=X),
        constraint.json_schema(POINT, definitions=X),
    ),
    "validate": (wrapped(strict="validate"), constraint.json_schema(json.dumps(SCHEMA), strict="validate")),
    "json_object": (form("json_object"), constraint.json_object()),
    "a number of spaces": (form("json_object", whitespace=3), constraint.json_object(whitespace=3)),
    "regex": (form("regex", regex="a+"), constraint.regex("a+")),
    "pattern": (form("regex", pattern="a+"), constraint.regex("a+")),
    "ebnf": (form("ebnf", ebnf=GBNF), constraint.ebnf(GBNF)),
    "lark": (form("lark", lark=LARK), constraint.lark(LARK)),
    "choice": (form("choice", choice=["a", "b"]), constraint.choices(["a", "b"])),
    "structural tag": (
        form("structural_tag", format=TAG),
        constraint.structural_tag({"type": "structural_tag", "format": TAG}),
    ),
    "older structural tag": (form("structural_tag", **OLDER), constraint.structural_tag(OLDER)),
    "SGLang's regex": ({"regex": "a+"}, constraint.regex("a+")),
    "SGLang's ebnf": ({"ebnf": GBNF}, constraint.ebnf(GBNF)),
    "SGLang's json_schema": ({"json_schema": json.dumps(SCHEMA)}, NATURAL),
    "guided_json": ({"guided_json": SCHEMA}, NATURAL),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, NATURAL),
    "guided_regex": ({"guided_regex": "a+"}, constraint.regex("a+")),
    "guided_choice": ({"guided_choice": ["a", "b"]}, constraint.choices(["a", "b"])),
    "guided_grammar, GBNF": ({"guided_grammar": GBNF}, constraint.ebnf(GBNF)),
    "guided_grammar, Lark": ({"guided_grammar": LARK}, constraint.lark(LARK)),
    "vLLM's structural_tag": ({"structural_tag": json.dumps(OLDER)}, constraint.structural_tag(OLDER)),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA}}, NATURAL),
    "structured_outputs compact": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        constraint.json_schema(json.dumps(SCHEMA), whitespace="compact"),
    ),
    "structured_outputs regex": ({"structured_outputs": {"regex": "a"}}, constraint.regex("a")),
    "structured_outputs choice": ({"structured_outputs": {"choice": ["a"]}}, constraint.choices(["a"])),
    "structured_outputs grammar": ({"structured_outputs": {"grammar": GBNF}}, constraint.ebnf(GBNF)),
    "structured_outputs json_object": (
        {"structured_outputs": {"json_object": True}},
        constraint.json_object(),
    ),
    "structured_outputs structural_tag": (
        {"structured_outputs": {"structural_tag": OLDER}},
        constraint.structural_tag(OLDER),
    ),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling(http: httpx.Client, frontend: FakeFrontend, path: str, name: str) -> None:
    fields, wanted = SPELLINGS[name]
    body = (CHAT if "chat" in path else COMPLETION) | {"max_tokens": 1}
    frontend.script = ["x"]
    # The order of keys and the numbers of a schema count: this client writes them as json.dumps does.
    response = http.post(path, content=json.dumps(body | fields))
    assert response.status_code == 200, response.text
    got = frontend.requests[-1].constraint
    if wanted is None or got is None:
        assert got is wanted
        return
    assert msgspec_equal(got, wanted)


def msgspec_equal(one: Constraint, other: Constraint) -> bool:
    """Whether both constraints are equal, apart from white space in JSON sources."""
    same = (one.kind, one.whitespace, one.any_order, one.strict) == (
        other.kind,
        other.whitespace,
        other.any_order,
        other.strict,
    )
    if one.kind in ("json_schema", "structural_tag"):
        return same and json.dumps(json.loads(one.source)) == json.dumps(json.loads(other.source))
    return same and one.source == other.source


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (form("xml"), "response_format.type"),
        (form("regex"), "response_format.regex"),
        (form("choice", choice=[]), "response_format.choice"),
        (form("ebnf", ebnf=GBNF, lark=LARK), "response_format.lark"),
        (form("json_object", schema={}), "response_format.schema"),
        (form("structural_tag"), "response_format.structural_tag"),
        (wrapped(whitespace=-1), "response_format.json_schema.whitespace"),
        (wrapped(definitions="/etc"), "response_format.json_schema.definitions"),
        (wrapped(schema=POINT, definitions={"x.json": []}), "response_format.json_schema.definitions"),
        (wrapped(schema=POINT | {"$defs": []}, definitions=X), "response_format.json_schema.schema"),
        (wrapped(schema={"$ref": "//[x"}, definitions=X), "response_format.json_schema.schema"),
        (wrapped(schema=POINT, definitions=X | {"y": "z" * 2**20}), "response_format.json_schema.schema"),
        (wrapped() | {"any_order": True}, "any_order"),
        (
            {"response_format": wrapped()["response_format"] | {"any_order": True}},
            "response_format.any_order",
        ),
        (wrapped(strict="maybe"), "response_format.json_schema.strict"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        (form("json_object") | {"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": "{"}, None),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, frontend: FakeFrontend, fields: dict[str, Any], param: str | None
) -> None:
    if param is None:
        frontend.fail_first = InvalidConstraint("It is no JSON.", field="json_schema")
        param = "guided_json"
    assert refused(http.post("/v1/chat/completions", json=CHAT | fields))["param"] == param


@pytest.mark.parametrize("field", ["whitespace", "any_order", "strict", "definitions"])
def test_an_option_of_json_in_the_wrong_place_is_told_its_place(http: httpx.Client, field: str) -> None:
    given = form("json_schema", json_schema={"schema": SCHEMA}, **{field: False})
    error = http.post("/v1/chat/completions", json=CHAT | given).json()["error"]
    assert error["param"] == f"response_format.{field}"
    assert error["remedy"] == f"Write it beside the schema: response_format.json_schema.{field}."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (wrapped(), "response_format.json_schema.schema"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_compiler_refuses_is_named(
    http: httpx.Client, frontend: FakeFrontend, fields: dict[str, Any], param: str, stream: bool
) -> None:
    frontend.fail_first = InvalidConstraint(
        "The keyword not is not supported.",
        field="json_schema",
        pointer="/not",
        remedy="Say what is allowed.",
    )
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = http.post(path, json=body | fields | {"stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["pointer"], error["remedy"]) == (param, "/not", "Say what is allowed.")
        assert error["message"] == "At /not: The keyword not is not supported. Say what is allowed."


@pytest.mark.parametrize("text", ['{"b": 1.5}', '{"b": 1}', '{"b": '])
def test_what_is_validated_afterwards_is_reported(
    http: httpx.Client, frontend: FakeFrontend, text: str
) -> None:
    wanted = wrapped(strict="validate")
    found: Any = {
        '{"b": 1.5}': [("/b", "/properties/b/type")],
        '{"b": 1}': [],
        '{"b": ': [("", "")],
    }[text]
    frontend.script = [text] * 5 + ["hm</think>" + text]
    extras = []
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        (choice,) = http.post(path, json=body | wanted).json()["choices"]
        extras.append(choice["ramify"])
        with http.stream("POST", path, json=body | wanted | {"stream": True}) as response:
            *chunks, _ = events(response)
        assert all("ramify" not in chunk["choices"][0] for chunk in chunks[:-1])
        extras.append(chunks[-1]["choices"][0]["ramify"])
    native = {"kind": "json_schema", "source": json.dumps(SCHEMA), "strict": "validate"}
    extras.append(http.post("/generate", json={"text": "hi", "constraint": native}).json()["meta_info"])
    thinking = CHAT | wanted | {"reasoning": {"max_tokens": 9}}
    extras.append(http.post("/v1/chat/completions", json=thinking).json()["choices"][0]["ramify"])
    for extra in extras:
        assert [(each["instance"], each["schema"]) for each in extra["violations"]] == found
        assert all(each["message"] for each in extra["violations"])


def test_nothing_is_reported_of_what_is_enforced(http: httpx.Client) -> None:
    assert "ramify" not in http.post("/v1/chat/completions", json=CHAT | wrapped()).json()["choices"][0]


def test_what_was_left_out_is_reported_beside_what_is_not_satisfied() -> None:
    left_out = Unenforced(schema="/pattern", message="A lookahead is not supported.")
    collected = GenerationResult()
    for chunk in (
        TextChunk(rid="r", text='"a', enforcement=Enforcement(unenforced=(left_out,))),
        TextChunk(rid="r", text='"', finish=Finish(reason="stop"), violations=()),
    ):
        collected.add_chunk(chunk)
    said = choice_extras(collected.violations, collected.enforcement)
    assert msgspec.to_builtins(said) == {
        "unenforced": [{"schema": "/pattern", "message": "A lookahead is not supported."}],
        "violations": [],
    }
    assert choice_extras(None, None) == {}


def test_a_description_beside_a_schema_is_named_as_having_no_effect(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=CHAT | wrapped(description="A shape."))
    assert response.headers["x-ramify-ignored"] == "response_format.json_schema.description"
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "description": "A shape."}}
    response = http.post("/v1/responses", json={"model": MODEL, "input": "hi", "text": text})
    assert response.status_code == 200
    assert response.headers["x-ramify-ignored"] == "text.format.description"
