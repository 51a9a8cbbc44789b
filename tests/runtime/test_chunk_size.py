"""`itl_target_ms`: prefill chunks are small enough for the target latency of decoding requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.runtime.config import EngineConfig
from ramify.runtime.scheduler.plan import LEAST, ChunkSize
from ramify.runtime.scheduler.speculation.acceptance import StepCost
from tests.runtime.local import LocalScheduler

DECODING = 8
Machine = Callable[[int, int], float]
"""(decoding rows, prompt tokens) → seconds of a step."""


def plain(rows: int, prompt: int) -> float:
    return 0.006 + 0.0004 * rows + 0.00045 * prompt


def long_chunks_are_cheaper(rows: int, prompt: int) -> float:
    return 0.006 + 0.0004 * rows + (0.004 if prompt else 0.0) + 0.0003 * prompt


def settled(machine: Machine, target: float | None, most: int = 512) -> tuple[list[int], list[float]]:
    """(sizes of the chunks of 60 steps, seconds of these steps)."""
    cost = StepCost()
    for rows in [2, DECODING, 20] * 20:
        cost.learn(rows, machine(rows, 0))
    size = ChunkSize(most, target, cost)
    chunks: list[int] = []
    seconds: list[float] = []
    for _ in range(60):
        chunks.append(size.tokens_beside(DECODING))
        seconds.append(machine(DECODING, chunks[-1]))
        size.learn(DECODING, chunks[-1], seconds[-1])
    return chunks, seconds


@pytest.mark.parametrize("machine", [plain, long_chunks_are_cheaper])
@pytest.mark.parametrize("target", [0.02, 0.05, 0.1])
def test_steps_end_in_time_and_use_the_time(machine: Machine, target: float) -> None:
    chunks, seconds = settled(machine, target)
    assert max(seconds) <= 1.1 * target
    assert seconds[-1] >= 0.85 * target
    assert LEAST <= chunks[-1] < 512


def test_without_a_target_chunks_are_whole() -> None:
    assert set(settled(plain, None)[0]) == {512}


def test_prompts_go_on_where_the_target_cannot_be_met() -> None:
    assert settled(plain, 0.001)[0][-1] == LEAST
    assert settled(plain, 0.001, most=4)[0][-1] == 4


def test_a_chunk_is_never_longer_than_chunk_tokens() -> None:
    assert max(settled(plain, 10.0)[0]) == 512


def test_a_machine_that_slows_down_gets_shorter_chunks() -> None:
    cost = StepCost()
    for rows in [2, DECODING, 20] * 20:
        cost.learn(rows, plain(rows, 0))
    size = ChunkSize(512, 0.05, cost)
    for _ in range(40):
        size.learn(DECODING, chunk := size.tokens_beside(DECODING), plain(DECODING, chunk))
    before = size.tokens_beside(DECODING)
    for _ in range(40):
        size.learn(DECODING, chunk := size.tokens_beside(DECODING), 2 * plain(DECODING, chunk))
    assert size.tokens_beside(DECODING) < before
    assert 2 * plain(DECODING, size.tokens_beside(DECODING)) <= 1.1 * 0.05


class Clock:
    """The clock of a machine on which a step takes `plain` seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps_beside_a_prompt(model: Any, **options: Any) -> list[float]:
    """Seconds of the steps in which a prompt of 400 tokens is prefilled beside three decoding requests."""
    clock = Clock()
    local = LocalScheduler(model, clock=clock, num_pages=400, speculation=False, **options)
    run = local.scheduler.run_pass
    found: list[float] = []

    def timed(plan: Any) -> Any:
        rows = sum(one.tokens for one in plan if one.request.decoding)
        prompt = sum(one.tokens for one in plan) - rows
        clock.now += plain(rows, prompt)
        if rows and prompt:
            found.append(plain(rows, prompt))
        return run(plan)

    local.scheduler.run_pass = timed  # type: ignore[method-assign]
    for first in range(3):
        local.submit([first, 5, 6], max_tokens=200, ignore_eos=True)
    local.step(30)
    found.clear()
    rid = local.submit(list(range(200)) * 2, max_tokens=2, ignore_eos=True)
    while not local.results[rid].ended:
        local.step()
    return found


def test_the_scheduler_follows_the_target(tiny_folder: Path) -> None:
    without = steps_beside_a_prompt(tiny_folder)
    assert max(without) > 0.15
    found = steps_beside_a_prompt(tiny_folder, itl_target_ms=40)
    assert max(found) <= 1.1 * 0.04
    assert 400 * 0.00045 / 0.04 < len(found) < 16


def test_a_target_is_above_zero() -> None:
    with pytest.raises(ValueError, match="itl_target_ms is 0"):
        EngineConfig(itl_target_ms=0)
