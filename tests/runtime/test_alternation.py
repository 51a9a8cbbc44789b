"""Speculation with overlap scheduling: a step drafts or is launched ahead, whichever is faster."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.runtime.scheduler.plan import LONGEST_HOLD, Alternation
from ramify.runtime.scheduler.requests.limits import TUNED, Tuning
from ramify.runtime.scheduler.speculation.acceptance import ON_CUDA, StepCost, rows_of
from tests.runtime.local import LocalScheduler

REPEATING = [5, 6, 7, 8] * 8


def share_of_drafting(tokens: float, seconds: float, steps: int = 4000) -> float:
    """The share of steps with drafts, if such a step gives `tokens` in `seconds`, and any other gives 1 in 1
    second."""
    chosen, counts = Alternation(), Counter[bool]()
    for _ in range(steps):
        counts[chosen.drafts] += 1
        chosen.learn(*((tokens, seconds) if chosen.drafts else (1.0, 1.0)))
        chosen.end_step()
    return counts[True] / steps


@pytest.mark.parametrize(
    ("tokens", "seconds", "drafts"), [(3.0, 1.5, True), (1.2, 1.5, False), (1.0, 1.0, True)]
)
def test_the_faster_one_goes_on(tokens: float, seconds: float, drafts: bool) -> None:
    share = share_of_drafting(tokens, seconds)
    assert (share > 0.95) if drafts else (share < 0.05)


def test_it_is_tried_again() -> None:
    """Drafts are tried again when text that did not repeat begins to repeat."""
    chosen = Alternation()
    for step in range(3 * LONGEST_HOLD):
        tokens = 3.0 if step > LONGEST_HOLD else 1.0
        chosen.learn(tokens if chosen.drafts else 1.0, 1.5 if chosen.drafts else 1.0)
        chosen.end_step()
        if step == LONGEST_HOLD:
            assert not chosen.best
    assert chosen.best


def test_the_next_step_is_known_before_this_one_launches() -> None:
    chosen, told = Alternation(), []
    for _ in range(TUNED.draft_steps + 3 * TUNED.trial_steps):
        told.append((chosen.drafts, chosen.next_drafts))
        chosen.end_step()
    assert [following for _, following in told[:-1]] == [drafts for drafts, _ in told[1:]]


def test_no_step_with_drafts_was_launched_ahead(tiny_folder: Path) -> None:
    """The tokens also equal those of plain steps."""
    tuning = Tuning(draft_steps=4, trial_steps=3)

    seen: Counter[str] = Counter()

    def answers(**options: Any) -> tuple[list[list[int]], LocalScheduler]:
        local = LocalScheduler(tiny_folder, deterministic=True, num_pages=400, tuning=tuning, **options)
        scheduler, found = local.scheduler, list[list[int]]()
        for _ in range(2):  # the outputs of the first round are drafted in the second
            rids = [local.submit(ids, max_tokens=40, ignore_eos=True) for ids in (REPEATING, [9, *REPEATING])]
            while scheduler.busy:
                launched, drafts = not scheduler.forward.overlap.idle, scheduler.counters.draft_tokens
                local.step()
                drafted = scheduler.counters.draft_tokens > drafts
                seen.update({"launched": launched, "drafted": drafted, "void": launched and drafted})
            found += [local.results[rid].ids for rid in rids]
        return found, local

    expected, _ = answers(overlap=False, speculation=False)
    found, local = answers(overlap=True, speculation=True)
    assert found == expected
    assert local.scheduler.counters.accepted_tokens > 0
    assert seen["launched"] > 0
    assert seen["drafted"] > 0
    assert seen["void"] == 0


def test_rows_are_cheap_on_a_gpu() -> None:
    """The assumed cost before any measurement: 3.7 ms for the weights, 27 us for a row."""
    cost = StepCost(rows_of(torch.device("cuda")))
    assert cost.device is ON_CUDA
    cost.learn(1, 3.7e-3)
    assert 20e-6 < cost.seconds_of(2) - cost.seconds_of(1) < 40e-6
    cost.learn(1024, 30e-3)
    assert cost.seconds_of(1024) > 20e-3, "a step of 1,024 decodes is learned from"
