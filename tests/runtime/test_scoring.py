"""Choices scored in one request: the same numbers as one request for each choice, and the least work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ramify.engine_messages import Abort, ChoiceTokens
from ramify.errors import EngineError, PromptTooLong
from ramify.messages import ProgramHint
from ramify.runtime.scheduler import results
from ramify.runtime.scheduler.requests.sampling import LOGPROB_ROWS
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_program_pages import Told
from tests.runtime.test_scheduler import prompt_of

pytestmark = pytest.mark.slow

Ids = Sequence[int]


def behind(prompt: Ids, *choices: Ids) -> list[ChoiceTokens]:
    return [ChoiceTokens(shared=len(prompt), ids=tuple(ids)) for ids in choices]


def one_by_one(local: LocalScheduler, ids: Ids, start: int) -> list[float | None]:
    """Log-probabilities of `ids` from `start` on, computed by a request of their own."""
    rid = local.submit(ids, max_tokens=0, prompt_logprobs_start=start)
    local.run()
    return [value for _, value, _ in local.results[rid].prompt_logprobs]


def check(local: LocalScheduler, result: Result, prompt: Ids, choices: Sequence[ChoiceTokens]) -> None:
    """Assert that the scores equal those of one request for each choice."""
    assert result.error is None, result.error
    assert len(result.choices) == len(choices)
    for found, choice in zip(result.choices, choices, strict=True):
        ids = choice.ids[choice.dropped :]
        assert found.tokens.ids == ids
        assert found.behind == (choice.shared == len(prompt))
        whole = [*prompt[: choice.shared], *choice.ids]
        wanted = one_by_one(local, whole, len(whole) - len(ids)) if ids else []
        assert found.tokens.logprobs == pytest.approx(wanted, abs=1e-5)
        if found.unconditional is not None:
            assert found.unconditional.ids == ids
            wanted = one_by_one(local, ids, 0) if ids else []
            assert found.unconditional.logprobs == pytest.approx(wanted, abs=1e-5)


def idle(local: LocalScheduler) -> bool:
    """Whether nothing runs, and no page is in use or leased."""
    counts = local.cache.counts()
    return not local.scheduler.busy and counts.in_use == counts.leased == 0


def random_choices(rng: random.Random, prompt: Ids) -> list[ChoiceTokens]:
    """Choices with common prefixes. Some replace tokens at the end of the prompt."""
    choices = []
    for _ in range(rng.randint(1, 8)):
        shared = max(len(prompt) - rng.choice([0, 0, 0, 1, 2]), 0)
        ids = tuple(rng.randrange(3) for _ in range(rng.randint(1, 6)))
        dropped = rng.randint(0, min(len(prompt) - shared, len(ids)))
        choices.append(ChoiceTokens(shared=shared, ids=ids, dropped=dropped))
    return choices


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_scores_are_those_of_a_request_for_each_choice(tiny_model: Any, page_size: int, cache: str) -> None:
    rng = random.Random(page_size)
    options: dict[str, Any] = {"page_size": page_size, "num_pages": 4096 // page_size}
    oracle = LocalScheduler(tiny_model, **options)
    local = LocalScheduler(tiny_model, **options, prefix_cache=cache, chunk_tokens=24)
    for _ in range(3):
        asked = []
        for _ in range(6):  # at once, beside something that decodes
            prompt = [1, *prompt_of(rng.randint(0, 60), rng.randrange(3))][rng.randrange(2) :]
            choices = random_choices(rng, prompt)
            alone = rng.random() < 0.5
            rid = local.submit(prompt, choices=choices, unconditional=alone, max_tokens=0)
            asked.append((rid, prompt, choices, alone))
        beside = local.submit(prompt_of(9, 5), max_tokens=12, ignore_eos=True)
        local.run()
        assert (
            local.results[beside].ids
            == oracle.complete([prompt_of(9, 5)], max_tokens=12, ignore_eos=True)[0].ids
        )
        for rid, prompt, choices, alone in asked:
            result = local.results[rid]
            check(oracle, result, prompt, choices)
            assert all((score.unconditional is not None) is alone for score in result.choices)
        assert idle(local)


def test_single_tokens_cost_no_more_than_the_prompt(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    prompt = prompt_of(50)
    choices = behind(prompt, [7], [8], [9], [10])
    for computed, cached in ((50, 0), (1, 49)):
        before = local.scheduler.stats()
        (result,) = local.complete([prompt], choices=choices, unconditional=True, max_tokens=0)
        after = local.scheduler.stats()
        assert after.steps - before.steps == 1
        assert after.computed_tokens - before.computed_tokens == computed
        usage = result.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (50, cached, 0)
    check(LocalScheduler(tiny_model), result, prompt, choices)


@pytest.mark.parametrize(
    ("choices", "steps", "own"),
    [
        ([[1, 2, 3, 4], [5]], 1, 3),  # nothing forks: one goes on where the prompt ends
        ([[1, 2, 3], [1, 2, 4], [1, 5]], 1, 2),
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2, 6),  # three branches, all in the second step
        ([[1, 2, 3, 4], [1, 2, 5, 6], [7, 8]], 3, 5),  # a fork behind a fork
        ([[1, 2], [1, 2], [1, 2]], 1, 1),
    ],
)
def test_every_token_is_computed_once_and_branches_together(
    tiny_model: Any, choices: list[list[int]], steps: int, own: int
) -> None:
    local = LocalScheduler(tiny_model)
    prompt = prompt_of(40)
    (result,) = local.complete([prompt], choices=behind(prompt, *choices), max_tokens=0)
    stats = local.scheduler.stats()
    assert (stats.steps, stats.computed_tokens, stats.prompt_tokens) == (steps, 40 + own, 40 + own)
    assert result.usage is not None
    assert result.usage.prompt_tokens == 40 + own
    check(LocalScheduler(tiny_model), result, prompt, behind(prompt, *choices))


def test_a_step_waits_for_the_device_once(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as many rows are scored as have their logits in memory at a time."""
    waits: list[str] = []
    rows: list[int] = []
    read, log_probabilities = results.Scorer._read, results.log_probabilities

    def counted(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(logits))
        return log_probabilities(logits, *rest)

    def watched(*args: Any) -> None:
        with monkeypatch.context() as patch:
            for name in ("tolist", "item", "cpu", "numpy", "nonzero"):
                patch.setattr(torch.Tensor, name, noting(name))
            read(*args)

    def noting(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def noted(*args: Any) -> Any:
            waits.append(name)
            return plain(*args)

        return noted

    monkeypatch.setattr(results, "log_probabilities", counted)
    monkeypatch.setattr(results.Scorer, "_read", watched)
    local = LocalScheduler(tiny_model, chunk_tokens=256)
    prompt = prompt_of(10)
    local.complete([prompt], choices=behind(prompt, prompt_of(3 * LOGPROB_ROWS, 1)), max_tokens=0)
    assert local.scheduler.stats().steps == 1
    assert rows == [LOGPROB_ROWS] * 3
    assert waits == ["tolist"]


def test_a_tree_as_deep_as_it_gets(tiny_model: Any) -> None:
    prompt = prompt_of(4)
    choices = behind(prompt, *([1] * depth + [2, 3] for depth in range(100)))
    local = LocalScheduler(tiny_model)
    (result,) = local.complete([prompt], choices=choices, max_tokens=0)
    check(LocalScheduler(tiny_model), result, prompt, choices)
    assert local.scheduler.stats().computed_tokens == 4 + 99 + 100


def test_without_a_prompt(tiny_model: Any) -> None:
    for choices, computed in (([[1], [2]], 0), ([[1, 2, 3], [1, 4]], 2), ([[1, 2], [3, 4]], 2)):
        local = LocalScheduler(tiny_model)
        (result,) = local.complete([[]], choices=behind([], *choices), unconditional=True, max_tokens=0)
        assert local.scheduler.stats().computed_tokens == computed
        assert [score.tokens.logprobs[0] for score in result.choices] == [None] * len(choices)
        assert [score.unconditional for score in result.choices] == [score.tokens for score in result.choices]
        check(LocalScheduler(tiny_model), result, [], behind([], *choices))
        assert idle(local)


def test_a_program_computes_nothing_twice(tiny_model: Any) -> None:
    """A prompt that continues a choice finds the pages of its prompt and of the choice."""
    local = LocalScheduler(tiny_model, num_pages=512)
    told = Told(local)
    (held,) = told.call(prompt_of(30), branch="0")
    for turn in range(3):
        prompt = [*held[:-1], *prompt_of(7, turn)]
        choices = behind(prompt, [1, 2, 3], [4, 5, 6], [4, 5, 7, 8], [9])
        told.call(prompt, max_tokens=0, choices=choices, branch="0", unconditional=turn == 2)
        chosen = [*prompt, *choices[turn].ids]
        (held,) = told.call([*chosen, *prompt_of(3, turn + 9)], branch="0")
        assert told.usages[-1].cached_tokens == len(chosen) - 1
    assert told.computed == local.scheduler.counters.computed_tokens - 4 * 3  # decoded
    assert told.computed == told.distinct
    assert told.lost == 0
    repeated = told.call(prompt, max_tokens=0, choices=choices, branch="0")
    assert repeated
    usage = told.usages[-1]
    # Known, but the states are not kept: the prompt's last, 1, 2, 4, 5 and 7.
    assert (usage.prompt_tokens - usage.cached_tokens, usage.distinct_tokens) == (6, 0)


def test_few_pages_change_nothing(tiny_model: Any) -> None:
    """The scores stay the same when requests are retracted and the pages kept for branches are evicted."""
    rng = random.Random(7)
    oracle = LocalScheduler(tiny_model)
    local = LocalScheduler(tiny_model, page_size=4, num_pages=36, chunk_tokens=16)
    asked = []
    for number in range(12):
        prompt = prompt_of(30, number)
        choices = behind(prompt, *([rng.randrange(4) for _ in range(8)] for _ in range(5)))
        program = ProgramHint(program=f"p{number % 3}", name="p", lease_s=60.0, branch="0")
        hint = program if number % 2 else None
        rid = local.submit(prompt, choices=choices, max_tokens=0, unconditional=True, hint=hint)
        asked.append((rid, prompt, choices))
    decoding = [local.submit(prompt_of(20, 50 + n), max_tokens=24, ignore_eos=True) for n in range(3)]
    local.run()
    for rid, prompt, choices in asked:
        check(oracle, local.results[rid], prompt, choices)
    for number, rid in enumerate(decoding):
        wanted = oracle.complete([prompt_of(20, 50 + number)], max_tokens=24, ignore_eos=True)
        assert local.results[rid].ids == wanted[0].ids
    assert local.scheduler.stats().evicted_pages > 0
    assert local.cache.counts().in_use == 0


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_gives_everything_back(tiny_model: Any, steps: int) -> None:
    local = LocalScheduler(tiny_model, chunk_tokens=16)
    prompt = prompt_of(40)
    choices = behind(prompt, *([n, *prompt_of(20, n)] for n in range(4)))
    rid = local.submit(prompt, choices=choices, unconditional=True, max_tokens=0)
    local.step(steps)
    assert not local.results[rid].ended
    local.scheduler.receive(Abort(rid=rid))
    local.step()
    result = local.results[rid]
    assert result.finish is not None
    assert (result.finish.reason, result.choices) == ("abort", ())
    assert result.usage is not None
    assert result.usage.prompt_tokens == local.scheduler.counters.computed_tokens
    assert idle(local)


@pytest.mark.parametrize("passes", range(3))
def test_a_failing_pass_fails_the_request_once(tiny_model: Any, passes: int) -> None:
    local = LocalScheduler(tiny_model)
    prompt = prompt_of(40)
    choices = behind(prompt, [1, 2], [3, 4, 5], [3, 4, 6, 7], [3, 8, 9])
    rid = local.submit(prompt, choices=choices, unconditional=True, max_tokens=0)
    local.step(passes)
    with local.failing("pass"):
        local.step()
    assert isinstance(local.results[rid].error, EngineError)
    assert idle(local)
    (again,) = local.complete([prompt], choices=choices, max_tokens=0)
    check(LocalScheduler(tiny_model), again, prompt, choices)


def test_a_failing_head_fails_all_that_are_scored(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    prompt = prompt_of(10)
    rids = [local.submit(prompt_of(10, n), choices=behind(prompt, [1], [2]), max_tokens=0) for n in range(2)]
    with local.failing("logits"):
        local.run()
    for rid in rids:
        assert isinstance(local.results[rid].error, EngineError)
        assert "Scoring failed" in str(local.results[rid].error)
    assert idle(local)


@pytest.mark.parametrize(
    ("prompt", "choices", "message"),
    [
        (8, [[1] * 121], "129 tokens with its longest choice; this engine takes at most 128"),
        (8, [[n] * 60 for n in range(5)], "303 tokens together"),
        (129, [[1]], "your messages resulted in 129 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny_model: Any, prompt: int, choices: list[list[int]], message: str
) -> None:
    local = LocalScheduler(tiny_model, context_length=128, num_pages=18)
    (result,) = local.complete([prompt_of(prompt)], choices=behind([0] * prompt, *choices), max_tokens=0)
    assert isinstance(result.error, PromptTooLong)
    assert message in str(result.error)
    assert idle(local)
