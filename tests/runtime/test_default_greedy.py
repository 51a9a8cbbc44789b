"""Logits and greedy output of the default model's weights in float32 equal those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.engine.engine import Engine
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from tests.default_model import load_reference
from tests.model.checkpoints import expected as expected_logits
from tests.model.dense import logits
from tests.runtime.local import LocalScheduler
from tests.runtime.oracle import Greedy, assert_same, greedy

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(400)]

TOKENS = 16
FEW_PAGES = 30
"""Number of pages of 8 tokens: enough for the longest request, and for little beside it."""
STORY = "Once upon a time there was a lighthouse keeper who collected clocks. " * 6
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Les trois couleurs du drapeau français sont",
    '{"name": "',
    STORY + "One morning every clock stopped, and",
    STORY + "One morning a letter arrived, and",
    STORY,
]
CHATS = ["Count to five.", "Write a haiku about rivers."]


@pytest.fixture(scope="module")
def files() -> Any:
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def prompts(files: Any) -> list[list[int]]:
    tokenizer = load_tokenizer(files.tokenizer)
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in CHATS
    ]
    return [tokenizer.encode(text) for text in TEXTS + rendered]


@pytest.fixture(scope="module")
def reference(files: Any) -> Any:
    return load_reference(files)


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[Greedy]:
    return [greedy(reference, prompt, TOKENS, eos=[2]) for prompt in prompts]


@pytest.fixture(scope="module")
def model(files: Any) -> Any:
    return load_model(files, dtype=torch.float32)


def test_logits(model: Any, reference: Any, prompts: list[list[int]]) -> None:
    for prompt in prompts[:3]:
        ids = torch.tensor(prompt)
        torch.testing.assert_close(
            logits(model, ids, step=3), expected_logits(reference, ids), atol=1e-3, rtol=0
        )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "num_pages": 4096, "chunk_tokens": 50},
        {"page_size": 7, "chunk_tokens": 13, "max_running": 4},
        {"page_size": 8, "num_pages": FEW_PAGES, "chunk_tokens": 64},
        {"attention_backend": "torch", "prefix_cache": "naive"},
    ],
    ids=["plain", "pages-of-1", "small-chunks", "few-pages", "twin-without-sharing"],
)
def test_scheduled(
    expected: list[Greedy], prompts: list[list[int]], model: Any, options: dict[str, Any]
) -> None:
    local = LocalScheduler(model, **options)
    for want, result in zip(expected, local.complete(prompts, max_tokens=TOKENS), strict=True):
        assert_same(want, result.ids)
    if options.get("num_pages") == FEW_PAGES:
        assert local.scheduler.counters.retractions > 0
        assert local.cache.counts().evicted > 0


def test_through_the_engine(expected: list[Greedy], prompts: list[list[int]]) -> None:
    segments = [(tuple(prompt),) for prompt in prompts]
    with Engine(dtype="float32") as engine:
        for round_ in range(2):  # cold, then from the cache
            results = engine.complete_many(segments, max_tokens=TOKENS, temperature=0.0)
            for want, result, prompt in zip(expected, results, prompts, strict=True):
                assert_same(want, result.ids)
                if round_:
                    assert result.usage.cached_tokens == len(prompt) - 1
        alone = engine.complete(segments[0], max_tokens=TOKENS, temperature=0.0)
        assert_same(expected[0], alone.ids)
