"""A toy engine on a device: a scheduler on a model of random weights, without processes."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import torch

from ramify.engine_messages import Submit
from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.build import build_runner
from ramify.runtime.executor.memory import COW_PAGES, with_defaults_of
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.shape.hf_config import config_from_hf
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams

SHAPE: dict[str, Any] = {
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


def config_of(**options: Any) -> EngineConfig:
    """The engine's configuration.

    Pages are checked after every step unless the device's memory decides their number: a check of 1.8 million
    pages takes 0.6 s.
    """
    fixed = "memory_fraction" not in options
    options = {"max_running": 48, **({"num_pages": PAGES} if fixed else {}), **options}
    return EngineConfig(device="cuda", check_pages=fixed, **options)


class Local:
    """Steps a scheduler on a model of random weights, large enough that logits differ.

    options : of the engine, for `config_of`
    """

    def __init__(self, **options: Any) -> None:
        def load(dtype: torch.dtype, device: torch.device, kernels: Any) -> Any:
            model = dummy_model(config_from_hf(SHAPE), dtype=dtype, device=device)
            with torch.inference_mode():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(4.0)
            return model

        gc.collect()  # a scheduler and its requests point at each other, and hold the pages of a test before
        config = with_defaults_of(config_of(**options), torch.device("cuda"))
        assert config.page_size is not None
        self.runner = build_runner(config, load)
        pool = self.runner.pool
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
        limits = Limits(
            SHAPE["max_position_embeddings"],
            SHAPE["vocab_size"],
            (0,),
            (pool.num_pages - COW_PAGES) * config.page_size,
        )
        cache = (PrefixCache if config.prefix_cache == "radix" else NaiveCache)(
            pool.num_pages, config.page_size
        )
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
