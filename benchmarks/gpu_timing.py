"""Seconds on a device: several calls in turn, the cache emptied before each, medians of device events.

On the CPU, which is for rehearsals, calls are timed by the host's clock, few times, and from a warm cache.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch

FLUSH_BYTES = 512 << 20
"""Bytes that are read before every measured call, to empty the cache: ten times the cache of an H100. The
bytes are not written: after writes, the cache would hold lines to be written back during the call."""
MOST_CALLS = 400


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of a call.

    seconds : the median of all runs
    spread : the difference between the medians of the first and the second half of the runs, as a share of
        `seconds`
    captured : whether the call was replayed as a CUDA graph; if not, the host's launches count too. None on
        the CPU
    """

    seconds: float
    spread: float
    captured: bool | None

    @staticmethod
    def of(times: list[float], captured: bool | None) -> Timing:
        whole = statistics.median(times)
        halves = [statistics.median(part) for part in (times[: len(times) // 2], times[len(times) // 2 :])]
        return Timing(whole, abs(halves[1] - halves[0]) / whole, captured)


class Timer:
    """Measures on `device`, by default the current CUDA device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self._flush = torch.zeros(FLUSH_BYTES // 4, device=self.device)

    def timings(
        self, calls: Mapping[str, Callable[[], object]], *, seconds: float = 0.3, least: int | None = None
    ) -> tuple[dict[str, Timing], dict[str, str]]:
        """The time of each call that runs, and the reason why each other call does not.

        Each call is captured in a CUDA graph if possible, so that the host's launches do not count. The calls
        are replayed in turn, so that the card's clock and heat affect all alike.

        seconds : time for measuring each call
        least : least number of runs of each call; None: 15, or 2 on the CPU
        """
        least = least or (15 if self._cuda else 2)
        ready: dict[str, Callable[[], object]] = {}
        failed: dict[str, str] = {}
        for name, call in calls.items():
            try:
                if not self._cuda:
                    call()
                ready[name] = captured(call) if self._cuda else call
            except Exception as error:  # compilers and libraries fail with types of their own
                failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        times: dict[str, list[float]] = {name: [] for name in ready}
        spent = 0.0
        while ready and (spent < seconds * len(ready) or min(map(len, times.values())) < least):
            for name, call in ready.items():
                times[name].append(self._once(call))
                spent += times[name][-1]
            if len(times[name]) >= MOST_CALLS:
                break
        return {
            name: Timing.of(taken, ready[name] is not calls[name] if self._cuda else None)
            for name, taken in times.items()
        }, failed

    def medians(
        self, calls: Mapping[str, Callable[[], object]], *, seconds: float = 0.3, least: int | None = None
    ) -> tuple[dict[str, float], dict[str, str]]:
        """As `timings`, but with only the seconds of each call."""
        found, failed = self.timings(calls, seconds=seconds, least=least)
        return {name: timing.seconds for name, timing in found.items()}, failed

    def _once(self, call: Callable[[], object]) -> float:
        if not self._cuda:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.sum()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A function that replays `call` as a CUDA graph, or `call` itself if it cannot be captured. Raises the
    errors of `call`."""
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


def ceilings(timer: Timer, dtype: torch.dtype = torch.bfloat16) -> tuple[float, float]:
    """Bytes a second, read plus written, of the faster of two 2 GiB copies, and FLOP/s of an 8192³ product in
    `dtype`, on a CUDA device.

    One copy is the driver's, which reached 2.4e12 on an H100. The other is made by a kernel, as are all the
    accesses that are compared with it.
    """
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=timer.device).normal_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=timer.device).to(dtype) for _ in range(2))
    times, failed = timer.medians(
        {
            "driver": lambda: target.copy_(source),
            "kernel": lambda: torch.mul(source, 2.0, out=target),
            "product": lambda: a @ b,
        }
    )
    if failed:
        raise RuntimeError(f"the ceilings cannot be measured: {failed}")
    return 2 * source.nbytes / min(times["driver"], times["kernel"]), 2 * 8192**3 / times["product"]
