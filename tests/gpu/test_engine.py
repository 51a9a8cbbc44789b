"""The engine on a GPU: graphs, memory, computing ahead and determinism change no token."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ramify.errors import EngineError
from ramify.radix.cache import PrefixCache
from ramify.radix.naive import NaiveCache
from ramify.ring_messages import Submit
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.device_defaults import with_defaults_of
from ramify.runtime.executor.memory import COW_PAGES
from ramify.runtime.model.hf_config import config_from_hf
from ramify.runtime.model.load import dummy_model
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 3000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
TOKENS = 24
PAGES = 4000
"""More than all prompts and outputs fill without sharing: 29 of at most 924 tokens in pages of 16."""

FEW_PAGES = {16: 70, 64: 22}
"""By page size: pages that hold the longest prompt with its output, 58 and 15 of them, and not all prompts,
which share their beginnings and fill 137 and 44."""


def make_prompts() -> list[list[int]]:
    rng = random.Random(2)
    trunk = [rng.randrange(3000) for _ in range(900)]
    forks = [
        trunk[:length] + [rng.randrange(3000) for _ in range(5)] for length in (1, 100, 513, 514, 800, 899)
    ]
    return [trunk, *forks, *([*trunk[:600], i] for i in range(20)), [7], trunk[300:340]]


PROMPTS = make_prompts()


def config_of(options: dict[str, Any]) -> EngineConfig:
    """The options of a `Local`. Pages are checked after every step unless the device's memory decides their
    number: a check of 1.8 million pages takes 0.6 s."""
    options = {"max_running": 48, **options}
    if "memory_fraction" not in options:
        options = {"num_pages": PAGES, **options}
    return EngineConfig(device="cuda", check_pages="memory_fraction" not in options, **options)


class Local:
    """Steps a scheduler on a model of random weights, large enough that logits differ."""

    def __init__(self, **options: Any) -> None:
        def load(dtype: torch.dtype, device: torch.device, kernels: Any) -> Any:
            model = dummy_model(config_from_hf(SHAPE), dtype=dtype, device=device)
            with torch.inference_mode():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(4.0)
            return model

        gc.collect()  # a scheduler and its requests point at each other, and hold the pages of a test before
        config = with_defaults_of(config_of(options), torch.device("cuda"))
        self.runner = build_runner(config, load)
        pages = self.runner.pool.num_pages
        self.runner.pool.k.fill_(float("nan"))
        self.runner.pool.v.fill_(float("nan"))
        limits = Limits(4096, 3000, (0,), (pages - COW_PAGES) * config.page_size)
        cache = (PrefixCache if config.prefix_cache == "radix" else NaiveCache)(pages, config.page_size)
        failures: list[Any] = []
        self.scheduler = Scheduler(config, limits, self.runner, cache, None, failures.append)  # type: ignore[arg-type]
        self.failures = failures

    def complete(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for index, prompt in enumerate(prompts):
            found[str(index)] = ([], [])
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
            self.scheduler.receive(Submit(rid=str(index), ids=tuple(prompt), sampling=sampling))
        while self.scheduler.busy:
            output = self.scheduler.step()
            for chunk in output.chunks if output is not None else ():
                found[chunk.rid][0].extend(chunk.ids)
                if chunk.logprobs is not None:
                    found[chunk.rid][1].extend(chunk.logprobs.logprobs)
        assert not self.failures
        return [found[str(index)] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """The expected tokens: each prompt alone, deterministic, with none of the tested features."""
    return [
        Local(deterministic=True, cuda_graphs=False, overlap=False, cascade=False, num_pages=600).complete(
            [prompt]
        )[0]
        for prompt in PROMPTS
    ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"chunk_tokens": 37},
    {"cuda_graphs": False, "overlap": True},
    {"overlap": True, "cascade": True},
    *({"page_size": size, "num_pages": pages} for size, pages in FEW_PAGES.items()),
    {"prefix_cache": "naive", "overlap": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_deterministic_changes_no_bit(alone: list[Any], options: dict[str, Any]) -> None:
    local = Local(deterministic=True, **options)
    assert local.complete(PROMPTS) == alone
    assert local.complete(PROMPTS) == alone, "from the cache"
    if "num_pages" in options:
        evicted = local.scheduler.stats().evicted_pages
        assert evicted + local.scheduler.counters.retractions > 0


def test_float32_gives_the_tokens_of_the_torch_backend() -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 800}
    expected = Local(attention_backend="torch", **options).complete(PROMPTS[:8])
    found = Local(overlap=True, **options).complete(PROMPTS[:8])
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def test_memory_is_filled_and_not_more() -> None:
    total = torch.cuda.mem_get_info()[1]
    local = Local(memory_fraction=0.5)
    local.complete(PROMPTS)
    free = torch.cuda.mem_get_info()[0]
    assert 0.4 * total < total - free < 0.55 * total


def test_what_does_not_fit_is_refused_with_figures() -> None:
    with pytest.raises(EngineError, match=r"does not fit .* GiB"):
        Local(memory_fraction=0.0005)
