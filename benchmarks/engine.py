"""The whole engine over dummy weights, against the ceilings of the device.

    python -m benchmarks.engine [--shape benchmarks/configs/qwen3-14b.json] [--deterministic] [--json FILE]

Measures two ceilings first: the bandwidth of a large copy (read plus written) and the rate of a large matrix
product in the model's dtype. Then, through a real scheduler:

decode     tokens/s at several batch sizes; the roofline is the time in which a copy would move the weights
           and the KV of a step. `host` is a step's time less the device's time, in ms and as a share.
prefill    tokens/s of one long prompt in chunks; the roofline is the time in which the matrix product would
           do as many operations.
cascade    a step of many branches over one prefix, with cascade on and off.

Every measurement is repeated, once nothing is compiled or captured any more; `+-` is the range of the times
as a share of their median. A row says how many of its timed steps still were not warm. Also
printed: kernels compiled, CUDA graphs captured, and memory, after everything was built and at the end.

With --deterministic, decode and prefill are measured again in that mode, and the ratio is printed. The KV of
prompts is not computed for decode and cascade: pages of random numbers stand for it. Without --shape the
model has the shape of Llama-3.1-8B on a CUDA device, and of SmolLM2-135M on the CPU. Shapes with experts,
sliding windows or states have no roofline here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.engine_local import MOST_WARM, LocalEngine, Rounds, Step
from benchmarks.gpu_visit.device import free
from benchmarks.roofline import ceilings, dense, kv_bytes, prefill_flop, weight_bytes
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.device import resolve_device
from ramify.runtime.executor.memory import with_defaults_of

CONFIGS = Path(__file__).parent / "configs"
SUFFIX = 64
"""Tokens of each branch after the shared prefix."""
ROUNDS = 2
"""Timed rounds of decodes."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the measurements.

    context : tokens of each prompt in the measurement of decodes
    steps : decoding steps of a timed round
    prompt : tokens of the prompt in the measurement of prefills
    chunk : prompt tokens of a step; None: the device's default
    branches, prefixes : for the cascade: the number of branches, and the tokens of each prefix they share
    """

    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    steps: int = 32
    prompt: int = 8192
    chunk: int | None = None
    branches: int = 64
    prefixes: tuple[int, ...] = (1024, 8192, 32768)


TINY = Sizes(batches=(1, 3), context=64, steps=4, prompt=100, chunk=32, branches=4, prefixes=(64, 128))
"""Sizes for a rehearsal on the CPU."""


def engine_config(
    sizes: Sizes, device: Literal["auto", "cpu", "cuda"] = "auto", **changes: Any
) -> EngineConfig:
    """The engine's configuration, with enough pages of the default size for the largest measurement."""
    config = with_defaults_of(EngineConfig(), resolve_device(EngineConfig(device=device)))
    page = changes.pop("page_size", config.page_size)
    beside = MOST_WARM[0] + ROUNDS * sizes.steps + 2 * page
    prefix = max(sizes.prefixes, default=0)
    positions = max(
        max(sizes.batches, default=0) * (sizes.context + beside),
        2 * sizes.prompt,
        prefix + sizes.branches * (SUFFIX + beside),
    )
    return EngineConfig(
        device=device,
        page_size=page,
        num_pages=positions // page + 64,
        context_length=max(sizes.context, sizes.prompt, prefix) + SUFFIX + beside,
        max_running=max((*sizes.batches, sizes.branches)),
        chunk_tokens=sizes.chunk or config.chunk_tokens,
        max_waiting=4096,
        speculation=False,  # a step is to give one token a request
        **changes,
    )


def decodes(engine: LocalEngine, sizes: Sizes, bandwidth: float) -> Iterator[Row]:
    """A row for each batch size.

    bandwidth : bytes a second of the device's large copy
    """
    for batch in sizes.batches:
        prompts = [engine.prompt(sizes.context) for _ in range(batch)]
        for prompt in prompts:
            engine.know(prompt)
        step = engine.decode(prompts, sizes.steps, ROUNDS)
        row = {"case": f"decode {batch} x {sizes.context}", **_timed(step.rounds), **_of_device(step)}
        row["tokens_s"] = batch / step.wall
        config = engine.model.config
        if dense(config):
            floor = weight_bytes(engine.model) + kv_bytes(config, round(step.positions), engine.dtype)
            row["of_roofline"] = floor / bandwidth / step.wall
        yield row


def prefills(engine: LocalEngine, sizes: Sizes, flops: float) -> Iterator[Row]:
    """A row for the prefill of one prompt.

    flops : operations a second of the device's large product
    """
    rounds = engine.prefills(sizes.prompt)
    row = {"case": f"prefill {sizes.prompt}", **_timed(rounds), "tokens_s": sizes.prompt / rounds.median}
    config = engine.model.config
    if dense(config):
        row["of_roofline"] = prefill_flop(config, sizes.prompt) / flops / rounds.median
    yield row


def branches(engine: LocalEngine, sizes: Sizes) -> Iterator[Row]:
    for length in sizes.prefixes:
        prefix = engine.prompt(length)
        prompts = [prefix + engine.prompt(SUFFIX) for _ in range(sizes.branches)]
        for prompt in prompts:
            engine.know(prompt)
        step = engine.decode(prompts, sizes.steps, ROUNDS)
        row = {"case": f"cascade, {sizes.branches} over {length}", **_timed(step.rounds), **_of_device(step)}
        yield {**row, "tokens_s": sizes.branches / step.wall}


def compared(row: Row, base: Row, of: str) -> Row:
    """`row` with the ratio of its speed to that of `base`. `of` names `base`."""
    return {**row, "ratio": base["seconds"] / row["seconds"], "of": of}


def _timed(rounds: Rounds) -> Row:
    found = {"seconds": rounds.median, "spread": rounds.spread, "rounds": rounds.seconds}
    return {**found, "warm": rounds.warm, "unsettled": rounds.unsettled}


def _of_device(step: Step) -> Row:
    return {"device_s": step.device, "host_s": step.exposed}


def line(row: Row) -> str:
    if "skipped" in row:
        return f"{row['case']:<32} skipped: {row['skipped']}"
    text = f"{row['case']:<32}{row['seconds'] * 1e3:>10.2f}{row['spread']:>7.1%}{row['tokens_s']:>10.0f}"
    text += f"{row['of_roofline']:>12.0%}" if "of_roofline" in row else f"{'':>12}"
    if "host_s" in row:
        text += f"{row['host_s'] * 1e3:>10.3f}{row['host_s'] / row['seconds']:>8.1%}"
    if "ratio" in row:
        text += f"   {row['ratio']:.2f}x {row['of']}"
    if row["unsettled"]:
        text += f"   {row['unsettled']} timed steps were not warm"
    return text


def state(facts: Row) -> str:
    compiled, captured, memory = facts["compiled"], facts["captured"], facts["memory"]
    text = f"{compiled['kernels']} kernels compiled in {compiled['seconds']:.1f} s, "
    text += f"{compiled['loaded']} loaded; "
    text += f"{captured['graphs']} graphs captured in {captured['seconds']:.1f} s; GB: "
    return text + ", ".join(f"{name} {size / 1e9:.2f}" for name, size in memory.items() if size)


def measure(args: argparse.Namespace, sizes: Sizes, shape: Path, facts: Row) -> None:
    """Print rows as they come. Add this engine's facts to `facts`, and write rows and `facts` to the file."""
    rows: list[Row] = []

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))

    def show(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)
        write()  # after every row, so that an interrupted run keeps its figures

    def engine_of(name: str, **changes: Any) -> LocalEngine:
        engine = LocalEngine(shape, engine_config(sizes, args.device, **changes))
        note(name, engine)
        return engine

    def note(name: str, engine: LocalEngine) -> None:
        facts.setdefault("states", {})[name] = engine.facts()
        print(f"{name}: {state(engine.facts())}", flush=True)
        write()

    plainly: dict[str, Any] = (
        {"deterministic": False} if args.deterministic else {}
    )  # on the CPU it is the default
    engine = engine_of("built", **plainly)
    bandwidth, flops = ceilings(engine.device, engine.dtype)
    facts |= {"model": shape.stem, "dtype": str(engine.dtype)[6:]}
    facts |= {"bandwidth": bandwidth, "flops": flops, "weight_bytes": weight_bytes(engine.model)}
    print(f"ceilings: copy {bandwidth / 1e9:.1f} GB/s, products {flops / 1e12:.2f} TFLOP/s")
    columns = f"{'ms':>10}{'+-':>7}{'tokens/s':>10}{'of roofline':>12}{'host ms':>10}{'share':>8}"
    print(f"{'':<32}{columns}")
    for row in itertools.chain(decodes(engine, sizes, bandwidth), prefills(engine, sizes, flops)):
        show(row)
    cascades = list(branches(engine, sizes)) if engine.cascades else []
    note("measured", engine)
    device = engine.device
    del engine
    free(device)
    if not cascades:
        show({"case": f"cascade, {sizes.branches} branches", "skipped": "these kernels have none"})
    else:
        for row, flat in zip(
            cascades, branches(engine_of("without cascade", cascade=False, **plainly), sizes), strict=True
        ):
            show({**compared(row, flat, "without it"), "without_s": flat["seconds"]})
        free(device)
    if args.deterministic:
        plain = {row["case"]: row for row in rows}
        other = engine_of("deterministic", deterministic=True)
        for row in itertools.chain(decodes(other, sizes, bandwidth), prefills(other, sizes, flops)):
            found = compared(row, plain[row["case"]], "the speed without it")
            show({**found, "case": f"deterministic {row['case']}"})


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, help="a config.json, of benchmarks/configs for instance")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    default = Sizes()
    parser.add_argument("--batches", type=int, nargs="+", default=default.batches)
    parser.add_argument("--context", type=int, default=default.context, help="tokens of a decode's prompt")
    parser.add_argument("--steps", type=int, default=default.steps, help="of a timed round")
    parser.add_argument("--prompt", type=int, default=default.prompt, help="tokens of the prefill")
    parser.add_argument("--chunk", type=int, help="prompt tokens of a step; by default the device's")
    parser.add_argument("--branches", type=int, default=default.branches)
    parser.add_argument("--prefixes", type=int, nargs="*", default=default.prefixes)
    parser.add_argument("--deterministic", action="store_true", help="measure what that mode costs as well")
    parser.add_argument("--json", type=Path, help="write every figure to this file as well")
    args = parser.parse_args(arguments)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)}
    sizes = Sizes(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    )
    return args, sizes


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    args, sizes = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.engine needs a CUDA device: torch.cuda.is_available() is False.",
            file=sys.stderr,
        )
        return 2
    cuda = torch.cuda.is_available() and args.device != "cpu"
    shape = args.shape or CONFIGS / ("llama-3.1-8b.json" if cuda else "smollm2-135m.json")
    began = time.perf_counter()
    print(f"{shape.stem}, dummy weights", flush=True)
    facts: Row = {"device": "cpu"}
    if cuda:
        from benchmarks.kernels import versions

        facts = dict(versions())
    measure(args, sizes, shape, facts)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str)))
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
