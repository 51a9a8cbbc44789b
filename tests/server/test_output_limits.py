"""The most output tokens of a request: the endpoints' defaults, and the server's bound."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ramify.engine_messages import Submit
from ramify.errors import InvalidRequest
from ramify.messages import Preamble
from ramify.programs.route import router
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.server.tables import ENDPOINTS
from ramify.runtime.server.tables.rows import Endpoint
from ramify.sampling_params import SamplingParams
from tests.server.fake_frontend import FakeFrontend, LiveServer

GENERATING = [one for one in ENDPOINTS if one.limit]
PROGRAM = {"graph": {"nodes": [{"kind": "gen", "name": "x"}]}}
MESSAGES = {"messages": [{"role": "user", "content": "Hi."}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/programs": PROGRAM,
    "/api/chat": MESSAGES,
    "/api/generate": {"prompt": "x"},
}


def asked(frontend: FakeFrontend, http: httpx.Client, endpoint: Endpoint) -> tuple[int | None, bool]:
    """(max_tokens, cut_to_fit) of a request without a limit."""
    body = {**endpoint.required, **BODIES.get(endpoint.path, {})}
    response = http.post(endpoint.path, json=body)
    assert response.status_code == 200, response.text
    request = frontend.requests[-1]
    return request.sampling.max_tokens, request.cut_to_fit


def test_the_table_has_each_endpoint_that_generates() -> None:
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infill"}
    paths |= {"/api/chat", "/api/generate", "/generate", "/v1/programs"}
    assert {one.path for one in GENERATING} == paths


def test_a_request_without_a_limit_has_at_most_the_default_of_its_endpoint() -> None:
    with LiveServer(FakeFrontend(), router) as server, httpx.Client(base_url=server.url) as http:
        for endpoint in GENERATING:
            if endpoint.limit in endpoint.required:
                continue
            default, cut = asked(server.frontend, http, endpoint)
            assert default == endpoint.default_tokens, endpoint.path
            assert cut or default is None, endpoint.path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 16}),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 128}}),
        ("/v1/programs", PROGRAM | {"sampling_params": {"max_tokens": 128}}),
    ],
)
def test_a_default_that_the_client_names_is_not_cut(path: str, body: dict[str, Any]) -> None:
    with LiveServer(FakeFrontend(), router) as server, httpx.Client(base_url=server.url) as http:
        assert http.post(path, json=body).status_code == 200
        assert not server.frontend.requests[-1].cut_to_fit


def submit(max_tokens: int | None, *, cut: bool = False, **fields: Any) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Submit(rid="r", ids=(1,) * 10, sampling=sampling, cut_to_fit=cut, **fields)


LIMITS = Limits(context_length=100, vocab_size=9, eos_token_ids=(), kv_tokens=100, max_output_tokens=20)


@pytest.mark.parametrize(
    ("asked", "cut", "found"),
    [(None, False, 20), (None, True, 20), (20, False, 20), (5, True, 5), (0, False, 0), (32_000, True, 20)],
)
def test_a_chat_is_cut_to_the_bound(asked: int | None, cut: bool, found: int) -> None:
    assert LIMITS.max_tokens(submit(asked, cut=cut)) == found


@pytest.mark.parametrize("asked", [21, 32_000])
def test_other_requests_are_refused_with_the_number(asked: int) -> None:
    with pytest.raises(InvalidRequest, match=f"requested {asked} .* may have 20 here") as refused:
        LIMITS.max_tokens(submit(asked))
    assert (refused.value.field, refused.value.remedy) == ("max_tokens", "Ask for at most 20 tokens.")


def test_thoughts_beside_max_tokens_count() -> None:
    thought = Preamble(end="x", end_ids=(1,), max_tokens=10, apart=True)
    assert LIMITS.max_tokens(submit(9, preambles=(thought,))) == 20
    with pytest.raises(
        InvalidRequest, match=r"requested 21 output tokens \(max_tokens=10, 11 in preambles\)"
    ):
        LIMITS.max_tokens(submit(10, preambles=(thought,)))
    assert LIMITS.max_tokens(submit(10, cut=True, preambles=(thought,))) == 20


def test_the_bound_is_a_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="max_output_tokens is 0; it must be at least 1"):
        EngineConfig(max_output_tokens=0)
    assert ServerConfig().max_output_tokens is None
