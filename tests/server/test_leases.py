"""Programs and leases that clients name by headers and by fields of OpenAI's API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ramify.errors import InvalidRequest
from ramify.messages import ProgramHint
from ramify.runtime.server.leases import lease_seconds
from tests.server.conftest import BODIES, CHAT, GENERATE, refused
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

OPENAI = [path for path in BODIES if path != "/generate"]


def hint(frontend: FakeFrontend) -> ProgramHint | None:
    """The hint of the last request."""
    return frontend.requests[-1].hint


def post(
    http: httpx.Client, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    answer = http.post(path, json=BODIES[path] | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("path", BODIES)
def test_a_request_without_a_name_is_no_program(
    http: httpx.Client, frontend: FakeFrontend, path: str
) -> None:
    post(http, path)
    assert hint(frontend) is None


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "program", "lease_s"),
    [
        ({"prompt_cache_key": "k"}, "k", 300.0),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, "k", 300.0),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, "k", 86_400.0),
        ({"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "30m"}}, "k", 1800.0),
        ({"prompt_cache_options": {"ttl": "10s"}}, None, 10.0),
        ({"prompt_cache_options": {"mode": "implicit"}}, "", 0.0),
    ],
)
def test_fields_of_openai(
    http: httpx.Client,
    frontend: FakeFrontend,
    path: str,
    fields: dict[str, Any],
    program: str | None,
    lease_s: float,
) -> None:
    answer = post(http, path, **fields)
    found = hint(frontend)
    if program == "":
        assert found is None
        return
    assert found is not None
    assert (found.program, found.lease_s) == (program or frontend.requests[-1].flow, lease_s)
    assert "prompt_cache_key" not in answer.headers.get("x-ramify-ignored", "")


@pytest.mark.parametrize("path", BODIES)
def test_headers(http: httpx.Client, frontend: FakeFrontend, path: str) -> None:
    own = {"x-ramify-program": "nightly", "x-ramify-lease": "7.5", "x-ramify-priority": "-3"}
    fields = {} if path == "/generate" else {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    post(http, path, own | {"session-id": "s", "user-agent": "codex_exec/0.171 (Linux)"}, **fields)
    found = hint(frontend)
    assert found == ProgramHint(
        program="nightly", name="codex_exec", lease_s=7.5, session=True, client="codex_exec/0.171"
    )
    assert frontend.requests[-1].priority == -3
    post(http, path, own, priority=2)
    assert frontend.requests[-1].priority == 2
    post(http, path, own | {"x-title": "My Notebook"})
    found = hint(frontend)
    assert found is not None
    assert found.name == "My Notebook"


@pytest.mark.parametrize(
    "name", ["x-claude-code-session-id", "session-id", "x-session-affinity", "x-session-id"]
)
def test_the_session_of_an_agent_is_a_program(http: httpx.Client, frontend: FakeFrontend, name: str) -> None:
    post(http, "/v1/chat/completions", {name: "s"})
    found = hint(frontend)
    assert found is not None
    assert (found.program, found.lease_s) == ("s", 300.0)


def test_programs_of_different_scopes_stay_apart(http: httpx.Client, frontend: FakeFrontend) -> None:
    programs = []
    for salt in ("", "a", "b", "a"):
        post(http, "/v1/chat/completions", prompt_cache_key="k", cache_salt=salt)
        found = hint(frontend)
        assert found is not None
        programs.append(found.program)
    assert programs[1] == programs[3]
    assert len(set(programs)) == 3


def test_the_server_bounds_every_lease() -> None:
    frontend = FakeFrontend()
    with LiveServer(frontend, max_lease_s=5.0) as server, httpx.Client(base_url=server.url) as http:
        http.post("/v1/chat/completions", json=CHAT | {"prompt_cache_retention": "24h"})
        http.post("/generate", json=GENERATE | {"program": {"program": "p", "lease_s": 9e9}})
    assert [one.hint.lease_s for one in frontend.requests if one.hint] == [5.0, 5.0]


def test_the_dashboard_shows_the_calls_of_a_program_together(http: httpx.Client) -> None:
    for path in OPENAI:
        post(http, path, {"x-ramify-program": "shown"})
    (shown,) = [one for one in http.get("/live").json()["programs"] if one["id"] == "shown"]
    assert shown["requests"] == len(OPENAI)


@pytest.mark.parametrize(
    ("headers", "fields", "field"),
    [
        ({"x-ramify-lease": "soon"}, {}, "x-ramify-lease"),
        ({"x-ramify-lease": "-1"}, {}, "x-ramify-lease"),
        ({"x-ramify-lease": "inf"}, {}, "x-ramify-lease"),
        ({"x-ramify-priority": "high"}, {}, "x-ramify-priority"),
        ({"x-ramify-priority": "101"}, {}, "x-ramify-priority"),
        ({"x-ramify-program": "p" * 257}, {}, "x-ramify-program"),
        ({}, {"prompt_cache_key": "p" * 257}, "prompt_cache_key"),
        ({}, {"prompt_cache_key": 5}, "prompt_cache_key"),
        ({}, {"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({}, {"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({}, {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({}, {"prompt_cache_options": {"more": 1}}, "prompt_cache_options.more"),
        ({}, {"prompt_cache_options": []}, "prompt_cache_options"),
    ],
)
@pytest.mark.parametrize("path", OPENAI)
def test_wrong_values_are_refused_by_name(
    http: httpx.Client, path: str, headers: dict[str, str], fields: dict[str, Any], field: str
) -> None:
    assert refused(http.post(path, json=BODIES[path] | fields, headers=headers))["param"] == field


def test_times() -> None:
    assert [lease_seconds(ttl, "ttl") for ttl in ("5m", "1h", "90s", "1d")] == [300.0, 3600.0, 90.0, 86400.0]
    with pytest.raises(InvalidRequest, match="ttl is 'x'"):
        lease_seconds("x", "ttl")


@pytest.mark.parametrize(("mark", "lease_s"), [({}, 300.0), ({"ttl": "5m"}, 300.0), ({"ttl": "1h"}, 3600.0)])
def test_marks_of_anthropic(
    http: httpx.Client, frontend: FakeFrontend, mark: dict[str, str], lease_s: float
) -> None:
    text = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", **mark}}
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": [text]}]}
    for headers in ({}, {"x-claude-code-session-id": "s"}):
        assert http.post("/v1/messages", json=body, headers=headers).status_code == 200
    alone, session = (request.hint for request in frontend.requests)
    assert alone is not None
    assert session is not None
    assert (alone.lease_s, session.lease_s, session.program) == (lease_s, lease_s, "s")
