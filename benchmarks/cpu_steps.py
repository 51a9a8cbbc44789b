"""Decoding steps of a GGUF file on the CPU by the number of rows: the ceiling that bounds them, their parts.

    python -m benchmarks.cpu_steps [FILE.gguf ...] [--rows 1 4 8 16 32 64 128] [--prompt 512] [--context 256]
        [--steps 24] [--threads 2] [--parts] [--masked 0.5] [--processor avx2] [--kv-cache-dtype auto int8]

Two ceilings are measured in the same run: the bandwidth of reading 512 MiB with all threads, and the
operations a second of a prefill of this model. Both are measured before and after the steps,
and the higher value counts. *read*: bytes of weights, scales and KV of a step, over its time. *computed*:
operations of the step's products, over its time. The figure that is nearer to its ceiling shows the bound of
the step.

With `--parts` it prints where the time of a step goes instead (`step_parts.PARTS`): of a whole step of the
scheduler, as users have it. `waiting` is the share of the step in which the second thread does not work.
`--masked` is the share of the requests under a grammar. `--processor` compiles the kernels for an older
processor than this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_local import LocalEngine
from benchmarks.roofline import kv_bytes, prefill_flop, read_bandwidth, weight_bytes
from benchmarks.step_parts import PARTS, StepParts
from ramify.runtime.config import DEFAULT_MODEL, EngineConfig
from ramify.runtime.inspect.resolve import resolve

PAGE_SIZE = 16

_AVX2 = "+sse2,+ssse3,+avx,+avx2,+fma,+f16c"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq"
PROCESSORS = {
    "avx2": ("haswell", _AVX2),
    "avx512": ("skylake-avx512", _AVX512),
    "avx512-vnni-bf16": ("cooperlake", f"{_AVX512},+avx512vnni,+avx512bf16"),
}
"""LLVM's name and instruction sets of processors for which kernels may be compiled here."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", action="store_true", help="print the parts of a step")
    parser.add_argument("--masked", type=float, default=0.0, help="share of requests under a grammar")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=["auto", "int8"], default=["auto"])
    parser.add_argument("--processor", choices=PROCESSORS, help="compile for this one instead of the host")
    options = parser.parse_args(arguments)
    if options.processor is not None:
        name, features = PROCESSORS[options.processor]
        if os.environ.get("NUMBA_CPU_NAME") != name:  # read when numba is imported, so in a new process
            chosen = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
            again = sys.argv[1:] if arguments is None else arguments
            command = [sys.executable, "-m", "benchmarks.cpu_steps", *again]
            os.execve(sys.executable, command, {**os.environ, **chosen})
    torch.set_num_threads(options.threads)
    for file in options.files or [resolve(DEFAULT_MODEL).weights]:
        for pages in options.kv_cache_dtype:
            measure(file, options, pages)


def measure(file: Path, options: argparse.Namespace, kv_cache_dtype: Any) -> None:
    prompt = options.prompt
    most = options.context + options.steps * options.repeat
    pages = max(options.rows) * (most // PAGE_SIZE + 8) + prompt // PAGE_SIZE
    config = EngineConfig(
        device="cpu",
        page_size=PAGE_SIZE,
        num_pages=pages + 64,
        context_length=max(most, prompt) + 128,
        max_running=max(options.rows),
        chunk_tokens=prompt,
        max_waiting=4096,
        threads=options.threads,
        speculation=False,
        kv_cache_dtype=kv_cache_dtype,
    )
    engine = LocalEngine(file, config)
    if options.parts:
        print_parts(file, engine, options)
        return
    model = engine.model.config
    one = prefill_flop(model, prompt) / prompt
    engine.prefill(prompt)  # allocates working memory
    bandwidth = read_bandwidth()
    prefill = min(engine.prefill(prompt) for _ in range(options.repeat))
    times = {}
    for rows in options.rows:
        times[rows] = min(step(engine, rows, options) for _ in range(options.repeat))
    bandwidth = max(bandwidth, read_bandwidth())
    prefill = min(prefill, *(engine.prefill(prompt) for _ in range(options.repeat)))
    rate = one * prompt / prefill
    weights = weight_bytes(engine.model)
    print(f"{file.name}, KV in {engine.dtype}: {weights / 1e6:.0f} MB a step; ", end="")
    print(f"reads {bandwidth / 1e9:.1f} GB/s, ", end="")
    print(f"a prefill of {prompt} computes {rate / 1e9:.0f} GFLOP/s")
    print(f"{'rows':>6}{'ms':>9}{'tokens/s':>10}{'read GB/s':>11}{'':>6}{'GFLOP/s':>9}{'':>6}  bound by")
    for rows, seconds in times.items():
        positions = rows * (options.context + options.steps // 2)
        read = (weights + kv_bytes(model, positions, engine.dtype)) / seconds
        # The products of a row and its head.
        computed = rows * (one + 2 * model.hidden_size * model.vocab_size) / seconds
        bound = "reading" if read / bandwidth > computed / rate else "computing"
        shares = f"{read / 1e9:>11.1f}{read / bandwidth:>6.0%}{computed / 1e9:>9.0f}{computed / rate:>6.0%}"
        print(f"{rows:>6}{seconds * 1e3:>9.2f}{rows / seconds:>10.0f}{shares}  {bound}", flush=True)


def print_parts(file: Path, engine: LocalEngine, options: argparse.Namespace) -> None:
    where = options.processor or "this processor"
    print(f"{file.name}, compiled for {where}, {options.threads} threads")
    print(f"{'rows':>6}{'ms':>9}" + "".join(f"{name:>11}" for name in (*PARTS, "waiting")))
    for rows in options.rows:
        parts = StepParts(engine, options.threads)
        prompts = known(engine, rows, options)
        masked = round(options.masked * rows)
        steps = options.steps * options.repeat
        with engine.decoding(prompts, steps, masked) as step, parts.timing(step) as timed:
            seconds = statistics.median(timed_call(timed) for _ in range(steps))
        shares = "".join(f"{share:>11.1%}" for share in parts.shares().values())
        print(f"{rows:>6}{seconds * 1e3:>9.2f}{shares}", flush=True)


def timed_call(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def known(engine: LocalEngine, rows: int, options: argparse.Namespace) -> list[list[int]]:
    """Prompts whose KV is put into the tree, not computed."""
    prompts = [engine.prompt(options.context) for _ in range(rows)]
    for prompt in prompts:
        engine.know(prompt)
    return prompts


def step(engine: LocalEngine, rows: int, options: argparse.Namespace) -> float:
    """Seconds of one decoding step of `rows` requests."""
    return engine.decode(known(engine, rows, options), options.steps, rounds=1).wall


if __name__ == "__main__":
    main()
