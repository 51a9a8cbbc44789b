"""Embeddings: pooled hidden states equal those of transformers, whatever else runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Generate, Pooling
from ramify.runtime.frontend.embeddings import pooling_for, vector_of
from ramify.runtime.model.pooling import pooling_of
from ramify.runtime.processes.choice_tokens import check_pooling
from ramify.runtime.scheduler.requests.parts import PooledStates
from ramify.sampling_params import SamplingParams
from tests.fleet.fakes import model_info
from tests.runtime.local import LocalScheduler
from tests.runtime.test_scheduler import prompt_of

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def pooled(oracle: Any, ids: Sequence[int], pooling: Pooling) -> np.ndarray:
    """The last hidden states of transformers, pooled as in sentence-transformers."""
    with torch.inference_mode():
        states = oracle.model(torch.tensor([list(ids)])).last_hidden_state[0].double()
    return (states[-1] if pooling == "last" else states.mean(0)).float().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
def test_equal_to_transformers_whatever_runs_beside(
    tiny_model: Any, tiny_oracle: Any, pooling: Pooling
) -> None:
    """Prompts share prefixes, are prefilled in chunks and retracted, and run beside decoding requests."""
    local = LocalScheduler(tiny_model, page_size=4, num_pages=40, chunk_tokens=16)
    trunk = prompt_of(30, 1)
    prompts = [trunk, trunk, trunk + prompt_of(20, 2), trunk[:29], prompt_of(1, 3), trunk + prompt_of(40, 4)]
    for _ in range(2):  # the second time from the tree
        decoding = [local.submit(prompt_of(25, seed), max_tokens=30, ignore_eos=True) for seed in range(4)]
        rids = [local.submit(prompt, pooling=pooling, max_tokens=0) for prompt in prompts]
        local.run()
        assert all(local.results[rid].error is None for rid in (*decoding, *rids))
        for rid, prompt in zip(rids, prompts, strict=True):
            found = np.frombuffer(local.results[rid].embedding, "<f4")
            np.testing.assert_allclose(found, pooled(tiny_oracle, prompt, pooling), atol=2e-5)
            assert local.results[rid].ids == []
    assert local.scheduler.counters.retractions > 0


@pytest.mark.slow
def test_last_states_share_prefixes(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4)
    prompt = prompt_of(50)
    for pooling, cached in (("last", 49), ("mean", 0)):
        local.complete([prompt])
        (result,) = local.complete([prompt], pooling=pooling, max_tokens=0)
        assert result.usage is not None
        assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (50, cached)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_that_are_computed_again_count_once(pooling: Pooling) -> None:
    states = torch.randn(20, 8)
    whole, parts = PooledStates(pooling), PooledStates(pooling)
    whole.take(states, 0)
    for start, stop in ((0, 7), (3, 12), (0, 12), (12, 20)):
        parts.take(states[start:stop], start)
        assert parts.reusable >= stop or pooling == "mean"
    assert parts.embedding() == whole.embedding()
    assert len(whole.embedding()) == 4 * 8


def test_vectors_are_cut_and_then_normalised() -> None:
    raw = np.array([3, 4, 12], "<f4").tobytes()
    assert vector_of(raw, None, normalize=False).tolist() == [3, 4, 12]
    assert vector_of(raw, 2, normalize=True).tolist() == pytest.approx([0.6, 0.8])
    assert vector_of(bytes(8), None, normalize=True).tolist() == [0, 0]
    for wrong in (0, -1, 4):
        with pytest.raises(InvalidRequest, match="have 3"):
            vector_of(raw, wrong, normalize=True)


@pytest.mark.parametrize(
    ("modules", "config", "expected"),
    [
        (None, {}, "last"),
        (
            ["Transformer", "Pooling", "Normalize"],
            {"pooling_mode_lasttoken": True, "include_prompt": True},
            "last",
        ),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            "mean",
        ),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, "mean"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "cls_token"),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "Dense"),
    ],
)
def test_the_models_own_pooling(
    tmp_path: Path, modules: list[str] | None, config: dict[str, Any], expected: str
) -> None:
    if modules is not None:
        entries = [
            {"type": f"sentence_transformers.models.{name}", "path": "1_Pooling" if name == "Pooling" else ""}
            for name in modules
        ]
        (tmp_path / "modules.json").write_text(json.dumps(entries))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 8, **config})
        )
    assert pooling_of(tmp_path) == expected


def test_a_pooling_that_is_not_served_is_refused_by_name() -> None:
    info = model_info(pooling="cls_token")
    assert pooling_for(info, "mean") == "mean"
    with pytest.raises(UnsupportedField, match="cls_token"):
        pooling_for(info, None)
    with pytest.raises(InvalidRequest, match="'last' or 'mean'"):
        pooling_for(info, "max")


def test_options_of_generations_are_refused() -> None:
    check_pooling(Generate(rid="a", pooling="last", sampling=SamplingParams(max_tokens=0)))
    with pytest.raises(UnsupportedField, match="max_tokens"):
        check_pooling(Generate(rid="a", pooling="last"))
