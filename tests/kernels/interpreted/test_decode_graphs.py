"""Decoding steps padded to a ladder of sizes, as CUDA graphs replay them, in the interpreter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.kernels.registry import ops
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.decode_graphs import DecodeGraphs
from ramify.runtime.executor.kv_pool import KvPool, StatePool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.scheduler.requests.limits import Tuning
from ramify.runtime.scheduler.speculation import drafter
from tests.model.checkpoints import expected, save
from tests.model.hybrids import DENSE, build_hybrid
from tests.runtime.head_files import write_eagle3, write_glm
from tests.runtime.local import LocalScheduler
from tests.runtime.tiny import write_tiny

PAGE = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    return load_model(ModelFiles(name="tiny", weights=folder, tokenizer=folder), dtype=torch.float32)


def runner_of(model: Any, *, poison: float = float("nan")) -> Runner:
    pool = KvPool(model.config, num_pages=12, page_size=PAGE, dtype=torch.float32)
    pool.k.fill_(poison)
    pool.v.fill_(poison)
    return Runner(model, pool, ops("triton"))


def test_padding_touches_no_live_page(model: Any) -> None:
    """Three decodes in a step of four: the pool changes where the three write, and in the spare page."""
    flat, padded = runner_of(model), runner_of(model)
    padded.capture_graphs([1, 4], max_pages=5)
    ids = torch.randint(256, (30,)).int().numpy()
    prompts = [(11, (3, 7)), (8, (5, 2)), (16, (9, 0, 4))]
    prefill = pack([Extension(ids, 0, stop, pages) for stop, pages in prompts], PAGE)
    decode = pack([Extension(ids, stop, stop + 1, pages) for stop, pages in prompts], PAGE)
    for runner in (flat, padded):
        runner.forward(prefill)
    before = padded.pool.k.clone()
    expected, found = flat.forward(decode), padded.forward(decode)
    torch.testing.assert_close(found, expected)
    spare = padded.pool.padding_page
    changed = ~torch.isclose(padded.pool.k, before, rtol=0, atol=0, equal_nan=True)
    places = {(page, row) for _, page, _, row, _ in changed.nonzero().tolist()}
    assert places == {(7, 3), (2, 0), (4, 0), (spare, 0)}
    for mine, theirs in ((padded.pool.k, flat.pool.k), (padded.pool.v, flat.pool.v)):
        torch.testing.assert_close(mine[:, :spare], theirs[:, :spare], equal_nan=True)
    assert theirs[:, spare].isnan().all(), "without padding nobody writes there"


def test_padding_touches_no_live_state(tmp_path: Path) -> None:
    """Two decodes of a hybrid in a step of three, after prefills in one batch."""
    small = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 16}
    small |= {"num_hidden_layers": 2, "full_attention_interval": 2}
    reference = build_hybrid(dataclasses.replace(DENSE, options=DENSE.options | small))
    hybrid = load_model(save(reference, tmp_path), dtype=torch.float32)
    runners = []
    for _ in range(2):
        pool = KvPool(hybrid.config, num_pages=6, page_size=PAGE, dtype=torch.float32)
        states = StatePool(hybrid.config.states, num_slots=4)
        for tensor in (pool.k, pool.v, states.conv, states.recurrent):
            tensor.fill_(torch.nan)
        runners.append(Runner(hybrid, pool, ops("triton"), states=states))
    padded = runners[1]
    padded.capture_graphs([3], max_pages=3)
    ids = torch.randint(256, (12,)).int()
    prompts = [(3, (3,), 2), (5, (5,), 0)]
    for runner in runners:
        extensions = [Extension(ids.numpy(), 0, stop, pages, slot) for stop, pages, slot in prompts]
        runner.forward(pack(extensions, PAGE))
    decode = [Extension(ids.numpy(), stop, stop + 1, pages, slot) for stop, pages, slot in prompts]
    logits = [runner.logits(runner.forward(pack(decode, PAGE))) for runner in runners]
    torch.testing.assert_close(logits[1], logits[0])
    for row, (stop, _, _) in enumerate(prompts):
        wanted = expected(reference, ids[: stop + 1].long())[-1]
        torch.testing.assert_close(logits[1][row], wanted, atol=2e-4, rtol=0)
    for slot in (0, 2):
        for name in ("conv", "recurrent"):
            mine, theirs = (getattr(runner.states, name)[:, slot] for runner in runners)
            torch.testing.assert_close(mine, theirs)
    assert padded.states is not None
    assert padded.states.recurrent[:, [1, 3]].isnan().all(), "slots without a request stay as they were"


def test_more_than_fit_run_without_padding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    replay = DecodeGraphs.replay

    def counted(self: DecodeGraphs, batch: Any) -> torch.Tensor | None:
        hidden = replay(self, batch)
        runs.append(hidden is not None)
        return hidden

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    prompts = [torch.randint(256, (length,)).tolist() for length in (9, 21, 3)]

    def tokens(count: int, **given: Any) -> list[list[int]]:
        local = LocalScheduler(model, attention_backend="triton", page_size=PAGE, num_pages=64, **given)
        results = local.complete(prompts[:count], max_tokens=3, ignore_eos=True)
        assert [result.error for result in results] == [None] * count
        return [result.ids for result in results]

    expected = tokens(3)
    assert not runs
    assert tokens(3, graphs=[1, 2]) == expected
    assert runs
    assert not any(runs), "three are too many"
    assert tokens(1, graphs=[1, 2]) == expected[:1]
    assert tokens(2, graphs=[2]) == expected[:2]
    assert runs.count(True) == 4, "after the prefills two steps each"


def test_a_draft_model_passes_through_its_own_graphs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of two requests, of one token each, are padded to four."""
    monkeypatch.setattr(drafter.Drafter, "_look_up", lambda *_: False)
    options = {"attention_backend": "triton", "context_length": 64, "num_pages": 16, "page_size": PAGE}

    def answers(**more: Any) -> tuple[list[list[int]], LocalScheduler]:
        local = LocalScheduler(model, **options, **more)
        found = local.complete([[1, 2, 3], [4, 5]], max_tokens=8, ignore_eos=True)
        return [result.ids for result in found], local

    expected, _ = answers()
    found, local = answers(graphs=[4], draft=model, speculation=True, tuning=Tuning(least_gain=0.0))
    assert found == expected
    assert local.scheduler.counters.model_accepted_tokens > 4


@pytest.mark.parametrize("kind", ["glm", "eagle3"])
def test_a_draft_head_beside_graphs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's graphs return the inputs of captured layers too."""
    monkeypatch.setattr(drafter.Drafter, "_look_up", lambda *_: False)
    model = head = tmp_path / "model"
    if kind == "glm":
        write_glm(model)
    else:
        head = tmp_path / "head"
        write_eagle3(model, head)
    options = {"attention_backend": "triton", "context_length": 64, "num_pages": 16, "page_size": PAGE}
    options |= {"speculation": True, "tuning": Tuning(least_gain=0.0)}
    prompts = [[1, 2, 3], [4, 5]]
    found = []
    for more in ({}, {"graphs": [4]}):
        local = LocalScheduler(model, draft=head, **options, **more)
        results = local.complete(prompts, max_tokens=4, ignore_eos=True)
        counters = local.scheduler.counters
        found.append(([result.ids for result in results], counters.draft_tokens, counters.accepted_tokens))
    alone = LocalScheduler(model, attention_backend="triton", num_pages=16, page_size=PAGE)
    assert found[0] == found[1]
    assert found[0][0] == [one.ids for one in alone.complete(prompts, max_tokens=4, ignore_eos=True)]
    assert found[0][1] > 2
