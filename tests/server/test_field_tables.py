"""The tables of fields say what the code does with each field."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.messages import Usage
from ramify.model_info import ThinkingFormat
from ramify.programs.route import router
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.bodies import usage_body
from ramify.runtime.server.tables import ENDPOINTS
from ramify.runtime.server.tables.rows import Endpoint, FieldTable, Row
from tests.server.conftest import refused, speak
from tests.server.fake_frontend import FakeFrontend, LiveServer
from tests.server.sample_bodies import BODIES, objects

SERVER_GUIDE = Path(__file__).parents[2] / "docs/server.md"


def tables(endpoint: Endpoint) -> dict[str, FieldTable]:
    """Place of an object in the body → its table."""
    return {"": endpoint.whole} | {table.path: table for table in endpoint.inner}


TABLES = {
    table: (endpoint.path, place) for endpoint in ENDPOINTS[::-1] for place, table in tables(endpoint).items()
}
"""Table → the first endpoint and the place in its body that the table is for."""


def cases(effect: str) -> list[Any]:
    return [
        pytest.param(path, place, row, name, id=f"{path} {place}.{name}")
        for table, (path, place) in TABLES.items()
        for row in table.rows
        if row.effect == effect
        for name in row.names
    ]


def place_of(path: str) -> str:
    return re.sub(r"^questions\.\w+", "questions.*", re.sub(r"\[\d+\]", "[]", path))


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), router, lora_loading=True) as server:
        yield server


@pytest.fixture(autouse=True)
def thinker(http: httpx.Client, frontend: FakeFrontend) -> None:
    suffix = {"user": "", "assistant": "", "tool": "", "system": ""}
    variables = ("enable_thinking", "reasoning_effort", "tone")
    speak(frontend, suffix=suffix, variables=variables, thinking=ThinkingFormat())
    assert http.post("/load_lora_adapter", json={"lora_name": "loaded", "lora_path": "/y"}).status_code == 200


def refuses(response: httpx.Response, field: str) -> Any:
    """The error of a response that refuses `field`. Errors of some APIs name it in the message alone."""
    body = response.json()
    if "detail" in body:
        (detail,) = body["detail"]
        assert (detail["loc"], detail["type"]) == (["body", *field.split(".")], "unsupported_field")
        return {"remedy": detail["msg"].partition("supported. ")[2]}
    error = body["error"]
    if isinstance(error, dict) and "param" in error:
        error = refused(response)
        assert (error["param"], error["code"]) == (field, "unsupported_field")
        return error
    assert response.status_code == 400
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{field} is ")
    return {"remedy": message.partition("supported. ")[2]}


def with_field(path: str, place: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(full name of the field, body) for each sample body with the field `name` in an object at `place`."""
    found = False
    for endpoint, body in BODIES.values():
        if endpoint != path:
            continue
        for at, _ in objects(body):
            if place_of(at) == place:
                changed = copy.deepcopy(body)
                dict(objects(changed))[at][name] = value
                found = True
                yield (f"{at}.{name}" if at else name), changed
    assert found, f"no sample body of {path} has {place}"


def test_the_code_takes_what_the_tables_say(
    http: httpx.Client, frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[str, set[str]] = defaultdict(set)
    refuse_rest = Fields.refuse_rest

    def noting(fields: Fields, unsupported: Any = None) -> None:
        places[place_of(fields.path("").removesuffix("."))].update(fields.taken)
        refuse_rest(fields, unsupported)

    monkeypatch.setattr(Fields, "refuse_rest", noting)
    taken: dict[FieldTable, set[str]] = defaultdict(set)
    for endpoint in ENDPOINTS:
        said = tables(endpoint)
        for path, body in BODIES.values():
            if path == endpoint.path:
                places.clear()
                frontend.script = ["So."] * 4
                assert http.post(path, json=body).status_code == 200
                for place, names in places.items():
                    taken[said[place]] |= names
    assert taken.keys() == TABLES.keys()
    for table, (path, place) in TABLES.items():
        extra = taken[table] - {*table.names("taken"), *table.names("ignored")}
        assert not extra, f"{path} {place}: the table has no row for them"
        missing = {*table.names("taken")} - taken[table]
        assert not missing, f"{path} {place}: no code takes them"


@pytest.mark.parametrize(("path", "place", "row", "name"), cases("refused"))
def test_a_refused_field_is_refused(http: httpx.Client, path: str, place: str, row: Row, name: str) -> None:
    for field, body in with_field(path, place, name, ["x"]):
        error = refuses(http.post(path, json=body), field)
        assert error.get("remedy", "") == row.remedy


@pytest.mark.parametrize(("path", "place", "row", "name"), cases("ignored"))
def test_an_ignored_field_is_named(
    http: httpx.Client, frontend: FakeFrontend, path: str, place: str, row: Row, name: str
) -> None:
    named = False
    for field, body in with_field(path, place, name, "x" if row.allowed is None else row.allowed[0]):
        frontend.script = ["So."] * 4
        response = http.post(path, json=body)
        named |= place_of(field) in response.headers.get("x-ramify-ignored", "").split(", ")
    assert named, response.text


@pytest.mark.parametrize(("path", "place", "row", "name"), cases("ignored"))
def test_another_value_of_an_ignored_field_is_refused(
    http: httpx.Client, path: str, place: str, row: Row, name: str
) -> None:
    if row.allowed is not None:
        for field, body in with_field(path, place, name, "other"):
            refuses(http.post(path, json=body), field)


def test_no_field_is_in_two_rows() -> None:
    for table, place in TABLES.items():
        names = [name for row in table.rows for name in row.names]
        assert len(names) == len(set(names)), place


def test_the_table_of_usage_has_all_its_fields() -> None:
    section = SERVER_GUIDE.read_text().partition("| `usage.ramify` |")[2].partition("\n\n")[0]
    named = [name for line in section.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert named == list(usage_body([Usage()], 1)["ramify"])
