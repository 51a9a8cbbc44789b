"""System One as TypeSafe's own package calls and reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ramify.errors import Overloaded, PromptTooLong, WorkerDied
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer

typesafe: Any = pytest.importorskip("typesafe_sdk")
httpx2: Any = pytest.importorskip("httpx2")

QUESTIONS: Any = {
    "urgent": {"type": "noul", "criteria": {"true": "It cannot wait."}},
    "team": {"type": "choice", "criteria": {"billing": None, "returns": {"goods": ["sent", "back"]}}},
    "weight": {"type": "score", "instructions": "How bad?", "criteria": ["low", {"a": 1}, "high"]},
}
ONCE = typesafe.RetryPolicy(max_retries=0)
AGAIN = typesafe.RetryPolicy(backoff_initial=0.0, respect_retry_after=False)


class Recovery(httpx2.HTTPTransport):  # type: ignore[misc]
    """A connection to a server whose frontend fails once."""

    def __init__(self, frontend: FakeFrontend) -> None:
        super().__init__()
        self._frontend = frontend

    def handle_request(self, request: Any) -> Any:
        response = super().handle_request(request)
        self._frontend.fail_first = None
        return response


@pytest.fixture
def package(server: LiveServer) -> Iterator[Any]:
    with typesafe.TypeSafeClient(api_key="k", base_url=server.url, retry=ONCE) as client:
        yield client


def test_answers(package: Any) -> None:
    result = package.system_one({"message": "It is broken."}, QUESTIONS)
    assert result.model == MODEL
    assert list(result.answers) == list(QUESTIONS)
    assert 0 < result.nouls["urgent"].noul < 1
    assert result.choices["team"].choice in ("billing", "returns")
    assert sum(result.choices["team"].probabilities.values()) == pytest.approx(1)
    weight = result.scores["weight"]
    assert weight.legend == {0: "low", 1: {"a": 1}, 2: "high"}
    assert list(weight.probabilities) == [0, 1, 2]
    assert 0 <= weight.confidence <= 1
    assert result.usage.input_tokens > 0
    assert result.usage.output_tokens == 0
    assert result.request_id
    answers = result.raw_http_response.json()["answers"].values()
    assert all(one["option_mass"] and one["layout"] and one["temperature"] for one in answers)


def test_large_bodies_are_compressed(package: Any, frontend: FakeFrontend) -> None:
    result = package.system_one("x" * 2000, QUESTIONS)
    assert result.raw_http_response.request.headers["content-encoding"] == "zstd"
    assert frontend.requests[0].chat is not None
    assert frontend.requests[0].chat[-1].content == "x" * 2000


async def test_without_blocking(server: LiveServer) -> None:
    async with typesafe.AsyncTypeSafeClient(api_key="k", base_url=server.url) as client:
        result = await client.system_one("It is broken.", QUESTIONS, extra_body={"layout": "labels"})
        assert result.raw_http_response.json()["answers"]["urgent"]["layout"] == "labels-1"
        assert (await client.models.list()).models[0].name == MODEL


def test_models(package: Any) -> None:
    listed = package.models.list()
    assert [model.name for model in listed.models] == [MODEL]
    assert listed.request_id


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Overloaded("full", retry_after=0.5), "TypeSafeRateLimitError"),
        (WorkerDied("dead"), "TypeSafeInternalServerError"),
    ],
)
def test_errors_after_which_it_tries_again(
    package: Any, server: LiveServer, frontend: FakeFrontend, error: Any, kind: str
) -> None:
    frontend.fail_first = error
    with pytest.raises(getattr(typesafe, kind), match=error.message) as caught:
        package.system_one("x", QUESTIONS)
    assert caught.value.request_id
    if isinstance(error, Overloaded):
        assert caught.value.retry_after_ms == 1000
    transport = Recovery(frontend)
    with typesafe.TypeSafeClient(
        api_key="k", base_url=server.url, retry=AGAIN, transport=transport
    ) as client:
        result = client.system_one("x", QUESTIONS)
    assert result.raw_http_response.request.headers["x-typesafe-retry-count"] == "1"


def test_errors_that_are_not(package: Any, frontend: FakeFrontend) -> None:
    with pytest.raises(typesafe.TypeSafeUnprocessableEntityError) as caught:
        package.system_one("x", {"where": typesafe.Box(instructions="the dog")})
    assert "questions.where.type: " in str(caught.value)
    frontend.fail_first = PromptTooLong("4096 tokens at most, and 5000 are given.", field="prompt")
    with pytest.raises(typesafe.TypeSafeAPIError, match="4096") as too_long:
        package.system_one("x", QUESTIONS)
    assert too_long.value.status == 413


def test_images_are_refused(package: Any) -> None:
    image = typesafe.Image(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(typesafe.TypeSafeAPIError, match="images"):
        package.system_one(image, QUESTIONS)


def test_a_wrong_key() -> None:
    with (
        LiveServer(FakeFrontend(), api_key="sesame") as server,
        typesafe.TypeSafeClient(api_key="k", base_url=server.url) as client,
        pytest.raises(typesafe.TypeSafeAuthenticationError, match="API key"),
    ):
        client.system_one("x", QUESTIONS)
