"""A draft model: it never changes outputs, a good one is used, and a bad one is stopped."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.engine_messages import Abort
from ramify.errors import UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.build import build_runners
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.model.loading.load import read_shape
from ramify.runtime.model.shape.config import StateShape
from ramify.runtime.scheduler.requests.limits import Tuning
from ramify.runtime.scheduler.speculation import drafter, model_drafts
from ramify.runtime.scheduler.speculation.acceptance import StepCost, StepDrafts
from ramify.runtime.scheduler.speculation.checks import check_draft
from tests.runtime.local import LocalScheduler
from tests.runtime.test_overlap import told
from tests.runtime.test_speculation import Twice
from tests.runtime.tiny import VOCAB, write_model, write_tiny

EAGER = Tuning(least_gain=0.0)
"""Tuning that counts every draft token as worth its row."""


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other weights and a larger vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, seed=1, vocab_size=VOCAB + 7)
    return folder


class Forks:
    """Requests with common prefixes, greedy and sampled, some at once and some later."""

    def __init__(self, model: Path, draft: Path | None, **options: Any) -> None:
        self.local = LocalScheduler(model, deterministic=True, speculation=True, draft=draft, **options)
        self.random = random.Random(0)
        self.trunk = [self.random.randrange(256) for _ in range(60)]
        self.counters = self.local.scheduler.counters

    def run(self, waves: int = 1) -> list[list[int]]:
        local, draw = self.local, self.random
        rids = []
        for wave in range(waves):
            for number in range(6):
                drawn = {"temperature": 1.0, "seed": 6 * wave + number} if number % 2 else {}
                ids = self.trunk[: draw.randrange(20, 60)] + [draw.randrange(256) for _ in range(3)]
                rids.append(local.submit(ids, max_tokens=40, ignore_eos=True, **drawn))
                local.step()
            local.scheduler.receive(Abort(rid=rids.pop(), silent=False))
            local.run()
        return [local.results[rid].ids for rid in rids]


@pytest.fixture
def no_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter.Drafter, "_look_up", lambda *_: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "perfect"),
    [
        ({"longest": 24}, True),
        ({"page_size": 4, "num_pages": 40, "chunk_tokens": 16, "longest": 36}, False),
    ],
    ids=["plain", "short-of-pages"],
)
def test_the_same_tokens(tiny_folder: Path, other_folder: Path, options: Any, perfect: bool) -> None:
    """Requests of every kind: grammars, forced text, log-probabilities, penalties, healing."""
    expected = Twice(tiny_folder, speculation=False, **options).run()
    load = Twice(
        tiny_folder, speculation=True, tuning=EAGER, draft=tiny_folder if perfect else other_folder, **options
    )
    assert [told(result) for result in load.run()] == [told(result) for result in expected]
    counters = load.local.scheduler.counters
    assert counters.accepted_tokens > counters.model_accepted_tokens, "prompt lookup drafts too"
    if perfect:
        assert counters.model_accepted_tokens > 20
    else:
        assert counters.model_draft_tokens > counters.model_accepted_tokens
        assert counters.retractions > 0
    assert load.local.cache.counts().in_use == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 4, "num_pages": 40, "chunk_tokens": 16, "waves": 2}, {"overlap": True}],
    ids=["plain", "short-of-pages", "overlap"],
)
def test_the_same_model_as_draft_model_is_always_right(
    tiny_folder: Path, no_lookups: None, options: Any
) -> None:
    """The draft model's KV matches the pages' tokens. KV rows that were never written are NaN."""
    options, waves = dict(options), options.get("waves", 1)
    options.pop("waves", None)
    without = Forks(tiny_folder, None, **options)
    expected = without.run(waves)
    forks = Forks(tiny_folder, tiny_folder, tuning=EAGER, **options)
    assert forks.run(waves) == expected
    counters = forks.counters
    assert counters.accepted_tokens == counters.draft_tokens == counters.model_draft_tokens > 60
    assert counters.steps < 0.8 * without.counters.steps
    if "num_pages" in options:
        assert counters.retractions > 0
    else:
        # Each prompt token that requests share is computed once by the draft model too.
        assert counters.draft_model_tokens < counters.computed_tokens


def test_usage_counts_draft_tokens_by_source(tiny_folder: Path, no_lookups: None) -> None:
    local = LocalScheduler(tiny_folder, deterministic=True, speculation=True, draft=tiny_folder, tuning=EAGER)
    (result,) = local.complete([[1, 2, 3]], max_tokens=30, ignore_eos=True)
    usage = result.usage
    assert usage is not None
    assert usage.model_accepted_tokens == usage.accepted_tokens == usage.draft_tokens > 10


def test_a_good_draft_model_is_used_where_its_time_pays(tiny_folder: Path, no_lookups: None) -> None:
    """Each call of the clock adds 1 ms: a pass of the draft model takes 1 ms, and a step takes several."""
    forks = Forks(tiny_folder, tiny_folder)
    forks.run()
    assert forks.counters.model_accepted_tokens > 50


def test_the_time_of_drafting_is_not_taken_for_that_of_steps(tiny_folder: Path, no_lookups: None) -> None:
    """By this clock, a step takes some milliseconds, and a pass of the draft model takes 1 s."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-3
        return now

    def take_a_second(batch: Any) -> None:
        nonlocal now
        now += 1.0

    local = LocalScheduler(tiny_folder, speculation=True, draft=tiny_folder, clock=clock, tuning=EAGER)
    local.draft_runner.before_pass = take_a_second
    local.complete([[1, 2, 3]], max_tokens=30, ignore_eos=True)
    assert local.scheduler.counters.draft_model_s > 5
    drafter = local.scheduler.drafter
    assert drafter.model is not None
    assert drafter.model.cost.seconds_of(1) > 0.5
    assert drafter.cost.seconds_of(1) < 0.1


def test_a_bad_draft_model_stops(tiny_folder: Path, other_folder: Path, no_lookups: None) -> None:
    forks = Forks(tiny_folder, other_folder)
    forks.run()
    counters = forks.counters
    before = dataclasses.replace(counters, clock=lambda: 0.0)
    assert 0 < before.model_draft_tokens < 100
    forks.run(waves=2)
    assert counters.model_draft_tokens - before.model_draft_tokens < 20
    share = (counters.draft_model_s - before.draft_model_s) / (counters.step_s - before.step_s)
    assert 0 < share < 2 * model_drafts.PROBE_SHARE, "it is probed, and no more"


def test_a_pass_must_promise_what_its_seconds_cost() -> None:
    cost = StepCost()
    step = StepDrafts(cost, rows=1, tokens=1.0, decoding=1, least_gain=1.5)
    assert step.price_of(0.001) == float("inf"), "no step has been measured"
    for _ in range(50):
        cost.learn(1, 0.010)
    assert step.price_of(0.002) == pytest.approx(1.5 * 0.2, rel=0.01)
    step.seconds = 0.010
    assert step.price_of(0.002) == pytest.approx(1.5 * 0.1, rel=0.01)


def test_pages_of_both_models_share_the_memory(tiny_model: Any) -> None:
    config = EngineConfig(dtype="float32", kv_memory_gb=0.01, attention_backend="torch")
    runner, draft = build_runners(config, lambda *_: tiny_model, lambda *_: tiny_model)
    assert draft is not None
    size = page_bytes(tiny_model.config, 16, torch.float32)
    assert runner.pool.num_pages == draft.pool.num_pages == int(0.01 * 2**30) // (2 * size)


def test_what_cannot_draft_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    shape, config = read_shape(tiny_folder), EngineConfig(draft_model="small")
    check_draft(config, shape, shape, tiny_folder, tiny_folder)
    short = dataclasses.replace(shape, context_length=100)
    with pytest.raises(UnsupportedField, match=r"'small' has a context of 100 tokens.* 512") as caught:
        check_draft(config, shape, short, tiny_folder, tiny_folder)
    assert caught.value.field == "draft_model"
    check_draft(dataclasses.replace(config, context_length=100), shape, short, tiny_folder, tiny_folder)
    states = StateShape(layers=1, channels=6, width=2, heads=1, key_dim=2, value_dim=2)
    hybrid = dataclasses.replace(shape, states=states)
    with pytest.raises(UnsupportedField, match="linear attention"):
        check_draft(config, shape, hybrid, tiny_folder, tiny_folder)
    other = write_tiny(tmp_path)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][1]["content"] = "<|other|>"
    path.write_text(json.dumps(content))
    with pytest.raises(UnsupportedField, match=r"token 257 is '<\|other\|>', and the model's is '<\|system"):
        check_draft(config, shape, shape, tiny_folder, other)
    with pytest.raises(ValueError, match="speculation is off"):
        EngineConfig(draft_model="small", speculation=False)
