"""Time by kernel: torch's profiler over five decoding steps at 1, 32 and 256, and over a prompt of 4,096.

A row for each workload, then one for each of its longest kernels. A kernel in a CUDA graph counts as any
other. Without a CUDA device, operations of the CPU are counted instead of kernels.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import Sizes
from benchmarks.gpu_visit.device import device_of, wait
from benchmarks.gpu_visit.engines import TINY, build
from benchmarks.gpu_visit.figures import Figures

SIZES = Sizes(batches=(1, 32, 256), prompt=4096, chunk=8192, branches=0, prefixes=())
STEPS = 5
LONGEST = 12
"""Number of kernels that have a row."""
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
"""Beginnings of the names of calls that put work on a stream."""
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@torch.inference_mode()
def run(figures: Figures) -> None:
    sizes, device = TINY if figures.tiny else SIZES, device_of(figures)
    # Replays may crash once CUPTI is unloaded, so it is loaded before any capture, and stays loaded.
    os.environ["TEARDOWN_CUPTI"] = "0"
    with figures.attempt("profiler"):
        recorded(lambda: timed(lambda: torch.zeros(8, device=device).add_(1), device), device)
    engine = build(figures, "profile", sizes)
    for batch in sizes.batches:
        case = f"decode {batch} x {sizes.context}"
        with figures.attempt(case):
            prompts = [engine.prompt(sizes.context) for _ in range(batch)]
            for prompt in prompts:
                engine.know(prompt)
            with engine.decoding(prompts, 2 * STEPS) as step:
                record(figures, case, partial(timed, partial(_repeat, step), device), STEPS, device)
    case = f"prefill {sizes.prompt}"
    with figures.attempt(case):
        engine.prefills(sizes.prompt, 1)
        record(figures, case, lambda: engine.prefill(sizes.prompt), 1, device)


def record(figures: Figures, case: str, run: Callable[[], float], steps: int, device: torch.device) -> None:
    """Add rows about `run`, which takes `steps` steps and returns their seconds. All numbers are for one
    step.

    seconds, profiled_s : its time without the profiler, and with it
    busy_s : seconds in which the device had work
    idle : share of the time without device work, from the first kernel's start to the last kernel's end
    waits_s, host_s : seconds in which the host waited for the device, and the rest of `profiled_s`
    """
    seconds = run() / steps
    events, profiled = recorded(run, device)
    kernels, calls = split(events, device)
    if not kernels:
        raise RuntimeError(f"the profiler saw no kernel on {device}, and {len(calls)} events on the host")
    busy, span = occupied(kernels)
    total = sum(_seconds(event, device) for event in kernels)
    waits = sum(event.time_range.elapsed_us() for event in calls if event.name in WAITS) / 1e6 / steps
    figures.add(
        case,
        seconds=seconds,
        profiled_s=profiled / steps,
        busy_s=busy / steps,
        idle=1 - busy / span,
        kernels=len(kernels) / steps,
        waits_s=waits,
        host_s=profiled / steps - waits,
        launches={start: sum(event.name.startswith(start) for event in calls) / steps for start in LAUNCHES},
    )
    by_name: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in kernels:
        by_name[event.name] += _seconds(event, device)
        counts[event.name] += 1
    for name, taken in by_name.most_common(LONGEST):
        figures.add(
            f"{case}: {name[:80]}",
            seconds=taken / steps,
            share=taken / total if total else 0.0,
            calls=counts[name] / steps,
        )


def recorded(run: Callable[[], float], device: torch.device) -> tuple[Any, float]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as found:
        taken = run()
    return found.events(), taken


def timed(run: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def split(events: Iterable[Any], device: torch.device) -> tuple[list[Any], list[Any]]:
    """(events of the device, calls of the host). On the CPU both are all operations."""
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]
    calls = [event for event in events if event.device_type == DeviceType.CPU]
    if device.type == "cpu":
        return calls, calls
    return [event for event in events if event.device_type == DeviceType.CUDA], calls


def occupied(kernels: Iterable[Any]) -> tuple[float, float]:
    """(seconds in which any of `kernels` ran, seconds from the start of the first to the end of the last)."""
    ranges = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, end = 0.0, ranges[0][0]
    for low, high in ranges:
        busy += max(0.0, high - max(low, end))
        end = max(end, high)
    return busy / 1e6, max(end - ranges[0][0], 1e-9) / 1e6


def _seconds(event: Any, device: torch.device) -> float:
    taken = event.self_cpu_time_total if device.type == "cpu" else event.time_range.elapsed_us()
    return float(taken) / 1e6


def _repeat(step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()
