"""The whole engine over dummy weights, against what the device can read and compute.

    python -m benchmarks.engine [--shape benchmarks/configs/qwen3-14b.json] [--deterministic] [--json FILE]

Measures two ceilings first: the bandwidth of a large copy (read plus written) and the rate of a large matrix
product in the model's dtype. Then, through a real scheduler:

decode     tokens/s at several batch sizes; the roofline is the time in which a copy would move the weights
           and the KV of a step. `host` is a step's time less the device's time, also as a share.
prefill    tokens/s of one long prompt in chunks; the roofline is the time of as many operations in products.
cascade    a step of many branches over one prefix with cascade on and off.

With --deterministic decode and prefill are measured once more in that mode, and the ratio is printed. The
KV of prompts is not computed for decode and cascade: pages of zeros stand for it. On a CUDA device the model
is Llama-3.1-8B's shape, on the CPU SmolLM2-135M's, where nothing else is asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.engine_local import LocalEngine
from benchmarks.roofline import ceilings, kv_bytes, prefill_flop, weight_bytes
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.device import resolve_device
from ramify.runtime.executor.device_defaults import with_defaults_of

CONFIGS = Path(__file__).parent / "configs"
SUFFIX = 64
"""Tokens of each branch behind the shared prefix."""

Row = dict[str, Any]


def engine_config(args: argparse.Namespace, **changes: Any) -> EngineConfig:
    """With pages for the largest measurement, of the size that the device has by default."""
    page = page_size_of(args.device)
    positions = max(
        max(args.batches) * (args.context + 2 * page + args.steps),
        2 * args.prompt,
        max(args.prefixes, default=0) + args.branches * (SUFFIX + 2 * page + args.steps),
    )
    longest = max(args.context, args.prompt, max(args.prefixes, default=0)) + SUFFIX + args.steps + 64
    return EngineConfig(
        device=args.device,
        page_size=page,
        num_pages=positions // page + 64,
        context_length=longest,
        max_running=max(*args.batches, args.branches),
        chunk_tokens=args.chunk,
        max_waiting=4096,
        **changes,
    )


def page_size_of(device: Literal["auto", "cpu", "cuda"]) -> int:
    found = with_defaults_of(EngineConfig(), resolve_device(EngineConfig(device=device))).page_size
    assert found is not None
    return found


def decodes(engine: LocalEngine, args: argparse.Namespace, bandwidth: float) -> Iterator[Row]:
    for batch in args.batches:
        prompts = [engine.prompt(args.context) for _ in range(batch)]
        for prompt in prompts:
            engine.know(prompt)
        step = engine.decode(prompts, args.steps)
        positions = batch * (args.context + args.steps // 2)
        floor = weight_bytes(engine.model) + kv_bytes(engine.model.config, positions, engine.dtype)
        yield {
            "case": f"decode {batch} x {args.context}",
            "seconds": step.wall,
            "device_s": step.device,
            "host_s": step.exposed,
            "tokens_s": batch / step.wall,
            "of_roofline": floor / bandwidth / step.wall,
        }


def prefills(engine: LocalEngine, args: argparse.Namespace, flops: float) -> Iterator[Row]:
    engine.prefill(args.chunk)  # compiles what is not compiled yet
    taken = engine.prefill(args.prompt)
    floor = prefill_flop(engine.model.config, args.prompt) / flops
    yield {
        "case": f"prefill {args.prompt}",
        "seconds": taken,
        "tokens_s": args.prompt / taken,
        "of_roofline": floor / taken,
    }


def branches(engine: LocalEngine, args: argparse.Namespace) -> dict[int, float]:
    """Seconds of a step of many branches over one prefix, by the prefix's length."""
    found = {}
    for length in args.prefixes:
        prefix = engine.prompt(length)
        prompts = [prefix + engine.prompt(SUFFIX) for _ in range(args.branches)]
        for prompt in prompts:
            engine.know(prompt)
        found[length] = engine.decode(prompts, args.steps).wall
    return found


def line(row: Row) -> str:
    if "skipped" in row:
        return f"{row['case']:<32} skipped: {row['skipped']}"
    text = f"{row['case']:<32}{row['seconds'] * 1e3:>10.2f}{row['tokens_s']:>12.0f}"
    text += f"{row['of_roofline']:>12.0%}" if "of_roofline" in row else f"{'':>12}"
    if "host_s" in row:
        text += f"{row['host_s'] * 1e3:>10.3f}{row['host_s'] / row['seconds']:>8.1%}"
    if "ratio" in row:
        text += f"   {row['ratio']:.2f}x {row['of']}"
    return text


def measure(args: argparse.Namespace, shape: Path, facts: Row) -> None:
    """Prints rows as they come, and writes them to the file beside `facts`, to which it adds its own."""
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if args.json:  # after every row, so that an interrupted run keeps its figures
            args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))

    plainly: dict[str, Any] = (
        {"deterministic": False} if args.deterministic else {}
    )  # on the CPU it is the default
    engine = LocalEngine(shape, engine_config(args, **plainly))
    bandwidth, flops = ceilings(engine.device, engine.dtype)
    facts |= {"model": shape.stem, "dtype": str(engine.dtype)[6:]}
    facts |= {"bandwidth": bandwidth, "flops": flops, "weight_bytes": weight_bytes(engine.model)}
    print(f"ceilings: copy {bandwidth / 1e9:.1f} GB/s, products {flops / 1e12:.2f} TFLOP/s")
    print(f"{'':<32}{'ms':>10}{'tokens/s':>12}{'of roofline':>12}{'host ms':>10}{'share':>8}")
    for row in [*decodes(engine, args, bandwidth), *prefills(engine, args, flops)]:
        show(row)
    cascades = branches(engine, args) if engine.cascades else {}
    del engine
    _free()
    if not cascades:
        show({"case": f"cascade, {args.branches} branches", "skipped": "these kernels have none"})
    else:
        flat = branches(LocalEngine(shape, engine_config(args, cascade=False, **plainly)), args)
        _free()
        for length, taken in cascades.items():
            case = f"cascade, {args.branches} over {length}"
            ratio = flat[length] / taken
            tokens = args.branches / taken
            show({"case": case, "seconds": taken, "tokens_s": tokens, "ratio": ratio, "of": "without it"})
    if args.deterministic:
        plain = {row["case"]: row for row in rows}
        other = LocalEngine(shape, engine_config(args, deterministic=True))
        for row in [*decodes(other, args, bandwidth), *prefills(other, args, flops)]:
            ratio = plain[row["case"]]["seconds"] / row["seconds"]
            show(
                {**row, "case": f"deterministic {row['case']}", "ratio": ratio, "of": "the speed without it"}
            )


def _free() -> None:
    """Give back the memory of engines that are gone, so that the next one finds it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, help="a config.json, of benchmarks/configs for instance")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt that decodes")
    parser.add_argument("--steps", type=int, default=32, help="that are timed")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prefill")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a step")
    parser.add_argument("--branches", type=int, default=64)
    parser.add_argument("--prefixes", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--deterministic", action="store_true", help="measure what that mode costs as well")
    parser.add_argument("--json", type=Path, help="write every figure to this file as well")
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    shape = args.shape or CONFIGS / ("llama-3.1-8b.json" if cuda else "smollm2-135m.json")
    began = time.perf_counter()
    print(f"{shape.stem}, dummy weights", flush=True)
    facts: Row = {"device": "cpu"}
    if cuda:
        from benchmarks.kernels import versions

        facts = dict(versions())
    measure(args, shape, facts)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str)))
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
