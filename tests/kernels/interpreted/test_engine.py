"""A whole engine on the Triton backend, in the interpreter: tokens equal those of the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.runtime.engine.engine import Engine
from tests.runtime.tiny import write_tiny

PROMPTS = ["one", "a longer prompt than the first", "a longer prompt, and another end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def answers(folder: Path, **options: Any) -> list[Any]:
    with Engine(str(folder), dtype="float32", num_pages=64, page_size=8, threads=1, **options) as engine:
        plain = [
            engine.complete(prompt, max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2)
            for prompt in PROMPTS
        ]
        drawn = [
            engine.complete(PROMPTS[0], max_tokens=2, seed=3, ignore_eos=True, **more)
            for more in ({"top_p": 0.9}, {"top_k": 5, "frequency_penalty": 0.5}, {"min_p": 0.05})
        ]
        return plain + drawn


def test_tokens_equal_those_of_the_cpu_backend(folder: Path) -> None:
    expected = answers(folder, attention_backend="cpu")
    found = answers(folder, attention_backend="triton")
    assert [answer.ids for answer in found] == [answer.ids for answer in expected]
    for mine, theirs in zip(found[:3], expected[:3], strict=True):
        assert mine.logprobs.logprobs == pytest.approx(theirs.logprobs.logprobs, abs=1e-4)
        assert [[token for token, _ in row] for row in mine.logprobs.top] == [
            [token for token, _ in row] for row in theirs.logprobs.top
        ]
