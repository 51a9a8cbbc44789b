"""A prompt that takes long to compute, and one that is too long, on real weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.end_to_end.served import Served, serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(300)]

SHORT_SILENCE = "import ramify.runtime.server.sse as sse; sse.SILENCE_S = 0.05"
SENTENCE = "The tram stops at the old bridge, and nobody gets off. "


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(code=SHORT_SILENCE) as served:
        yield served


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_long_prompt_is_not_computed_in_silence(served: Served, path: str) -> None:
    with httpx.stream("POST", served.url + path, json=body(path, 120), timeout=60) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    tokens = next(place for place, line in enumerate(lines) if '"delta"' in line)
    assert lines.index(": keep-alive") < tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_prompt_over_the_context_is_refused_in_words_that_agents_know(served: Served, path: str) -> None:
    stream = path == "/v1/responses"
    answer = httpx.post(served.url + path, json=body(path, 700, stream=stream), timeout=60)
    assert answer.status_code == (200 if stream else 400)
    assert '"code":"context_length_exceeded"' in answer.text
    assert (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in"
        in answer.text
    )
    assert ("response.failed" in answer.text) == stream


@pytest.mark.parametrize(
    ("path", "limit"), [("/v1/chat/completions", "max_tokens"), ("/v1/responses", "max_output_tokens")]
)
def test_a_limit_over_the_room_is_cut(served: Served, path: str, limit: str) -> None:
    asked = body(path, 1, stream=False) | {limit: 32_000, "stop": ["e"]}
    answer = httpx.post(served.url + path, json=asked, timeout=60)
    assert answer.status_code == 200, answer.text


def body(path: str, sentences: int, *, stream: bool = True) -> Any:
    text = f"{path} {SENTENCE * sentences}"
    if path == "/v1/responses":
        return {"model": "default", "input": text, "max_output_tokens": 2, "stream": stream}
    messages = [{"role": "user", "content": text}]
    return {"model": "default", "messages": messages, "max_tokens": 2, "stream": stream}
