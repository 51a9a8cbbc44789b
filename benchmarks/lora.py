"""The cost of LoRA adapters in a decoding step: a batch with several adapters against the same batch without.

    python -m benchmarks.lora [--batch 32] [--adapters 8] [--rank 16] [--context 256] [--threads 2]
                              [--seconds 4]

The model is the default one in bfloat16, with random weights. Adapters are random. The steps alternate in one
process, and a time is the median of the processor's time over all threads, divided by their number; the same
ratio is given for the least of the times. "half" gives every second row an adapter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ramify.kernels.machine.threads import set_threads
from ramify.kernels.registry import ops
from ramify.kernels.weights.lora import LoraWeight
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.context import with_context
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.hub.resolve import resolve
from ramify.runtime.model.layers import Linear
from ramify.runtime.model.load import dummy_model, read_config

PAGE = 16
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"all-linear": ALL, "q_proj, v_proj": ("q_proj", "v_proj")}


def load(model: Model, slots: range, targets: tuple[str, ...], rank: int) -> None:
    """Random adapters in these slots."""
    for linear in model.modules():
        if not isinstance(linear, Linear):
            continue
        parts, start = [], 0
        for name, rows in linear.parts.items():
            if name in targets:
                a, b = torch.randn(rank, linear.inputs), torch.randn(rows, rank)
                parts.append((start, a.bfloat16(), b.bfloat16(), 1e-3))
            start += rows
        for slot in slots:
            if parts:
                linear.lora[slot] = LoraWeight.from_parts(
                    [(at, a.clone(), b.clone(), s) for at, a, b, s in parts]
                )


def measured(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """The processor's seconds of each call, which alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            began = time.process_time()
            call()
            times[name].append(time.process_time() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 32), ("adapters", 8), ("rank", 16), ("context", 256), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    set_threads(options.threads)
    torch.manual_seed(0)
    config = with_context(read_config(resolve(DEFAULT_MODEL, weights=False).weights), 2048)
    model = dummy_model(config, dtype=torch.bfloat16, packed=True)
    assert isinstance(model, Model)
    pages = -(-(options.context + 1) // PAGE)
    pool = KvPool(config, num_pages=pages * options.batch, page_size=PAGE, dtype=torch.bfloat16)
    pool.k.normal_()
    pool.v.normal_()
    runner = Runner(model, pool, ops("cpu"))
    for place, (title, targets) in enumerate(TARGETS.items()):
        load(model, range(place * options.adapters, (place + 1) * options.adapters), targets, options.rank)
        print(f"rank {options.rank}, {title}, {options.batch} requests at {options.context} tokens")

        def step(count: int, every: int, first: int = place * options.adapters) -> Callable[[], object]:
            rows = range(options.batch)
            slots = [first + row // every % count if count and row % every == 0 else -1 for row in rows]
            extensions = [
                Extension(
                    np.zeros(options.context + 1, np.int32),
                    options.context,
                    options.context + 1,
                    range(row * pages, (row + 1) * pages),
                    lora=slot,
                )
                for row, slot in enumerate(slots)
            ]
            batch = pack(extensions, PAGE)
            return lambda: runner.forward(batch)

        several = {f"{options.adapters} adapters": (options.adapters, 1), "one adapter": (1, 1)}
        several |= {f"{options.adapters} adapters, half": (options.adapters, 2)}
        calls = {name: step(*given) for name, given in ({"none": (0, 1)} | several).items()}
        times = measured(calls, options.seconds)
        for name, values in times.items():
            median = statistics.median(values) / statistics.median(times["none"])
            least = min(values) / min(times["none"])
            each = 1e3 * statistics.median(values) / options.threads
            print(f"  {name:24} {each:7.2f} ms  {median:5.2f}x median  {least:5.2f}x least")


if __name__ == "__main__":
    main()
