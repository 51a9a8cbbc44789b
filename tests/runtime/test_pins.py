"""Pins on a scheduler with few pages: what they keep, where they end, and what gives way."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ramify.cache_contents import CacheContents
from ramify.engine_messages import Abort, EndProgram, GetCache, ReleaseHold
from ramify.messages import ProgramHint
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_scheduler import prompt_of

PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def local(tiny_model: Any) -> LocalScheduler:
    return LocalScheduler(tiny_model, page_size=PAGE, num_pages=32)


def pin(local: LocalScheduler, prompt: list[int], owner: str = "pin", **hint: Any) -> Result:
    """Pin the tokens of `prompt`."""
    made = ProgramHint(program=owner, name="notes", session=True, pinned=True, **{"lease_s": 1e6} | hint)
    rid = local.submit(prompt, max_tokens=0, hint=made)
    local.run()
    return local.results[rid]


def cached(local: LocalScheduler, prompt: list[int]) -> int:
    """The cached tokens of `prompt`, without changing the tree."""
    return local.cache.match(prompt, "").length


def contents(local: LocalScheduler, **options: Any) -> CacheContents:
    local.scheduler.receive(GetCache(rid="look", **{"most": 10} | options))
    found = local.replies[-1].cache
    assert found is not None
    return found


def fill(local: LocalScheduler, seed: int = 1) -> None:
    """Run requests that need more pages than the engine has, several at a time."""
    results = local.complete([prompt_of(24, 100 * seed + number) for number in range(12)], max_tokens=4)
    assert all(result.error is None for result in results)


def test_a_pin_stays_where_leases_go(local: LocalScheduler) -> None:
    pinned, leased = prompt_of(40), prompt_of(40, 1)
    assert pin(local, pinned).error is None
    local.submit(leased, max_tokens=0, hint=ProgramHint(program="p", lease_s=1e6))
    local.run()
    fill(local)
    assert (cached(local, pinned), cached(local, leased) < 40) == (40, True)
    local.scheduler.receive(EndProgram(program="pin"))
    fill(local, 2)
    assert cached(local, pinned) < 40


def test_a_pin_ends_by_its_time(tiny_model: Any) -> None:
    clock = Clock()
    local = LocalScheduler(tiny_model, page_size=PAGE, num_pages=32, clock=clock)
    prompt = prompt_of(40)
    pin(local, prompt, lease_s=60.0)
    fill(local)
    assert cached(local, prompt) == 40
    clock.now = 60.0
    fill(local, 2)
    assert cached(local, prompt) < 40


def test_pins_above_the_cap_are_refused_with_the_numbers(local: LocalScheduler) -> None:
    assert pin(local, prompt_of(48), "a").error is None  # 12 of 16 pages
    error = pin(local, prompt_of(20, 1), "b").error
    assert error is not None
    assert error.field == "hint.pinned"
    assert "needs 5 KV pages of 4 tokens; pins hold 12 of the 16" in error.message
    assert "max_pinned_share=0.5 of 32" in error.message
    assert pin(local, [*prompt_of(48), *prompt_of(12, 2)], "c").error is None, "common pages count once"
    assert contents(local).pages_pinned == 15
    assert pin(local, prompt_of(16, 1), "d").error is not None
    local.scheduler.receive(ReleaseHold(rid="", owner="c"))
    assert local.replies[-1].released == 1
    assert pin(local, prompt_of(16, 1), "d").error is None
    assert cached(local, prompt_of(48)) == 48


def test_pins_that_are_under_way_count(local: LocalScheduler) -> None:
    made = [ProgramHint(program=owner, lease_s=60.0, pinned=True) for owner in ("a", "b")]
    rids = [local.submit(prompt_of(40, seed), max_tokens=0, hint=made[seed]) for seed in range(2)]
    local.run()
    first, second = (local.results[rid].error for rid in rids)
    assert first is None
    assert second is not None
    assert "pins hold 10 of the 16" in second.message


def test_a_key_pins_no_more_than_its_share(local: LocalScheduler) -> None:
    def pin_of(key: str, seed: int, tokens: int, share: float = 0.25) -> Any:
        made = ProgramHint(program=f"{key}/{seed}", lease_s=60.0, pinned=True, max_pinned_share=share)
        rid = local.submit(prompt_of(tokens, seed), max_tokens=0, hint=made, scope=key, key=key)
        local.run()
        return local.results[rid].error

    assert pin_of("ada", 1, 24) is None  # 6 of 8 pages
    error = pin_of("ada", 2, 12)
    assert "needs 3 KV pages of 4 tokens; pins of the key 'ada' hold 6 of the 8" in error.message
    assert "max_pinned_share=0.25 of 32" in error.message
    assert pin_of("ada", 3, 8) is None
    assert pin_of("bob", 4, 32) is None, "the other half is left"
    assert "pins hold 16 of the 16" in pin_of("eve", 5, 4, 1.0).message


def test_the_holds_of_one_owner(local: LocalScheduler) -> None:
    for owner in ("ada/1", "ada/2", "bob/1"):
        pin(local, prompt_of(8, len(owner) + ord(owner[-1]) + ord(owner[0])), owner)
    local.complete([prompt_of(9, 2)], max_tokens=1)
    found = contents(local, owners="ada/")
    assert {one.owner for one in found.holds} == {"ada/1", "ada/2"}
    assert (found.unheld, found.more_holds) == ((), 0)
    assert contents(local, owners="ada/", most=1).more_holds == 1
    assert contents(local).unheld != ()


def test_no_pins_without_a_share_and_without_a_prefix_cache(tiny_model: Any) -> None:
    none = LocalScheduler(tiny_model, page_size=PAGE, num_pages=32, max_pinned_share=0.0)
    naive = LocalScheduler(tiny_model, page_size=PAGE, num_pages=32, prefix_cache="naive")
    for local, text in ((none, "of the 0 that"), (naive, "prefix_cache is 'naive'")):
        error = pin(local, prompt_of(8)).error
        assert error is not None
        assert text in error.message


def test_a_request_that_fits_only_alone_runs_and_pins_give_way(
    local: LocalScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts and outputs up to the limit of the engine run as without pins; the pin that ends first loses
    its place, and no more of it than is missing."""
    soon, late = prompt_of(20, 1), prompt_of(24, 2)
    pin(local, soon, "soon", lease_s=100.0)
    pin(local, late, "late", lease_s=200.0)
    with caplog.at_level(logging.WARNING, "ramify"):
        (grown,) = local.complete([prompt_of(60)], max_tokens=40, ignore_eos=True)  # 25 of 32 pages
    assert (grown.error, len(grown.ids)) == (None, 40)
    assert [record.args[0] for record in caplog.records if record.args] == ["soon"]
    assert local.scheduler.stats().retractions == 0, "nothing is computed again"
    assert cached(local, late) == 24
    kinds = {hold.owner: hold.kind for hold in contents(local).holds}
    assert kinds["late"] == "pin"
    assert kinds.get("soon", "session") == "session"
    (whole,) = local.complete([prompt_of(118, 3)], max_tokens=2, ignore_eos=True)  # 30 of 32 pages
    assert (whole.error, len(whole.ids)) == (None, 2)
    assert contents(local).pages_pinned == 0
    assert (
        grown.ids
        == LocalScheduler(local.runner.model, page_size=PAGE, num_pages=32)
        .complete([prompt_of(60)], max_tokens=40, ignore_eos=True)[0]
        .ids
    )


def test_an_aborted_pin_holds_nothing(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=PAGE, num_pages=64, chunk_tokens=16)
    rid = local.submit(
        prompt_of(100), max_tokens=0, hint=ProgramHint(program="pin", lease_s=60.0, pinned=True)
    )
    local.step()
    assert 0 < local.scheduler.requests.open[rid].computed_len < 100
    local.scheduler.receive(Abort(rid=rid))
    local.run()
    assert contents(local).pages_pinned == 0


def test_what_is_held_by_whom_and_for_how_long(local: LocalScheduler) -> None:
    pin(local, prompt_of(30), client="me")
    told = ProgramHint(program="agent", name="agent", lease_s=60.0, branch="b", next_use="soon")
    local.submit([*prompt_of(30), *prompt_of(10, 1)], max_tokens=1, hint=told, scope="")
    local.submit(prompt_of(9, 2), max_tokens=1, scope="secret")
    local.run()
    found = contents(local, ids=True)
    pinned, agent = found.holds
    assert (pinned.owner, pinned.kind, pinned.name, pinned.client) == ("pin", "pin", "notes", "me")
    assert (pinned.tokens, pinned.pages, pinned.prefixes, pinned.ids[-1]) == (30, 8, 1, prompt_of(30)[-1])
    assert 0.99e6 < pinned.seconds_left <= 1e6
    assert (agent.owner, agent.kind, agent.tokens, agent.pages) == ("agent", "program", 40, 11)
    assert agent.needed_in is not None
    assert 59 < agent.seconds_left <= 60
    (free,) = found.unheld
    assert (free.tokens, free.pages, len(free.ids)) == (9, 3, 9)
    assert free.scope not in ("", "secret")
    pages = found.pages_free + found.pages_evictable + found.pages_leased + found.pages_in_use
    assert (pages, found.pages_pinned, found.pages_pinnable) == (32, 8, 16)
    assert found.page_bytes == local.runner.pool.page_bytes
    few = contents(local, most=1)
    assert (len(few.holds), few.more_holds, few.holds[0].ids) == (1, 1, ())
