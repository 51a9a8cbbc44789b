"""Decoding steps of a mixture of experts, of the dense model of the same active size, and of transformers.

    python -m benchmarks.moe [--rows 1 32] [--layers 12] [--experts 64] [--top-k 8] [--formats int4 none]

Random weights in the shape of Qwen3-MoE on the CPU, bfloat16. The dense model's MLP has top-k times the size
of an expert, so that a row multiplies by as many weights in both, apart from the router. Steps have no
context. Contenders take turns in one process; each time is the processor time of the fastest of several
steps, each with other tokens. "of dense" is the target: 1.3 at one row. With more rows a mixture reads more
weights than the dense model: "read" is the share of the experts that a step chooses.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.timing import fastest
from ramify.kernels.registry import ops
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.quantization import Quantization, packing
from ramify.runtime.model.shape.hf_config import config_from_hf

PAGE, STEPS = 16, 16


def shapes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The configs of both models."""
    common = {
        "vocab_size": 4096,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "intermediate_size": args.top_k * args.size,
    }
    experts = {"num_experts": args.experts, "num_experts_per_tok": args.top_k, "norm_topk_prob": True}
    moe = {**common, **experts, "model_type": "qwen3_moe", "moe_intermediate_size": args.size}
    return {"experts": moe, "dense": {**common, "model_type": "qwen3"}}


def batches(vocab: int, rows: int) -> Iterator[torch.Tensor]:
    """(rows,) other tokens for each step."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, vocab, (rows,), generator=generator) for _ in range(STEPS)]
    return itertools.cycle(made)


def ours(shape: dict[str, Any], form: Quantization) -> Runner:
    model = dummy_model(config_from_hf(shape), dtype=torch.bfloat16)
    assert isinstance(model, Model)
    model.pack(packing(form, torch.bfloat16))
    pool = KvPool(model.config, num_pages=64, page_size=PAGE, dtype=torch.bfloat16)
    pool.k.zero_(), pool.v.zero_()
    runner = Runner(model, pool, ops("cpu"))
    assert runner.stacked
    return runner


def step_of(runner: Runner, rows: int) -> Callable[[], object]:
    tokens = batches(runner.model.config.vocab_size, rows)

    def step() -> object:
        ids = next(tokens).int().numpy()
        return runner.forward(
            pack([Extension(ids[row : row + 1], 0, 1, (row,)) for row in range(rows)], PAGE)
        )

    return step


def step_of_transformers(shape: dict[str, Any], rows: int) -> Callable[[], object]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    tokens = batches(shape["vocab_size"], rows)

    @torch.inference_mode()
    def step() -> object:
        return model.model(input_ids=next(tokens)[:, None], use_cache=False)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--formats", nargs="+", default=["int4", "none"], choices=["int4", "int8", "none"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, value in {"hidden": 1024, "layers": 12, "experts": 64, "size": 384, "top-k": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--without-transformers", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape_of = shapes(args)
    runners = {(name, form): ours(shape, form) for form in args.formats for name, shape in shape_of.items()}
    for rows in args.rows:
        calls = {key: step_of(runner, rows) for key, runner in runners.items()}
        if not args.without_transformers:
            calls["transformers", "none"] = step_of_transformers(shape_of["experts"], rows)
        times = dict(
            zip(calls, fastest(list(calls.values()), args.seconds, clock=time.process_time), strict=True)
        )
        share = 1 - (1 - args.top_k / args.experts) ** rows
        print(f"\n{rows} rows, {args.threads} threads; about {share:.0%} of the experts read")
        print(f"{'':16}{'format':>8}{'ms':>10}{'of dense':>10}{'of transformers':>17}")
        for (name, form), seconds in times.items():
            dense = seconds / times["dense", form] if ("dense", form) in times else float("nan")
            library = times.get(("transformers", "none"), float("nan"))
            print(f"{name:16}{form:>8}{1e3 * seconds:10.2f}{dense:10.2f}{seconds / library:17.2f}")


if __name__ == "__main__":
    main()
