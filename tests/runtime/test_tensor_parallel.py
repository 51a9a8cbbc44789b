"""An engine core of two ranks over gloo: the tokens of one rank, also after a rank died; refusals."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import EngineError, UnsupportedField
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.questions import Decide, Option, Question
from ramify.runtime.config import EngineConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.model.loading.load import read_config
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.model.shape.config import ModelConfig, Shard
from ramify.runtime.model.shape.quantised_config import Quantised
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.parallel import checks
from ramify.runtime.parallel.checks import check_ranks
from ramify.runtime.parallel.ranks import Ranks
from ramify.runtime.processes import shares
from ramify.runtime.processes.detokenizer import joined
from ramify.runtime.processes.ipc import Sockets
from ramify.runtime.processes.shares import Share
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.sampling_params import SamplingParams
from tests.model.adapters import write_adapter
from tests.runtime.local import LocalScheduler
from tests.runtime.oracle import assert_same, greedy

TOKENS = 24


def forks() -> list[list[int]]:
    rng = random.Random(7)
    base = [rng.randrange(3, 250) for _ in range(40)]
    return [base[:length] + [rng.randrange(3, 250) for _ in range(5)] for length in (11, 22, 37, 40)] + [base]


PROMPTS = forks()


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Engine]:
    """An engine with few pages, so that requests are retracted, and with passes launched ahead."""
    options: dict[str, Any] = {"page_size": 4, "num_pages": 32, "chunk_tokens": 17, "overlap": True}
    with Engine(
        str(tiny_folder), dtype="float32", threads=1, tensor_parallel=2, check_pages=True, **options
    ) as engine:
        yield engine


@pytest.mark.slow
def test_the_tokens_of_the_oracle(engine: Engine, tiny_oracle: Any) -> None:
    expected = [greedy(tiny_oracle, prompt, TOKENS) for prompt in PROMPTS]
    for _ in "cold", "cached":
        found = engine.complete_many(PROMPTS, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        same = [assert_same(want, one.ids) for want, one in zip(expected, found, strict=True)]
        assert sum(same) >= len(same) - 1, "ties are the exception"
    assert sum(one.usage.cached_tokens for one in found) > 20
    assert engine.stats().retractions > 0
    assert engine.pids.keys() == {"scheduler", "rank-1", "tokenizer", "detokenizer"}


@pytest.mark.slow
def test_log_probabilities_and_embeddings(engine: Engine, tiny_oracle: Any) -> None:
    """The first rank computes them from hidden states summed over all ranks."""
    prompt = PROMPTS[0]
    with torch.inference_mode():
        states = tiny_oracle.model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = torch.log_softmax(tiny_oracle.lm_head(states[-1]), -1)
    found = engine.complete(prompt, max_tokens=1, temperature=0.0, logprobs=1)
    assert found.logprobs is not None
    assert found.logprobs.logprobs[0] == pytest.approx(float(wanted[found.ids[0]]), abs=1e-3)
    vector = engine.embed(prompt, normalize=False)
    np.testing.assert_allclose(vector, states[-1].numpy(), atol=2e-3)


@pytest.mark.slow
def test_questions(tiny_folder: Path, tiny_model: Any) -> None:
    """Branches and their copied pages reach all ranks. After the death of a rank, the request begins anew."""
    options = [[Option(name=f"{n} {word}") for word in ("ab", "abc", "x")] for n in range(12)]
    questions = [Question(kind="choice", instructions="Which?", options=tuple(each)) for each in options]
    request = Generate(
        rid="asked",
        prompt=("State.",),
        decide=Decide(questions=tuple(questions)),
        sampling=SamplingParams(max_tokens=0),
    )
    local = LocalScheduler(tiny_model)
    submit = PromptTokenizer(load_tokenizer(tiny_folder)).submit(request)
    assert submit.decide is not None
    rid = local.submit(submit.ids, decide=submit.decide, max_tokens=0)
    local.run()
    wanted = local.results[rid].decisions
    assert wanted is not None

    async def ask(engine: Engine, *, kill: bool) -> list[TextChunk]:
        named = msgspec.structs.replace(request, rid=f"killed {kill}")
        asked = asyncio.ensure_future(collect(engine.generate(named)))
        if kill:
            await asyncio.sleep(0.01)
            os.kill(engine.pids["rank-1"], signal.SIGKILL)
        return await asyncio.wait_for(asked, 120)

    async def collect(chunks: AsyncIterator[TextChunk]) -> list[TextChunk]:
        return [chunk async for chunk in chunks]

    few: dict[str, Any] = {"page_size": 4, "num_pages": 128, "chunk_tokens": 32, "overlap": True}
    with Engine(
        str(tiny_folder), dtype="float32", threads=1, tensor_parallel=2, check_pages=True, **few
    ) as engine:
        answers = [wait(ask(engine, kill=kill)) for kill in (False, True)]
    for found in answers:
        decisions = found[-1].decisions
        assert decisions is not None
        for one, other in zip(decisions.questions, wanted.questions, strict=True):
            assert one.forms[0].logprobs == pytest.approx(other.forms[0].logprobs, abs=2e-3)


@pytest.mark.slow
def test_a_killed_rank_loses_nothing(engine: Engine) -> None:
    async def stream(name: str, kill: bool) -> list[TextChunk]:
        chunks: list[TextChunk] = []
        request = Generate(
            rid=name,
            prompt=(tuple(PROMPTS[1]),),
            sampling=SamplingParams(max_tokens=80, temperature=1.0, seed=3, ignore_eos=True),
        )
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            if kill and len(chunks) == 4:
                os.kill(engine.pids["rank-1"], signal.SIGKILL)
        return chunks

    before = engine.pids
    whole = joined(wait(stream("whole", False)))
    broken = joined(wait(asyncio.wait_for(stream("broken", True), 120)))
    assert (broken.ids, broken.text, broken.finish) == (whole.ids, whole.text, whole.finish)
    assert not set(before.values()) & set(engine.pids.values()), "the whole engine core begins anew"


def test_a_failed_pass_ends_the_process_instead_of_the_requests(tiny_model: Any, tmp_path: Path) -> None:
    """The other ranks wait for sums that never come. Running requests continue on the next engine core."""
    local = LocalScheduler(tiny_model)
    local.runner.ranks = Ranks(0, 1, Sockets(tmp_path))
    rid = local.submit(PROMPTS[0], max_tokens=8)
    local.step()
    assert local.results[rid].ids
    with local.failing("pass"), pytest.raises(EngineError, match="out of step"):
        local.step()
    assert local.results[rid].error is None


SMOLLM = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536}


@pytest.fixture
def shape(tiny_folder: Path) -> ModelConfig:
    return replace(read_config(tiny_folder), **SMOLLM)


def refusal(config: EngineConfig, shape: Any, weights: Path) -> UnsupportedField:
    with pytest.raises(UnsupportedField) as caught:
        check_ranks(config, shape, weights)
    return caught.value


def test_what_divides(shape: ModelConfig, tmp_path: Path) -> None:
    error = refusal(EngineConfig(tensor_parallel=2), shape, tmp_path)
    assert "9 query heads, 3 KV heads and an MLP of 1536: these divide by 1 or 3." in error.message
    assert (error.field, error.remedy) == ("tensor_parallel", "Choose 1 or 3.")
    check_ranks(EngineConfig(tensor_parallel=3), shape, tmp_path)
    check_ranks(EngineConfig(tensor_parallel=3, quantization="int8"), shape, tmp_path)
    for quantised in (Quantised("gptq", groups=(128,)), Quantised("fp8", blocks=((128, 128),))):
        error = refusal(EngineConfig(tensor_parallel=3), replace(shape, quantised=quantised), tmp_path)
        assert "quantised groups of 128 inputs: these divide by 1." in error.message, "192 inputs of o_proj"
        assert error.remedy == "Leave it out."
        check_ranks(
            EngineConfig(tensor_parallel=3, dtype="float32"), replace(shape, quantised=quantised), tmp_path
        )
    assert checks.counts(replace(shape, num_heads=32, num_kv_heads=8, intermediate_size=14336), 32) == [
        1,
        2,
        4,
        8,
    ]


@pytest.mark.parametrize("option", ["draft_model", "loras", "cuda_graphs"])
def test_options_that_several_ranks_have_not(option: str, shape: ModelConfig, tmp_path: Path) -> None:
    values: dict[str, Any] = {"draft_model": "other", "loras": {"a": "b"}, "cuda_graphs": True}
    config = EngineConfig(tensor_parallel=3, **{option: values[option]})
    assert refusal(config, shape, tmp_path).field == option
    check_ranks(replace(config, tensor_parallel=1), shape, tmp_path)


def test_an_adapter_that_is_loaded_later_is_refused(
    tiny_model: Any, tiny_folder: Path, tmp_path: Path
) -> None:
    part = copy.copy(tiny_model)
    part.config = replace(tiny_model.config, shard=Shard(0, 2))
    with pytest.raises(UnsupportedField, match="adapters are not divided among ranks"):
        Adapters(part).load("a", str(write_adapter(tmp_path / "a", tiny_folder, seed=1)))


def test_shares_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [share.cores for share in Share((4, 5, 6, 7, 8)).of_ranks(2)] == [(4, 5), (6, 7, 8)]
    monkeypatch.setattr(shares, "_gpus", lambda config: ["0", "1", "2", "3", "4"])
    found = shares.shares(EngineConfig(replicas=2, tensor_parallel=2))
    assert [share.gpu for share in found] == ["0,1", "2,3"]
    with pytest.raises(UnsupportedField, match="5 GPUs, and each replica needs 3, one for each rank"):
        shares.shares(EngineConfig(replicas=2, tensor_parallel=3))
