"""Greedy output equals that of transformers, token for token, however a request is run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.runtime.local import LocalScheduler
from tests.runtime.oracle import Greedy, assert_same, greedy
from tests.runtime.tiny import END_ID

TOKENS = 24


def make_prompts() -> list[list[int]]:
    """Short and long prompts. Some share prefixes of odd lengths, one is a prefix of another, and two are
    equal."""
    rng = random.Random(7)
    base = [rng.randrange(256) for _ in range(120)]
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 2, 15, 16, 17, 63, 130)]
    prompts += [base[:length] + [rng.randrange(256) for _ in range(5)] for length in (1, 13, 40, 41, 100)]
    prompts += [base[:50], base[:51], base[:50]]
    return prompts


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def expected(tiny_oracle: Any) -> list[Greedy]:
    results = [greedy(tiny_oracle, prompt, TOKENS, eos=[END_ID]) for prompt in PROMPTS]
    assert sum(len(set(result.ids)) > 3 for result in results) > len(results) / 2, "the model says too little"
    return results


def check(expected: list[Greedy], local: LocalScheduler, **sampling: Any) -> None:
    results = local.complete(PROMPTS, max_tokens=TOKENS, **sampling)
    equal = [assert_same(want, have.ids) for want, have in zip(expected, results, strict=True)]
    assert sum(equal) >= len(equal) - 1, "ties are the exception"


@pytest.mark.slow
def test_alone(expected: list[Greedy], tiny_model: Any) -> None:
    for want, prompt in zip(expected, PROMPTS, strict=True):
        local = LocalScheduler(tiny_model)
        assert_same(want, local.complete([prompt], max_tokens=TOKENS)[0].ids)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 512])
def test_batched_and_chunked(
    expected: list[Greedy], tiny_model: Any, page_size: int, chunk_tokens: int
) -> None:
    pages = 2048 // page_size
    check(
        expected, LocalScheduler(tiny_model, page_size=page_size, chunk_tokens=chunk_tokens, num_pages=pages)
    )


@pytest.mark.parametrize(
    "option", [{"attention_backend": "torch"}, {"prefix_cache": "naive"}, {"policy": "fcfs"}]
)
def test_other_ways_to_run(expected: list[Greedy], tiny_model: Any, option: dict[str, Any]) -> None:
    check(expected, LocalScheduler(tiny_model, **option))


def test_prefix_cached(expected: list[Greedy], tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=8)
    check(expected, local)
    again = local.complete(PROMPTS, max_tokens=TOKENS)
    for want, have, prompt in zip(expected, again, PROMPTS, strict=True):
        assert_same(want, have.ids)
        assert have.usage is not None
        assert have.usage.cached_tokens == len(prompt) - 1, "all but the token that gives the logits"


def test_extended_from_its_own_output(tiny_oracle: Any, tiny_model: Any) -> None:
    """A second turn reuses the pages of the first turn, output included."""
    local = LocalScheduler(tiny_model, page_size=8)
    first = local.complete([PROMPTS[6]], max_tokens=10, ignore_eos=True)[0]
    prompt = PROMPTS[6] + first.ids + [1, 2, 3]
    second = local.complete([prompt], max_tokens=10, ignore_eos=True)[0]
    assert_same(greedy(tiny_oracle, prompt, 10), second.ids)
    assert second.usage is not None
    assert (
        second.usage.cached_tokens == len(PROMPTS[6]) + len(first.ids) - 1
    )  # the last one was never computed


def test_retracted_and_resumed(expected: list[Greedy], tiny_model: Any) -> None:
    """There are far fewer pages than all requests need together."""
    local = LocalScheduler(tiny_model, page_size=4, num_pages=64, prefix_cache="radix")
    check(expected, local)
    assert local.scheduler.counters.retractions > 0


def test_after_eviction(expected: list[Greedy], tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4, num_pages=50, max_running=2)
    for _ in range(2):
        check(expected, local)
    assert local.cache.counts().evicted > 0


def test_one_at_a_time_in_every_order(expected: list[Greedy], tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=5, num_pages=200, max_running=3, chunk_tokens=11)
    order = list(range(len(PROMPTS)))
    for seed in range(3):
        random.Random(seed).shuffle(order)
        results = local.complete([PROMPTS[i] for i in order], max_tokens=TOKENS)
        for i, result in zip(order, results, strict=True):
            assert_same(expected[i], result.ids)
