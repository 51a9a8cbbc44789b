"""Questions on models with states, with adapters, with a draft model, on two ranks, and on real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify.engine_messages import LoadLora
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.scheduler.requests.limits import Tuning
from tests.default_model import load_reference
from tests.model.adapters import merge, write_adapter
from tests.runtime.local import LocalScheduler
from tests.runtime.test_decisions import SALE, Asked, answered, decide, exact, idle, logprobs, near, questions
from tests.runtime.test_scheduler import prompt_of
from tests.runtime.toy_hybrid import ToyHybrid, ToyRunner, oracle


def hybrid(**options: Any) -> LocalScheduler:
    options.setdefault("num_states", 12)
    return LocalScheduler(ToyHybrid(), make_runner=ToyRunner, **options)


@pytest.mark.parametrize("states", [4, 5, 12])
def test_branches_of_a_hybrid_begin_from_copies_of_the_state(states: int) -> None:
    state, model = prompt_of(70), oracle(ToyHybrid())
    local = hybrid(num_states=states, max_running=8, chunk_tokens=50)
    asked: list[Asked] = [(ids, paths[:4]) for ids, paths in questions(12)]
    for cached in (0, 70):
        before = local.scheduler.counters.computed_tokens
        result = answered(local, state, decide(*asked))
        assert result.usage is not None
        assert result.usage.cached_tokens == cached
        computed = local.scheduler.counters.computed_tokens - before
        assert computed == result.usage.prompt_tokens - cached
        assert result.decisions is not None
        for (ids, paths), question in zip(asked, result.decisions.questions, strict=True):
            wanted = exact(model, state + ids, paths, at_once=1)
            assert list(question.forms[0].logprobs) == near(wanted)
        assert idle(local)


def test_the_state_of_a_hybrid_is_kept_whole_and_takes_no_step() -> None:
    """With the fork that the tokenizer names: the end of the prompt."""
    state, asked = prompt_of(70), decide(([1, 2], [[3], [4]]))
    local = hybrid(chunk_tokens=512)
    for steps, cached in ((2, 0), (1, 70)):
        before = local.scheduler.stats().steps
        usage = answered(local, state, asked, forks=(70,)).usage
        assert local.scheduler.stats().steps - before == steps
        assert usage is not None
        assert usage.cached_tokens == cached
        assert local.cache.state_counts().held == 1
    beside = hybrid(chunk_tokens=40)
    first = beside.submit(state, decide=asked, max_tokens=0, forks=(70,))
    beside.step()
    assert not beside.results[first].ended
    usage = answered(beside, state, asked, forks=(70,)).usage
    assert usage is not None
    assert usage.cached_tokens == 70, "the first computes the state for both"


def test_a_hybrid_gives_the_same_numbers_in_any_company() -> None:
    state, asked = prompt_of(70), [(ids, paths[:4]) for ids, paths in questions(12)]
    alone, wanted = hybrid(), []
    for each in asked:
        wanted += logprobs(alone, state, each)
        alone.cache.flush()
    for options in ({}, {"num_states": 4}, {"chunk_tokens": 23, "page_size": 4, "num_pages": 60}):
        local = hybrid(**options)
        rid = local.submit(prompt_of(30, 5), max_tokens=30, ignore_eos=True)
        local.step(2)
        assert logprobs(local, state, *asked) == [near(each) for each in wanted]
        assert logprobs(local, state, *reversed(asked)) == [near(each) for each in wanted[::-1]]
        assert local.results[rid].finish is not None


def test_states_that_a_question_needs_are_there_or_it_is_refused() -> None:
    local = hybrid(num_states=3)
    rid = local.submit(prompt_of(5), decide=decide(([1], [[n, n, n] for n in range(8)])), max_tokens=0)
    assert "need 5 states at a time; this engine has 3" in str(local.results[rid].error)
    assert answered(local, prompt_of(5), decide(([1], [[2], [3]]))).decisions is not None
    assert idle(local)


def test_an_adapter_answers(tiny_folder: Path, tiny_oracle: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    adapter = write_adapter(tmp_path / "a", tiny_folder, seed=1)
    merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path / "merged", tiny_folder, adapter, 2.0))
    local = LocalScheduler(tiny_folder)
    local.scheduler.receive(LoadLora(rid="a", name="a", path=str(adapter)))
    state, asked = prompt_of(40), ([1, 2, 3], SALE)
    rids = [local.submit(state, decide=decide(asked), max_tokens=0, lora=name) for name in ("a", "")]
    local.run()
    for rid, model in zip(rids, (merged.float().eval(), tiny_oracle), strict=True):
        found = local.results[rid].decisions
        assert found is not None
        assert list(found.questions[0].forms[0].logprobs) == near(exact(model, [*state, 1, 2, 3], SALE))


def test_a_draft_model_does_not_use_the_kv_of_branches(tiny_folder: Path) -> None:
    """Pages of branches go to requests that draft: their drafts stay as good as without the branches."""
    options: dict[str, Any] = {"deterministic": True, "speculation": True, "draft": tiny_folder}
    options |= {"page_size": 4, "num_pages": 40, "tuning": Tuning(least_gain=0.0)}
    plain, local = LocalScheduler(tiny_folder, **options), LocalScheduler(tiny_folder, **options)
    wanted = plain.complete([prompt_of(30, 1)], max_tokens=60, ignore_eos=True)[0]
    rid = local.submit(prompt_of(30, 1), max_tokens=60, ignore_eos=True)
    for _ in range(6):
        local.step(2)
        local.submit(prompt_of(10, 2), decide=decide(*questions(3)), max_tokens=0)
    local.run()
    assert local.results[rid].ids == wanted.ids
    counters = local.scheduler.counters
    assert counters.model_accepted_tokens > 20
    assert counters.model_accepted_tokens > 0.9 * counters.model_draft_tokens, "the draft model is the model"


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(400)
def test_real_weights() -> None:
    """Options of several tokens, options that begin others, Unicode, spellings, and 255 options."""
    files = resolve(DEFAULT_MODEL)
    tokenizer, reference = load_tokenizer(files.tokenizer), load_reference(files)
    import torch

    local = LocalScheduler(load_model(files, dtype=torch.float32))
    state = tokenizer.encode("Order 7 arrived broken, and I want my money back. " * 2)
    names = [
        "sale",
        "sales",
        "sales tax",
        "Rückgabe",
        "返品",
        "返品する",
        "🙂",
        "🙂🙂",
        "true",
        "True",
        '"true"',
    ]
    asked: list[Asked] = []
    for text in ("\n\nWhich team handles it?\nAnswer:", "\nSag es:"):
        asked.append((tokenizer.encode(text), [tokenizer.encode(f" {name}") for name in names]))
    many = {tuple(tokenizer.encode(f" option {n * n}")) for n in range(255)}
    assert len(many) == 255
    asked.append((tokenizer.encode("\nWhich?"), sorted(map(list, many))))
    for ends in ((), (2, 0)):
        found = logprobs(local, state, *asked, ends=ends)
        for (ids, paths), values in zip(asked, found, strict=True):
            some = [*range(len(paths))] if len(paths) < 20 else [*range(0, 255, 64), 254]
            wanted = exact(reference, state + ids, paths, ends, some)
            for path, value in zip(some, wanted, strict=True):
                # The terms are each as exact as float32 logits of 30 after 30 layers in another order.
                terms = len(paths[path]) + 1
                assert values[path] == pytest.approx(value, abs=2e-5 * terms), (path, terms)
