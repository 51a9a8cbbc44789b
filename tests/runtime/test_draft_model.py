"""A draft model: outputs are the same with and without it, a good one is used, a bad one stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify.runtime.scheduler.speculation import acceptance
from tests.runtime.local import LocalScheduler
from tests.runtime.test_overlap import told
from tests.runtime.test_speculation import Twice
from tests.runtime.tiny import write_model

PROMPT = [*b"A prompt of some length, which is longer than a page or two of tokens."]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, seed=1)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"longest": 40},
        {"page_size": 4, "num_pages": 40, "chunk_tokens": 16, "longest": 50},
        {"jump_forward": False, "prefix_cache": "naive"},
    ],
    ids=["plain", "short-of-pages", "no-jumps"],
)
def test_the_same_tokens(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    expected = Twice(tiny_folder, speculation=False, **options).run()
    monkeypatch.setattr(acceptance, "LEAST_GAIN", 0.0)
    load = Twice(tiny_folder, speculation=True, draft=tiny_folder, **options)
    found = load.run()
    assert [told(result) for result in found] == [told(result) for result in expected]
    counters = load.local.scheduler.counters
    print(counters)
    assert counters.model_accepted_tokens > 20
    if "num_pages" in options:
        assert counters.retractions > 0
    counts = load.local.cache.counts()
    assert counts.in_use == 0
