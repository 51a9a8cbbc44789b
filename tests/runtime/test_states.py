"""States of linear attention layers: slots, copies, and the scheduler's use of them."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import ramify as rm
from ramify.engine_messages import ChoiceTokens, GetStats
from ramify.errors import EngineError, UnsupportedField
from ramify.messages import ProgramHint
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import StatePool
from ramify.runtime.executor.memory import LEAST_STATES, check_states, states_in
from ramify.runtime.model.shape.config import StateShape
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.runtime.scheduler.requests.constrained import Healer
from ramify.runtime.scheduler.requests.limits import Tuning
from ramify.runtime.server.metrics import Metrics
from ramify.sampling_params import SamplingParams
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_healing import expected as healed_by_hand
from tests.runtime.test_healing import vocabulary
from tests.runtime.test_speculation import Twice
from tests.runtime.tiny import VOCAB
from tests.runtime.toy_hybrid import ToyHybrid, ToyRunner, oracle

SHAPE = StateShape(layers=2, channels=6, width=4, heads=2, key_dim=4, value_dim=3)


def test_copies_of_slots_happen_all_at_once() -> None:
    pool = StatePool(SHAPE, num_slots=4)
    for slot in range(5):
        pool.conv[:, slot] = pool.recurrent[:, slot] = slot
    pool.copy([])
    pool.copy([(3, 0)])
    pool.copy([(0, 1), (1, 2), (2, 0)])  # a ring: each source is read before it is written
    assert pool.conv.shape == (2, 5, 6, 3)
    assert pool.recurrent.shape == (2, 5, 2, 4, 3)
    assert [int(slot) for slot in pool.recurrent[0, :, 0, 0, 0]] == [2, 3, 1, 3, 4]
    assert torch.equal(pool.conv[1, :, 0, 0], pool.recurrent[0, :, 0, 0, 0])


def test_a_batch_names_the_slot_of_each_request() -> None:
    ids = np.arange(8, dtype=np.int32)
    batch = pack([Extension(ids, 0, 3, (0,), 7), Extension(ids, 4, 5, (1,), 2)], page_size=8)
    assert batch.states is not None
    assert batch.states.tolist() == [7, 2]
    assert pack([Extension(ids, 0, 3, (0,))], page_size=8).states is None


@pytest.fixture(scope="module")
def toy() -> ToyHybrid:
    return ToyHybrid()


def local(toy: ToyHybrid, **options: Any) -> LocalScheduler:
    options.setdefault("num_states", 12)
    options.setdefault("max_running", 8)
    return LocalScheduler(toy, make_runner=ToyRunner, **options)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def tree(seed: int) -> list[list[int]]:
    """Prompts that diverge from each other at many positions; some are equal."""
    rng = random.Random(seed)
    prompts = [prompt_of(rng.randint(20, 260), seed)]
    for number in range(13):
        parent = rng.choice(prompts)
        cut = rng.randint(0, len(parent))
        prompts.append(parent[:cut] + prompt_of(rng.choice((0, 3, 40, 120)), 100 * seed + number) or [1])
    return prompts


def answers(scheduler: LocalScheduler, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    results = scheduler.complete(prompts, ignore_eos=True, **sampling)
    assert all(result.error is None for result in results)
    counts = scheduler.cache.state_counts()
    assert counts.in_use == 0
    assert counts.free + counts.held == counts.total
    return [result.ids for result in results]


def test_the_same_tokens_hit_or_cold_alone_or_batched_retracted_or_not(toy: ToyHybrid) -> None:
    prompts = tree(0)
    alone = local(toy, prefix_cache="naive", max_running=1)
    cold = answers(alone, prompts, max_tokens=12)
    assert len({tuple(ids) for ids in cold}) > 3
    computed = alone.scheduler.counters.computed_tokens
    plain = local(toy)
    assert answers(plain, prompts, max_tokens=12) == cold
    assert plain.scheduler.counters.computed_tokens < 0.8 * computed
    assert answers(plain, prompts, max_tokens=12) == cold, "every prompt is known"
    # Answers as the beginnings of further prompts, as in a chat.
    longer = [prompt + ids for prompt, ids in zip(prompts, cold, strict=True)]
    chat = answers(alone, longer, max_tokens=8)
    assert answers(plain, longer, max_tokens=8) == chat
    for options in (
        {"num_states": 2},
        {"num_states": 5, "chunk_tokens": 33, "page_size": 4},
        {"num_pages": 240, "page_size": 2},
        {"chunk_tokens": 100, "num_states": 3, "max_running": 2, "policy": "fcfs"},
    ):
        other = local(toy, **options)
        assert answers(other, prompts, max_tokens=12) == cold, options
        assert answers(other, longer, max_tokens=8) == chat, options
        if "num_pages" in options:
            assert other.scheduler.counters.retractions > 0


def test_the_same_tokens_of_every_kind_of_request(toy: ToyHybrid) -> None:
    """Grammars, forced text, healing, log-probabilities, penalties and sampling, each request twice."""
    options: dict[str, Any] = {"make_runner": ToyRunner, "speculation": False, "longest": 40}

    def outputs(load: Twice) -> list[Any]:
        return [(result.ids, result.forced, result.overlap, result.finish) for result in load.run()]

    expected = outputs(Twice(toy, prefix_cache="naive", **options))
    options["tuning"] = Tuning(least_state=4)
    for more in ({"num_states": 60}, {"page_size": 4, "num_pages": 40, "chunk_tokens": 16, "num_states": 9}):
        load = Twice(toy, **options, **more)
        assert outputs(load) == expected
        counters = load.local.scheduler.counters
        assert counters.cached_tokens > 200
        assert load.local.cache.state_counts().in_use == 0
    assert counters.retractions > 0


def test_known_tokens_are_computed_when_they_are_chosen(toy: ToyHybrid) -> None:
    """A healed prompt continues from the state before the replaced tokens."""
    prompts = [
        list(text) for text in (b"xxa", b"cc d ab", b"xbbbb", b"abcd:", b"abc", b"d a", b"bcdbc", b"a:")
    ]
    other = local(toy, healer=Healer(vocabulary()))
    rids = [other.submit(prompt, open_end=True, max_tokens=4, ignore_eos=True) for prompt in prompts]
    other.run()
    replaced = 0
    for prompt, rid in zip(prompts, rids, strict=True):
        ids, overlap, margin = healed_by_hand(oracle(toy), prompt, 4)
        assert margin > 1e-4
        assert (other.results[rid].ids, other.results[rid].overlap) == (ids, overlap), bytes(prompt)
        replaced += bool(overlap)
    assert 0 < replaced < len(prompts), "both ways were taken"


def test_scores_embeddings_and_log_probabilities_are_the_same(toy: ToyHybrid) -> None:
    trunk = prompt_of(150)
    choices = [ChoiceTokens(shared=150, ids=ids) for ids in ((5, 6, 7), (5, 6, 8, 9), (5, 1), (2, 2))]
    found = []
    for options in ({"prefix_cache": "naive", "max_running": 1}, {}, {"chunk_tokens": 40, "num_states": 2}):
        other = local(toy, **options)
        for _ in range(2):
            scored = other.submit(trunk, choices=choices, max_tokens=0)
            mean = other.submit(trunk, pooling="mean", max_tokens=0)
            logged = other.submit(trunk[:90], prompt_logprobs_start=70, logprobs=0, max_tokens=4)
            other.run()
            result = other.results[scored]
            values = [value for one in result.choices for value in one.tokens.logprobs]
            values += [value for _, value, _ in other.results[logged].prompt_logprobs]
            values += [value for _, value, _ in other.results[logged].logprobs]
            values += np.frombuffer(other.results[mean].embedding, "<f4").tolist()
            found.append(values)
    for values in found[1:]:
        np.testing.assert_allclose(values, found[0], rtol=0, atol=2e-4)


def test_a_state_is_kept_where_somebody_says_that_prompts_part(toy: ToyHybrid) -> None:
    """Each request ends before the next comes. Without a hint, the second shows where prompts diverge."""
    trunk = prompt_of(200)
    prompts = [trunk + prompt_of(20, seed) for seed in range(1, 4)]

    def computed(**options: Any) -> list[int]:
        other, counts = local(toy, **options), []
        for prompt in prompts:
            before = other.scheduler.counters.computed_tokens
            other.submit(prompt, max_tokens=1, **told)
            other.run()
            counts.append(other.scheduler.counters.computed_tokens - before)
        return counts

    told: dict[str, Any] = {"forks": [199]}
    assert computed() == computed(chunk_tokens=64) == [220, 21, 21]
    told = {}
    assert computed() == [220, 220, 20]
    told = {"hint": ProgramHint(program="p", branch="b", forks=("f",))}
    assert computed(chunk_tokens=1000) == [220, 220, 20]


def test_a_program_says_where_its_fork_is(toy: ToyHybrid, tiny_folder: Path) -> None:
    """A program's hints reach the scheduler. Each request ends before the next comes."""

    @rm.function
    def program(s: Any) -> None:
        s += "a text to be read " * 8
        for fork in s.fork(3):
            fork += "What is it about?" + rm.gen("x")
            fork["x"]

    backend = rm.ScriptedBackend({"x": "y"})
    assert program.run(backend=backend).error() is None
    tokenizer = PromptTokenizer(load_tokenizer(tiny_folder))
    other, computed = local(toy), []
    for number, request in enumerate(backend.requests):
        changed = replace(request, prompt=(f"{request.prompt[0]} {number}",), rid=f"p{number}")
        other.results[changed.rid] = Result()
        before = other.scheduler.counters.computed_tokens
        other.scheduler.receive(tokenizer.submit(replace(changed, sampling=SamplingParams(max_tokens=1))))
        other.run()
        computed.append(other.scheduler.counters.computed_tokens - before)
    trunk, rest = 18 * 8, len("What is it about? 0")
    assert computed == [trunk + rest] + 2 * [1 + rest]


def test_branches_wait_for_the_state_at_their_fork(toy: ToyHybrid) -> None:
    other = local(toy, chunk_tokens=64)
    trunk = prompt_of(200)
    prompts = [trunk + prompt_of(20, seed) for seed in range(1, 6)]
    answers(other, prompts, max_tokens=1)
    assert other.scheduler.counters.computed_tokens == 200 + 5 * 20
    equal = prompt_of(200, seed=9)
    before = other.scheduler.counters.computed_tokens
    answers(other, [equal] * 4, max_tokens=1)
    assert other.scheduler.counters.computed_tokens - before == 200 + 3


def test_a_turn_goes_on_where_the_last_one_ended(toy: ToyHybrid) -> None:
    other = local(toy)
    prompt = prompt_of(100)
    ids = answers(other, [prompt], max_tokens=30)[0]
    before = other.scheduler.counters.computed_tokens
    answers(other, [[*prompt, *ids, 5]], max_tokens=1)
    assert other.scheduler.counters.computed_tokens - before == 2  # the last answer token was not computed
    # The end of the prompt is kept as well: an answer may come back changed.
    answers(other, [[*prompt, 1, 2, 3]], max_tokens=1)
    assert other.scheduler.counters.computed_tokens - before == 2 + 3
    never = local(toy)
    never.submit(prompt, max_tokens=30, hint=ProgramHint(program="p", next_use="never"), ignore_eos=True)
    never.run()
    assert never.cache.state_counts().held == 1, "nobody goes on from there"


def test_a_wrong_state_gives_other_tokens(toy: ToyHybrid) -> None:
    """If states were wrong, the test above would fail."""
    prompt = prompt_of(100)
    right = answers(local(toy), [prompt], max_tokens=12)
    other = local(toy)
    answers(other, [prompt[:90]], max_tokens=1)
    assert other.runner.states is not None
    other.runner.states.recurrent.zero_()
    assert answers(other, [prompt], max_tokens=12) != right


def test_the_number_of_slots(toy: ToyHybrid) -> None:
    slot = toy.config.states
    assert slot is not None
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert states_in(EngineConfig(num_states=7), toy.config, 0, cpu) == 7
    assert states_in(EngineConfig(state_memory_gb=9.5 * slot.bytes / 2**30), toy.config, 0, cpu) == 9
    assert states_in(EngineConfig(max_running=6), toy.config, 3 * slot.bytes, cpu) == 6
    assert states_in(EngineConfig(max_running=6), toy.config, 3 * slot.bytes, cuda) == 3
    assert states_in(EngineConfig(max_running=6), toy.config, 30 * slot.bytes, cpu) == 30
    assert states_in(EngineConfig(), dataclasses.replace(toy.config, states=None), 1 << 30, cpu) == 0
    with pytest.raises(EngineError, match="holds 1 states"):
        states_in(EngineConfig(state_memory_gb=1.5 * slot.bytes / 2**30), toy.config, 0, cpu)
    # 36 layers of Qwen3-Next: 75 MiB. 128 slots would be 9.4 GiB.
    large = StateShape(layers=36, channels=8192, width=4, heads=32, key_dim=128, value_dim=128)
    shape = dataclasses.replace(toy.config, states=large)
    assert states_in(EngineConfig(max_running=128), shape, 1 << 28, cpu) == 13
    assert states_in(EngineConfig(), shape, 0, cuda) == LEAST_STATES


def test_options_that_states_exclude(toy: ToyHybrid) -> None:
    assert check_states(EngineConfig(), toy.config).overlap is False
    with pytest.raises(UnsupportedField, match="linear attention") as refused:
        check_states(EngineConfig(overlap=True), toy.config)
    assert refused.value.field == "overlap"
    without = dataclasses.replace(toy.config, states=None)
    assert check_states(EngineConfig(), without).overlap is None
    with pytest.raises(UnsupportedField, match="no states"):
        check_states(EngineConfig(num_states=9), without)


def test_rejected_drafts_of_a_model_with_states_change_no_token(toy: ToyHybrid) -> None:
    prompts = [[*b"the same words, the same words, the same"] * 2, *tree(4)]
    expected = answers(local(toy), prompts, max_tokens=20)
    accepted = []
    for options in ({}, {"num_states": 3}, {"num_pages": 240, "page_size": 2}):
        other = local(toy, speculation=True, tuning=Tuning(least_gain=0.0), **options)
        for _ in range(2):
            assert answers(other, prompts, max_tokens=20) == expected, options
        counters = other.scheduler.counters
        assert counters.accepted_tokens < counters.draft_tokens
        accepted.append(counters.accepted_tokens)
    assert min(accepted[0], accepted[2]) > 100 > accepted[1], "few slots leave none for a second state"


def drafting(toy: ToyHybrid, num_states: int) -> LocalScheduler:
    """Two requests that decode with drafts from the outputs of two equal requests, which have ended."""
    other = local(toy, num_states=num_states, speculation=True, tuning=Tuning(least_gain=0.0))
    for _ in range(2):
        other.run()
        for first in (1, 2):
            prompt = [first, *b"the same words, the same words, the same"]
            other.submit(prompt, max_tokens=200, ignore_eos=True)
    for _ in range(6):
        other.step()
    return other


def test_drafts_keep_no_request_waiting(toy: ToyHybrid) -> None:
    other = drafting(toy, num_states=4)
    assert other.cache.state_counts().in_use >= 2
    drafted = other.scheduler.counters.draft_tokens
    assert drafted > 0
    other.submit(prompt_of(30), max_tokens=6, ignore_eos=True)
    for _ in range(2):
        other.step()
    assert len(other.scheduler.requests.running) == 3
    other.run()
    assert other.scheduler.counters.draft_tokens > drafted


def test_slots_are_counted(toy: ToyHybrid) -> None:
    other = local(toy, num_states=6)
    other.submit(prompt_of(100), max_tokens=5)
    other.step()
    other.scheduler.receive(GetStats(rid="s"))
    stats = other.replies[0].stats
    assert stats is not None
    assert (stats.states_total, stats.states_in_use, stats.states_held) == (6, 1, 1)
    assert [view.has_state for view in other.cache.snapshot(9)] == [False, True]
    text = Metrics().render(stats).decode()
    assert 'ramify_states{state="held"} 1.0' in text
    assert 'ramify_states{state="free"} 4.0' in text


def test_a_request_waits_for_a_slot(toy: ToyHybrid) -> None:
    other = local(toy, num_states=2)
    for seed in range(4):
        other.submit(prompt_of(30, seed), max_tokens=6, ignore_eos=True)
    other.step()
    assert len(other.scheduler.requests.running) == 2
    other.run()
    assert [len(result.ids) for result in other.results.values()] == [6] * 4


def test_a_failed_pass_leaves_no_state(toy: ToyHybrid) -> None:
    """The slot's state is unusable, as the pass may have changed a part of it."""
    other = local(toy)
    other.submit(prompt_of(100), max_tokens=5, ignore_eos=True)
    other.step()
    held = other.cache.state_counts().held
    with other.failing("pass"):
        other.step()
    counts = other.cache.state_counts()
    assert (counts.in_use, counts.held) == (0, held)
