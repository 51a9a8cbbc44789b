"""The memory of KV pages: it grows with requests and goes back to the system, and no answer changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ramify.errors import Overloaded
from ramify.messages import ProgramHint
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor import memory
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.kv_pool import HUGE, KvPool
from ramify.runtime.executor.memory import COW_PAGES, LEAST_PAGES
from ramify.runtime.host_memory import HostMemory
from ramify.runtime.scheduler.residency import CHECK_S, LEAST_FREE, RETAIN_S, RETRY_S, Residency
from tests.runtime.local import LocalScheduler

KEPT, PAGES = 6, 40
TOTAL = 1 << 30
LONG = [1 + index % 50 for index in range(300)]
"""A prompt of 19 pages."""


class Engine:
    """A scheduler with 40 pages, 6 of them kept, on a machine whose free memory the test sets, in pages."""

    def __init__(self, model: Any) -> None:
        self.now = 0.0
        self.room = PAGES
        self.local = local = LocalScheduler(model, num_pages=PAGES)
        self.cache, self.pool = local.cache, local.runner.pool
        self.pool.return_memory = self._return  # type: ignore[method-assign]
        residency = Residency(self.cache, [self.pool], KEPT, self._memory, lambda: self.now)
        residency._together = 2
        local.scheduler.residency = residency

    def complete(self, *prompts: Sequence[int], **options: Any) -> list[Any]:
        return self.local.complete(prompts, max_tokens=4, ignore_eos=True, **options)

    def after(self, seconds: float) -> None:
        """Let `seconds` pass, in which an idle engine checks its memory as the loop of the process does."""
        wait = self.local.scheduler.wait_s
        assert wait == (CHECK_S if self.cache.touched > LEAST_PAGES else None)
        self.now += seconds
        if wait is not None:
            self.local.step()

    def _memory(self) -> HostMemory:
        free = int(LEAST_FREE * TOTAL) + self.room * self.pool.page_bytes
        return HostMemory(TOTAL, free, free)

    def _return(self, pages: Sequence[int]) -> None:
        assert not self.cache._private.intersection(pages)
        for part in (self.pool.k, self.pool.v):
            part[:, list(pages)] = float("nan")


@pytest.fixture
def engine(tiny_model: Any) -> Engine:
    return Engine(tiny_model)


@pytest.fixture(scope="module")
def answer(tiny_model: Any) -> Any:
    return Engine(tiny_model).complete(LONG)[0].ids


def test_a_long_prompt_uses_more_than_is_kept_and_stays_for_its_next_turn(
    engine: Engine, answer: Any
) -> None:
    for cached in (0, 299):
        (result,) = engine.complete(LONG)
        assert (result.ids, result.usage.cached_tokens) == (answer, cached)
        engine.after(RETAIN_S - 1)
    assert engine.cache.touched > KEPT


def test_pages_that_no_request_uses_are_returned_down_to_what_is_kept(engine: Engine, answer: Any) -> None:
    engine.complete(LONG)
    engine.after(RETAIN_S)
    assert engine.cache.touched > KEPT, "used after the last mark"
    engine.after(RETAIN_S)
    assert engine.cache.touched == KEPT
    engine.after(RETAIN_S)
    (result,) = engine.complete(LONG)
    assert (result.ids, result.usage.cached_tokens) == (answer, KEPT * 16), "the beginning is still there"


def test_a_prefix_in_use_is_not_returned(engine: Engine) -> None:
    engine.complete(LONG)
    for _ in range(4):
        engine.after(RETAIN_S)
        (result,) = engine.complete(LONG)
        assert result.usage.cached_tokens == len(LONG) - 1


def test_where_memory_is_short_cached_pages_are_returned_and_answers_stay(
    engine: Engine, answer: Any
) -> None:
    engine.complete(LONG)
    touched = engine.cache.touched
    engine.room = -7
    engine.after(CHECK_S)
    assert engine.cache.touched == engine.cache.limit - 2 == touched - 7 - 2
    engine.room = 0
    engine.complete([7] * 40)
    assert engine.cache.touched == touched - 7, "the new request touched two pages, and evicted others"
    engine.room = PAGES
    engine.after(CHECK_S)
    (result,) = engine.complete(LONG)
    assert result.ids == answer
    assert engine.cache.touched > touched - 7


def test_requests_that_memory_cannot_hold_together_run_one_after_the_other(
    engine: Engine, answer: Any
) -> None:
    """Each takes 19 pages; there are 25."""
    engine.room = 25
    other = LONG[::-1]
    results = engine.complete(LONG, other)
    assert results[0].ids == answer
    assert results[1].ids == Engine(engine.local.runner.model).complete(other)[0].ids


def test_a_running_request_is_retracted_when_its_memory_is_needed(engine: Engine, answer: Any) -> None:
    rids = [engine.local.submit(prompt, max_tokens=4, ignore_eos=True) for prompt in (LONG, LONG[::-1])]
    engine.local.step()
    engine.room, engine.now = -14, engine.now + CHECK_S
    engine.local.step()
    assert engine.cache.limit < 2 * 19
    engine.local.run()
    assert engine.local.results[rids[0]].ids == answer
    assert engine.local.results[rids[1]].finish.reason == "length"


def test_a_request_that_would_not_fit_alone_fails_with_the_numbers_and_others_go_on(
    engine: Engine, answer: Any
) -> None:
    """At most 3 pages, one of them for the tokens: no request gets more where nothing is free."""
    engine.room, engine.now = -1, 1.0
    long, short = engine.complete(LONG, [3] * 10)
    assert "holds KV for 16 tokens now, and the request has 300" in str(long.error)
    assert (type(long.error), long.error.retry_after) == (Overloaded, RETRY_S)
    assert short.finish.reason == "length"
    engine.room = PAGES
    engine.now += CHECK_S
    (result,) = engine.complete(LONG)
    assert result.ids == answer


def test_a_running_request_keeps_its_pages_where_nothing_is_free(engine: Engine, answer: Any) -> None:
    """Its 19 pages are 8 more than the memory would hold now; the last of them has room for its tokens."""
    rid = engine.local.submit(LONG, max_tokens=4, ignore_eos=True)
    engine.local.step()
    engine.room, engine.now = -8, engine.now + CHECK_S
    engine.local.run()
    assert engine.cache.limit < 19
    assert engine.local.results[rid].ids == answer


@pytest.mark.parametrize(("room", "fits"), [(8, True), (7, False), (-9, False)])
def test_a_pin_gives_way_and_refuses_no_request_that_fits_without_it(
    engine: Engine, answer: Any, room: int, fits: bool
) -> None:
    """The pin has 13 pages and the prompt needs 21 at most: 13 and 8 more."""
    hint = ProgramHint(program="pin", session=True, pinned=True, lease_s=1e6)
    engine.local.submit([7] * 200, max_tokens=0, hint=hint)
    engine.local.run()
    engine.room, engine.now = room, CHECK_S
    (long,) = engine.complete(LONG)
    assert (long.error is None, long.ids) == ((True, answer) if fits else (False, []))
    assert engine.cache.counts().pinned == (0 if fits else 13)


def test_a_prompt_that_the_kept_pages_cannot_hold_fits_by_default(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    config = EngineConfig(dtype="float32", device="cpu")
    page = KvPool(tiny_model.config, num_pages=1, page_size=16, dtype=torch.float32).page_bytes
    monkeypatch.setattr(memory, "CPU_BYTES", KEPT * page)
    budget = build_runner(config, lambda *_: tiny_model).budget
    assert budget is not None
    assert budget.kept == KEPT < -(-len(LONG) // 16) < budget.pages - COW_PAGES
    assert budget.pages * 16 >= tiny_model.config.context_length


def test_memory_is_returned_in_whole_huge_pages_of_neighbours(tiny_model: Any) -> None:
    """The part of a page in one layer takes 256 KiB, and that of 16 neighbours 4 MiB: at least one huge page
    lies inside of them, wherever the tensor begins."""
    pool = KvPool(tiny_model.config, num_pages=64, page_size=2048, dtype=torch.float32)
    size = pool.k.stride(1) * 4
    assert 16 * size >= 2 * HUGE
    pool.k.fill_(1)
    pool.v.fill_(2)
    pool.return_memory([63, *range(8, 24), 40])
    for part, value in ((pool.k, 1), (pool.v, 2)):
        kept = part.flatten(2).eq(value).all(-1)
        for layer in kept:
            returned = (~layer).nonzero().flatten().tolist()
            assert set(returned) <= set(range(8, 24))
            assert len(returned) >= HUGE // size - 1
            assert all(not part[0, page].any() for page in returned[1:-1])
