"""Prompts that end inside a token, on real weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ramify.runtime.engine.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", num_pages=512) as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [
        ("The URL is http:", "//www"),
        ("The capital of France is ", "Paris"),
        ("Once upon a ti", "me"),
    ],
)
def test_goes_on_inside_a_token(engine: Engine, prompt: str, goes_on: str) -> None:
    healed = engine.complete(prompt, max_tokens=6, temperature=0.0)
    assert healed.text.startswith(goes_on)
    plain = engine.complete(prompt, max_tokens=6, temperature=0.0, token_healing=False)
    assert not plain.text.startswith(goes_on)


def test_a_prompt_that_ends_on_a_token_is_left_alone(engine: Engine) -> None:
    for prompt in ("The capital of France is", "def fib("):
        healed, plain = (
            engine.complete(prompt, max_tokens=8, temperature=0.0, token_healing=on) for on in (True, False)
        )
        assert (healed.ids, healed.text, healed.usage.prompt_tokens) == (
            plain.ids,
            plain.text,
            plain.usage.prompt_tokens,
        )
