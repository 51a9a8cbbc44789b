"""Deterministic mode: an output has the same bits beside any other requests, in any chunks, cached or not."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.quantization import Quantization
from tests.runtime.local import LocalScheduler, Result

TOKENS = 12
FORMATS: list[tuple[str, Quantization, str]] = [
    ("float32", "none", "auto"),
    ("bfloat16", "none", "auto"),
    ("bfloat16", "int4", "auto"),
    ("bfloat16", "int4", "int8"),
]


def make_prompts() -> list[list[int]]:
    """Prompts: one with forks at odd positions, one that is its prefix, and unrelated ones."""
    rng = random.Random(5)
    trunk = [rng.randrange(256) for _ in range(90)]
    forks = [trunk[:length] + [rng.randrange(256) for _ in range(3)] for length in (17, 41, 64)]
    return [trunk, *forks, trunk[:50], *([rng.randrange(256) for _ in range(n)] for n in (1, 33))]


PROMPTS = make_prompts()


def scheduler(model: Any, dtype: str, **options: Any) -> LocalScheduler:
    return LocalScheduler(model, dtype=dtype, deterministic=True, page_size=4, **options)


def bits(results: Sequence[Result]) -> list[tuple[list[int], list[Any]]]:
    """(tokens, log-probabilities) of each result, to be compared bit by bit."""
    return [(result.ids, result.logprobs) for result in results]


def complete(engine: LocalScheduler, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[Any]]]:
    return bits(engine.complete(prompts, max_tokens=TOKENS, ignore_eos=True, logprobs=2))


@pytest.mark.parametrize(("dtype", "quantization", "pages"), FORMATS)
def test_nothing_changes_a_bit(tiny_folder: Path, dtype: str, quantization: Quantization, pages: Any) -> None:
    files = ModelFiles(name="tiny", weights=tiny_folder, tokenizer=tiny_folder)
    model = load_model(
        files, dtype=getattr(torch, dtype), quantization=quantization, packed=True, deterministic=True
    )
    local = functools.partial(scheduler, model, dtype, kv_cache_dtype=pages)
    alone = [complete(local(), [prompt])[0] for prompt in PROMPTS]
    for options in (
        {"chunk_tokens": 512},
        {"chunk_tokens": 3},
        {"chunk_tokens": 32, "prefix_cache": "naive"},
    ):
        engine = local(**options)
        assert complete(engine, PROMPTS) == alone, options
        assert complete(engine, PROMPTS) == alone, "from the cache"
    few = local(max_running=3, num_pages=60)
    assert complete(few, PROMPTS * 2) == alone * 2, "three at a time, with evictions"
    short_of_pages = local(num_pages=42)
    results = short_of_pages.complete(PROMPTS, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    assert short_of_pages.scheduler.counters.retractions > 0
    assert bits(results) == alone, "retracted and resumed"
