"""The engine on a GPU: graphs, memory, computing ahead and determinism change no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramify.errors import EngineError
from tests.gpu.toy import PROMPTS, Local

FEW_PAGES = {16: 70, 64: 22}
"""Pages of a pool, by page size. They hold the longest prompt with its output (58 and 15 pages), but not all
prompts, which share their beginnings and fill 137 and 44."""


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """The expected tokens: each prompt alone, deterministic, with none of the tested features."""
    return [
        Local(deterministic=True, cuda_graphs=False, overlap=False, cascade=False, num_pages=600).complete(
            [prompt]
        )[0]
        for prompt in PROMPTS
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk_tokens": 37},
    {"cuda_graphs": False, "overlap": True},
    {"overlap": True, "cascade": True},
    *({"page_size": size, "num_pages": pages} for size, pages in FEW_PAGES.items()),
    {"prefix_cache": "naive", "overlap": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_deterministic_changes_no_bit(alone: list[Any], options: dict[str, Any]) -> None:
    local = Local(deterministic=True, **options)
    assert local.complete(PROMPTS) == alone
    assert local.complete(PROMPTS) == alone, "from the cache"
    if "num_pages" in options:
        evicted = local.scheduler.stats().evicted_pages
        assert evicted + local.scheduler.counters.retractions > 0


def test_float32_gives_the_tokens_of_the_torch_backend() -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 800}
    expected = Local(attention_backend="torch", **options).complete(PROMPTS[:8])
    found = Local(overlap=True, **options).complete(PROMPTS[:8])
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def test_memory_is_filled_and_not_more() -> None:
    total = torch.cuda.mem_get_info()[1]
    local = Local(memory_fraction=0.5)
    local.complete(PROMPTS)
    free = torch.cuda.mem_get_info()[0]
    assert 0.4 * total < total - free < 0.55 * total


def test_what_does_not_fit_is_refused_with_figures() -> None:
    with pytest.raises(EngineError, match=r"does not fit .* GiB"):
        Local(memory_fraction=0.0005)
