"""A toy engine on a device: a scheduler on a model of random weights, without processes."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ramify.engine_messages import Submit
from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.decode_graphs import ladder
from ramify.runtime.executor.memory import COW_PAGES, with_defaults_of
from ramify.runtime.executor.token_graphs import buckets
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.shape.hf_config import config_from_hf
from ramify.runtime.scheduler.requests.limits import Limits
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
"""More pages than all prompts and outputs fill without sharing: 29 of at most 924 tokens in pages of 16."""


def make_prompts() -> list[list[int]]:
    rng = random.Random(2)
    trunk = [rng.randrange(3000) for _ in range(900)]
    forks = [
        trunk[:length] + [rng.randrange(3000) for _ in range(5)] for length in (1, 100, 513, 514, 800, 899)
    ]
    return [trunk, *forks, *([*trunk[:600], i] for i in range(20)), [7], trunk[300:340]]


PROMPTS = make_prompts()


def config_of(device: Literal["cpu", "cuda"], **options: Any) -> EngineConfig:
    """The engine's configuration.

    Pages are checked after every step unless the device's memory decides their number: a check of 1.8 million
    pages takes 0.6 s.
    """
    fixed = "memory_fraction" not in options
    options = {"max_running": 48, **({"num_pages": PAGES} if fixed else {}), **options}
    return EngineConfig(device=device, check_pages=fixed, **options)


class Local:
    """Steps a scheduler on a model of random weights, large enough that logits differ.

    options : of the engine, for `config_of`. On the CPU `cuda_graphs` pads steps as graphs do.
    """

    def __init__(
        self, *, device: Literal["cpu", "cuda"] = "cuda", shape: dict[str, Any] = SHAPE, **options: Any
    ) -> None:
        def load(dtype: torch.dtype, device: torch.device, kernels: Any) -> Any:
            model = dummy_model(config_from_hf(shape), dtype=dtype, device=device)
            with torch.inference_mode():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(4.0)
            return model

        gc.collect()  # a scheduler and its requests point at each other, and hold the pages of a test before
        padded = device == "cpu" and options.pop("cuda_graphs", False)
        config = with_defaults_of(config_of(device, **options), torch.device(device))
        assert config.page_size is not None
        assert config.max_running is not None
        self.runner = build_runner(config, load)
        pool, length = self.runner.pool, shape["max_position_embeddings"]
        if padded:
            sizes = ladder(config.max_running)
            self.runner.capture_graphs(sizes, -(-length // config.page_size), buckets(length))
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
        limits = Limits(length, shape["vocab_size"], (0,), (pool.num_pages - COW_PAGES) * config.page_size)
        cache = (PrefixCache if config.prefix_cache == "radix" else NaiveCache)(
            pool.num_pages, config.page_size
        )
        failures: list[Any] = []
        self.scheduler = Scheduler(config, limits, self.runner, cache, None, failures.append)  # type: ignore[arg-type]
        self.failures = failures

    def complete(
        self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log-probabilities."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for index, prompt in enumerate(prompts):
            found[str(index)] = ([], [])
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=1)
            self.scheduler.receive(Submit(rid=str(index), ids=tuple(prompt), sampling=sampling))
        while self.scheduler.busy:
            output = self.scheduler.step()
            for chunk in output.chunks if output is not None else ():
                found[chunk.rid][0].extend(chunk.ids)
                if chunk.logprobs is not None:
                    found[chunk.rid][1].extend(chunk.logprobs.logprobs)
        assert not self.failures
        return [found[str(index)] for index in range(len(prompts))]
