"""Models whose code is in transformers, on our KV pages: what the library computes itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.runtime.model.hub.resolve import ModelFiles
from ramify.runtime.model.load import load_model, read_shape
from tests.model.architectures import save_tiny, tiny_config
from tests.runtime.local import LocalScheduler
from tests.runtime.oracle import assert_same, greedy

DENSE = ["gpt2", "gpt_neox", "opt", "phi", "stablelm", "starcoder2", "cohere", "cohere2", "olmo", "olmo3"]
DENSE += ["glm4", "nemotron", "exaone4", "ernie4_5", "seed_oss", "modernbert-decoder", "gemma4_text"]
DENSE += ["diffllama", "minicpm3"]
MOE = ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]
OURS = ["llama", "gemma2"]
TOKENS = 12


def prompts() -> list[list[int]]:
    """Forks of a prefix at odd lengths, one a prefix of another, and one that is apart."""
    rng = random.Random(3)
    base = [rng.randrange(3, 250) for _ in range(40)]
    tails = [base[:length] + [rng.randrange(3, 250) for _ in range(4)] for length in (13, 22, 37)]
    return [*tails, base[:30], base, [rng.randrange(3, 250) for _ in range(21)]]


PROMPTS = prompts()


def loaded(folder: Path) -> Any:
    shape = read_shape(folder, "transformers")
    files = ModelFiles(name="tiny", weights=folder, tokenizer=folder)
    return load_model(files, shape=shape, dtype=torch.float32)


@pytest.mark.parametrize("model_type", DENSE + MOE + OURS)
def test_engine_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """Cold, chunked, forked, retracted and from the cache: the tokens of the library's own lone run."""
    reference = save_tiny(tiny_config(model_type), tmp_path)
    expected = [greedy(reference, prompt, TOKENS) for prompt in PROMPTS]
    assert sum(len(set(one.ids)) > 3 for one in expected) > len(expected) / 2, "the model says too little"
    model = loaded(tmp_path)
    local = LocalScheduler(model, page_size=4, num_pages=28, chunk_tokens=17)
    for _ in "cold", "cached":
        results = local.complete(PROMPTS, max_tokens=TOKENS, ignore_eos=True)
        same = [assert_same(want, have.ids) for want, have in zip(expected, results, strict=True)]
        assert sum(same) >= len(same) - 1, "ties are the exception"
    assert local.scheduler.counters.retractions > 0
    assert sum(result.usage.cached_tokens for result in results if result.usage) > 20
