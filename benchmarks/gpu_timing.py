"""Seconds on a GPU: several calls in turn, the cache emptied before each, medians of device events."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 512 << 20
"""Written before every measured call: ten times the cache of an H100."""


class Timer:
    """Measures on the current device."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def medians(
        self, calls: Mapping[str, Callable[[], object]], *, seconds: float = 0.3, least: int = 15
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Seconds of each call that runs; why the others do not.

        Each is captured in a CUDA graph where that is possible, so that the host's launches do not count, and
        all are replayed in turn, so that the card's clock and heat are shared alike.
        """
        ready: dict[str, Callable[[], object]] = {}
        failed: dict[str, str] = {}
        for name, call in calls.items():
            try:
                ready[name] = captured(call)
            except Exception as error:  # compilers and libraries fail with types of their own
                failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        times: dict[str, list[float]] = {name: [] for name in ready}
        spent = 0.0
        while ready and (spent < seconds * len(ready) or min(map(len, times.values())) < least):
            for name, call in ready.items():
                times[name].append(self._once(call))
                spent += times[name][-1]
            if len(times[name]) >= 400:
                break
        return {name: statistics.median(taken) for name, taken in times.items()}, failed

    def _once(self, call: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of `call` as a graph; `call` itself where it cannot be captured. Raises what `call` raises."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def ceilings(timer: Timer) -> tuple[float, float]:
    """Bytes a second, read plus written, of a 2 GiB copy, and FLOP/s of an 8192³ bfloat16 product."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    times, failed = timer.medians({"copy": lambda: target.copy_(source), "product": lambda: a @ b})
    if failed:
        raise RuntimeError(f"the ceilings cannot be measured: {failed}")
    return 2 * source.nbytes / times["copy"], 2 * 8192**3 / times["product"]
