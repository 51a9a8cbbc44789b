"""Output tokens per second at many concurrent requests, beside `transformers` generate, in one run.

    python -m benchmarks.throughput [--requests 32] [--dtype float32] [--rounds 3]

The engine and transformers alternate, so that a drift of the machine's speed hits both. transformers
gets its requests one after the other, which is how it is used where nothing batches for it, and once
more as one padded batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from ramify.runtime.engine import Engine
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from tests.default_model import load_reference


def prompts_of(tokenizer: Any, count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that share nothing, so that only batching can help."""
    rng = random.Random(seed)
    usable = [token for token in range(1000, 40_000) if token not in tokenizer.all_special_ids]
    return [[rng.choice(usable) for _ in range(length)] for _ in range(count)]


def ours(engine: Engine, prompts: list[list[int]], tokens: int) -> float:
    engine.flush_cache()
    began = time.perf_counter()
    results = engine.complete_many(
        [(tuple(prompt),) for prompt in prompts], max_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    took = time.perf_counter() - began
    assert all(len(result.ids) == tokens for result in results)
    return len(prompts) * tokens / took


def theirs(model: Any, prompts: list[list[int]], tokens: int, *, batched: bool) -> float:
    groups = [prompts] if batched else [[prompt] for prompt in prompts]
    began = time.perf_counter()
    for group in groups:
        ids = torch.tensor(group)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == len(group[0]) + tokens
    return len(prompts) * tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument(
        "--alone", type=int, default=4, help="of these, how many transformers runs one by one"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()

    files = resolve("SmolLM2-135M-Instruct")
    tokenizer = load_tokenizer(files.tokenizer)
    oracle = load_reference(files, getattr(torch, arguments.dtype))
    figures: dict[str, list[float]] = {
        "ramify": [],
        "transformers, one by one": [],
        "transformers, one batch": [],
    }
    with Engine(dtype=arguments.dtype) as engine:
        for round_ in range(arguments.rounds + 1):
            prompts = prompts_of(tokenizer, arguments.requests, arguments.prompt_tokens, round_)
            figures["ramify"].append(ours(engine, prompts, arguments.tokens))
            figures["transformers, one by one"].append(
                theirs(oracle, prompts[: arguments.alone], arguments.tokens, batched=False)
            )
            figures["transformers, one batch"].append(theirs(oracle, prompts, arguments.tokens, batched=True))
    print(
        f"{arguments.requests} requests, {arguments.prompt_tokens} tokens in, {arguments.tokens} out,"
        f" {arguments.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__};"
        f" output tokens/s, median of {arguments.rounds} rounds after a warm-up"
    )
    base = statistics.median(figures["transformers, one by one"][1:])
    for name, values in figures.items():
        middle = statistics.median(values[1:])
        print(f"{name:28} {middle:8.1f}   {middle / base:5.2f}x")


if __name__ == "__main__":
    main()
