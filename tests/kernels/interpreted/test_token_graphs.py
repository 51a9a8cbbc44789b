"""Prompts, mixed steps and verification passes padded to buckets, in the interpreter: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.kernels.registry import ops
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from tests.runtime.tiny import write_tiny

PAGE = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return load_model(
        ModelFiles(name="tiny", weights=folder, tokenizer=folder), dtype=torch.float32, deterministic=True
    )


def test_padded_steps_have_the_bits_of_eager_ones(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts; then a token of one beside a verification pass of the other."""
    runners = []
    for _ in range(2):
        pool = KvPool(model.config, num_pages=12, page_size=PAGE, dtype=torch.float32)
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
        runners.append(Runner(model, pool, ops("triton", deterministic=True)))
    eager, padded = runners
    padded.capture_graphs([1, 4], max_pages=5, buckets=[8, 16])
    graphs = padded._token_graphs
    assert graphs is not None
    replayed: list[bool] = []
    replay = graphs.replay

    def counted(batch: Any) -> Any:
        hidden = replay(batch)
        replayed.append(hidden is not None)
        return hidden

    monkeypatch.setattr(graphs, "replay", counted)
    ids = torch.randint(256, (30,)).int().numpy()
    tables = (3, 7, 1), (5, 2)
    for first, second in (((0, 7), (0, 4)), ((7, 8), (4, 9))):
        spans = zip((first, second), tables, strict=True)
        batch = pack([Extension(ids, start, stop, pages) for (start, stop), pages in spans], PAGE)
        wanted, found = eager.forward(batch), padded.forward(batch)
        assert wanted.isfinite().all()
        assert torch.equal(found, wanted)
    assert replayed == [True] * 2
    spare = padded.pool.padding_page
    for mine, theirs in ((padded.pool.k, eager.pool.k), (padded.pool.v, eager.pool.v)):
        torch.testing.assert_close(mine[:, :spare], theirs[:, :spare], equal_nan=True, rtol=0, atol=0)
        assert mine[:, spare].isfinite().any(), "padding is written to the spare page"
