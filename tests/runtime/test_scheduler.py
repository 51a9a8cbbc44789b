"""Admission, retraction, abort, limits, sampling options and log-probabilities of the scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ramify.engine_messages import Abort, FlushCache, GetSnapshot, GetStats
from ramify.errors import InvalidRequest, PromptTooLong
from tests.runtime.local import LocalScheduler
from tests.runtime.oracle import greedy


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def test_a_request_whose_end_raises_leaves_the_running_ones(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalScheduler(tiny_model)
    drafter = local.scheduler.drafter

    def ended(request: Any) -> None:
        if request.rid == bad:
            raise ValueError("a bug")

    monkeypatch.setattr(drafter, "ended", ended)
    bad, good = (local.submit(prompt_of(20, seed), max_tokens=4, ignore_eos=True) for seed in range(2))
    while local.scheduler.busy:
        local.step()
    assert [len(local.results[rid].ids) for rid in (bad, good)] == [4, 4]
    assert local.scheduler.stats().running == 0


@pytest.mark.parametrize("page_size", [16, 64])
def test_forks_share_every_token_in_small_and_large_pages(
    tiny_model: Any, tiny_oracle: Any, page_size: int
) -> None:
    local = LocalScheduler(tiny_model, page_size=page_size, num_pages=4096 // page_size)
    trunk = prompt_of(200)
    local.complete([trunk], max_tokens=0)
    for fork in (1, 15, 16, 17, 63, 64, 65, 127, 130, 192, 199):
        prompt = [*trunk[:fork], (trunk[fork] + 1) % 256, 7]
        result = local.complete([prompt], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
        assert result.usage is not None
        assert result.usage.cached_tokens == fork
        assert result.ids == greedy(tiny_oracle, prompt, 4).ids


def test_max_tokens_0_caches_the_prompt(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    prompt = prompt_of(50)
    for _ in range(2):  # the second one has nothing at all to compute
        result = local.complete([prompt], max_tokens=0)[0]
        assert result.ids == []
        assert result.finish is not None
        assert result.finish.reason == "length"
    assert local.scheduler.counters.computed_tokens == 50
    assert local.complete([[*prompt, 1]], max_tokens=1)[0].usage.cached_tokens == 50  # type: ignore[union-attr]


def test_a_request_that_fits_alone_always_runs(tiny_model: Any) -> None:
    """Forks inside pages make a path lock more pages than its tokens need."""
    local = LocalScheduler(tiny_model, page_size=8, num_pages=8)
    trunk = prompt_of(40)
    for fork in (3, 11, 19, 27, 35):
        # Each extends the one before from the middle of a page and leaves a superseded page behind.
        local.complete([trunk[:fork]], max_tokens=0)
        local.complete([[*trunk[:fork], 255]], max_tokens=0)
    result = local.complete([trunk], max_tokens=8, ignore_eos=True)[0]  # 48 tokens: all that is allowed
    assert len(result.ids) == 8


def test_longest_cached_prefix_goes_first(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=1)
    warm = prompt_of(200)
    local.complete([warm], max_tokens=1)
    cold = local.submit(prompt_of(200, seed=1), max_tokens=1)
    hot = local.submit([*warm, 7], max_tokens=1)
    local.step()
    assert local.results[hot].ended
    assert not local.results[cold].ended
    counters = local.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (200 + 201, 200), "the cold one has not begun"


def test_abort_while_waiting_and_while_running(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=1)
    running = local.submit(prompt_of(20), max_tokens=100, ignore_eos=True)
    waiting = local.submit(prompt_of(20, seed=1), max_tokens=100)
    local.step()
    local.step()
    for rid in (running, waiting, "unknown"):
        local.scheduler.receive(Abort(rid=rid))
    local.step()
    for rid in (running, waiting):
        finish = local.results[rid].finish
        assert finish is not None
        assert finish.reason == "abort"
    assert not local.scheduler.busy
    assert local.cache.counts().in_use == 0


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_tells_what_was_computed_and_no_more(tiny_model: Any, steps: int) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=16, max_running=1, policy="fcfs")
    local.complete([prompt_of(9)], max_tokens=0)
    before = local.scheduler.counters.computed_tokens
    running = local.submit([*prompt_of(9), *prompt_of(40, seed=1)], max_tokens=100, ignore_eos=True)
    waiting = local.submit(prompt_of(20, seed=2), max_tokens=100)
    local.step(steps)
    for rid in (running, waiting):
        local.scheduler.receive(Abort(rid=rid))
    local.step()
    found, never = local.results[running].usage, local.results[waiting].usage
    assert found is not None
    assert never is not None
    decoded = max(found.completion_tokens - 1, 0)  # the last token is sampled, not computed
    computed = found.prompt_tokens - found.cached_tokens + decoded
    assert computed == local.scheduler.counters.computed_tokens - before
    assert found.cached_tokens == (9 if steps else 0)
    assert (
        found.completion_tokens == len(local.results[running].ids) == local.scheduler.counters.output_tokens
    )
    assert (never.prompt_tokens, never.cached_tokens, never.completion_tokens) == (0, 0, 0)


def test_an_abort_after_a_retraction_tells_what_was_computed_before(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4, num_pages=20)
    rids = [local.submit(prompt_of(16, seed), max_tokens=40, ignore_eos=True) for seed in range(2)]
    while not local.scheduler.counters.retractions:
        local.step()
    retracted = next(rid for rid in rids if rid in {one.rid for one in local.scheduler.requests.waiting})
    local.scheduler.receive(Abort(rid=retracted))
    local.step()
    usage = local.results[retracted].usage
    assert usage is not None
    assert usage.prompt_tokens == 16
    assert usage.completion_tokens == len(local.results[retracted].ids) > 0


def test_a_silent_abort_says_nothing(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    rid = local.submit(prompt_of(20), max_tokens=100, ignore_eos=True)
    local.step()
    local.scheduler.receive(Abort(rid=rid, silent=True))
    local.step()
    assert not local.results[rid].ended
    assert not local.scheduler.busy


@pytest.mark.parametrize(
    ("ids", "sampling", "error", "field"),
    [
        ([1] * 600, {"max_tokens": 1}, PromptTooLong, "prompt"),
        ([1] * 500, {"max_tokens": 100}, PromptTooLong, "max_tokens"),
        ([1, 5000], {"max_tokens": 1}, InvalidRequest, "prompt"),
        ([1], {"max_tokens": 1, "stop_token_ids": (5000,)}, InvalidRequest, "stop_token_ids"),
        ([1], {"max_tokens": 1, "logit_bias": {5000: 1.0}}, InvalidRequest, "logit_bias"),
    ],
)
def test_refused(tiny_model: Any, ids: list[int], sampling: dict[str, Any], error: type, field: str) -> None:
    local = LocalScheduler(tiny_model)
    rid = local.submit(ids, **sampling)
    local.step()
    refusal = local.results[rid].error
    assert isinstance(refusal, error)
    assert refusal.field == field
    assert local.complete([[1, 2, 3]], max_tokens=2)[0].ended


@pytest.mark.parametrize(
    ("part", "message"), [("pass", "forward pass failed"), ("logits", "Choosing tokens failed")]
)
@pytest.mark.parametrize("step", [1, 2])
def test_a_failing_step_ends_its_requests_alone(tiny_model: Any, step: int, part: str, message: str) -> None:
    local = LocalScheduler(tiny_model)
    rid = local.submit(prompt_of(10), max_tokens=3)
    local.step(step - 1)
    with local.failing(part):
        local.step()
    assert message in str(local.results[rid].error)
    assert local.cache.counts().in_use == 0
    assert local.complete([prompt_of(10)], max_tokens=3)[0].finish is not None


def test_a_lost_device_ends_the_process(tiny_model: Any) -> None:
    """Only a new process can use the device again."""
    local = LocalScheduler(tiny_model)
    local.submit(prompt_of(10), max_tokens=3)
    with local.failing("pass"), local.failing("check"), pytest.raises(ZeroDivisionError):
        local.step()


def test_flush_and_stats(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    local.complete([prompt_of(50)], max_tokens=2)
    local.scheduler.receive(FlushCache(rid="f"))
    local.scheduler.receive(GetStats(rid="s"))
    flushed, stats = local.replies
    assert flushed.rid == "f"
    assert stats.stats is not None
    assert stats.stats.pages_free == stats.stats.pages_total == 256
    assert stats.stats.prompt_tokens == 50


def test_a_control_call_that_fails_is_answered_and_ends_nothing_else(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    running = local.submit(prompt_of(20), max_tokens=4, ignore_eos=True)
    local.step()
    local.scheduler.receive(GetSnapshot(rid="s", nodes=-1, programs=1))
    (failed,) = local.failures
    assert (failed.rid, "GetSnapshot failed" in failed.error.message) == ("s", True)
    local.run()
    assert len(local.results[running].ids) == 4


def test_a_flush_leaves_the_pages_of_running_requests(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    unused, used = prompt_of(40), prompt_of(40, seed=1)
    (expected,) = local.complete([used], max_tokens=8)
    local.complete([unused], max_tokens=1)
    rid = local.submit(used, max_tokens=8)
    local.step()
    local.scheduler.receive(FlushCache(rid="f"))
    assert local.replies[-1].rid == "f"
    assert local.cache.match(unused, "").length == 0
    assert local.cache.match(used, "").length > 0
    local.run()
    assert local.results[rid].ids == expected.ids


# --- ends ---------------------------------------------------------------------------------------


def test_stop_token_ids_and_ignore_eos(tiny_model: Any, tiny_oracle: Any) -> None:
    prompt = prompt_of(30)
    free = greedy(tiny_oracle, prompt, 20).ids
    stop = free[5]
    first = free.index(stop)
    local = LocalScheduler(tiny_model)
    result = local.complete([prompt], max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)[0]
    assert result.ids == free[: first + 1]
    assert result.finish is not None
    assert (result.finish.reason, result.finish.matched) == ("stop", stop)
    longer = local.complete(
        [prompt], max_tokens=20, min_tokens=first + 3, stop_token_ids=(stop,), ignore_eos=True
    )[0]
    assert len(longer.ids) >= first + 3
    assert stop not in longer.ids[: first + 2]


# --- sampling -----------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_in_any_batch(tiny_model: Any) -> None:
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "ignore_eos": True}
    prompt = prompt_of(30)
    alone = LocalScheduler(tiny_model).complete([prompt], **options)[0].ids
    crowd = LocalScheduler(tiny_model, chunk_tokens=9, page_size=4)
    for seed in range(6):
        crowd.submit(prompt_of(20, seed), temperature=1.3, max_tokens=9, top_p=0.9)
    rid = crowd.submit(prompt, **options)
    crowd.run()
    assert crowd.results[rid].ids == alone
    other = LocalScheduler(tiny_model).complete([prompt], **(options | {"seed": 12}))[0].ids
    assert other != alone


def test_logprobs_match_the_oracle(tiny_model: Any, tiny_oracle: Any) -> None:
    import torch

    prompt = prompt_of(40)
    local = LocalScheduler(tiny_model, chunk_tokens=16)
    local.complete([prompt], max_tokens=1)  # a cached prefix must not hide prompt log-probabilities
    result = local.complete([prompt], max_tokens=5, logprobs=3, prompt_logprobs_start=2, ignore_eos=True)[0]
    ids = prompt + result.ids
    with torch.inference_mode():
        table = torch.log_softmax(tiny_oracle(torch.tensor([ids])).logits[0], dim=-1)
    assert [entry[0] for entry in result.prompt_logprobs] == prompt[2:]
    for position, (token, value, top) in enumerate(result.prompt_logprobs + result.logprobs, start=2):
        assert token == ids[position]
        assert value == pytest.approx(float(table[position - 1, token]), abs=1e-3)
        best = torch.topk(table[position - 1], 3)
        assert [pair[1] for pair in top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert len(result.logprobs) == 5


def test_prompt_logprobs_from_the_start(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=16)
    prompt = prompt_of(40)
    result = local.complete([prompt], max_tokens=0, prompt_logprobs_start=0)[0]
    assert [entry[0] for entry in result.prompt_logprobs] == prompt
    assert result.prompt_logprobs[0][1] is None
    assert all(entry[1] is not None for entry in result.prompt_logprobs[1:])
