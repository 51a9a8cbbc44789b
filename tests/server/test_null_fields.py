"""Null means the same as a missing field, for every field that the server reads, at every depth."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import msgspec
import pytest

from ramify.messages import ProgramHint
from ramify.model_info import ThinkingFormat
from tests.server.conftest import speak
from tests.server.fake_frontend import FakeFrontend
from tests.server.sample_bodies import BODIES, objects

EXCEPTIONS = {"sampling_params.max_new_tokens"}
"""Fields in which null has a meaning of its own: as many tokens as fit into the context, as in SGLang."""
EMPTY = [
    ("reasoning", "reasoning", {}),
    ("reasoning", "reasoning", {"effort": None, "summary": None, "enabled": None, "max_tokens": None}),
    ("responses", "reasoning", {"summary": "auto"}),
    ("responses", "reasoning", {}),
    ("responses", "text", {"format": None, "verbosity": None}),
    ("responses", "metadata", {}),
    ("chat", "stream_options", {"include_usage": None}),
    ("chat", "stream_options", {}),
    ("chat", "chat_template_kwargs", {}),
    ("chat", "chat_template_kwargs", {"enable_thinking": None, "tone": None, "other": None}),
    ("chat", "structured_outputs", {}),
    ("chat", "structured_outputs", {"json": None, "regex": None, "choice": None}),
    ("chat", "logit_bias", {}),
    ("chat", "metadata", {}),
    ("generate", "sampling_params", {}),
]


@pytest.fixture
def thinker(frontend: FakeFrontend) -> FakeFrontend:
    return speak(
        frontend,
        suffix={"user": "", "assistant": "", "tool": "", "system": ""},
        variables=("enable_thinking", "reasoning_effort", "tone"),
        thinking=ThinkingFormat(),
    )


class Sender:
    """A client that reports what the server made of a body: the status, the error and the generations."""

    def __init__(self, http: httpx.Client, frontend: FakeFrontend) -> None:
        self.http = http
        self.frontend = frontend
        self.known: dict[str, Any] = {}

    def outcome(self, path: str, body: Any) -> Any:
        key = json.dumps(body, sort_keys=True)
        if key not in self.known:
            self.frontend.requests.clear()
            self.frontend.script = ["So."] * 4
            response = self.http.post(path, json=body)
            told = response.json() if response.status_code >= 400 else {"error": None}
            problem = told.get("error", told.get("detail"))
            made = [
                msgspec.structs.replace(one, rid="", flow="", hint=one.hint and ids_out(one.hint, one.flow))
                for one in self.frontend.requests
            ]
            ignored = response.headers.get("x-ramify-ignored")
            self.known[key] = (response.status_code, problem, made, ignored)
        return self.known[key]


@pytest.mark.parametrize("name", [name for name in BODIES if name not in ("unload", "program")])
def test_null_is_as_if_left_out(
    http: httpx.Client, thinker: FakeFrontend, taken: dict[str, tuple[set[str], set[str]]], name: str
) -> None:
    path, body = BODIES[name]
    sender = Sender(http, thinker)
    status, problem, _, _ = sender.outcome(path, body)
    assert (status, problem) == (200, None)
    checked = 0
    for place, _ in objects(body):
        for field in sorted(set().union(*taken.get(place, ()))):
            if f"{place}.{field}" in EXCEPTIONS:
                continue
            with_null, without = copy.deepcopy(body), copy.deepcopy(body)
            dict(objects(with_null))[place][field] = None
            dict(objects(without))[place].pop(field, None)
            assert sender.outcome(path, with_null) == sender.outcome(path, without), (place, field)
            checked += 1
    assert checked >= len(body)


@pytest.mark.parametrize(("name", "field", "value"), EMPTY)
def test_what_asks_for_nothing_is_as_if_left_out(
    http: httpx.Client, thinker: FakeFrontend, name: str, field: str, value: Any
) -> None:
    path, body = BODIES[name]
    sender = Sender(http, thinker)
    without = {key: each for key, each in body.items() if key != field}
    status, problem, made, _ = sender.outcome(path, without | {field: value})
    assert (status, problem, made) == sender.outcome(path, without)[:3]
    assert (status, problem) == (200, None)


def ids_out(hint: ProgramHint, flow: str) -> ProgramHint:
    """`hint` without the id of the request, by which a program without a name is called."""
    return msgspec.structs.replace(hint, program="" if hint.program == flow else hint.program)
