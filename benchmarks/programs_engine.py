"""Completion times of programs on a real engine, by policy: `benchmarks.programs_load` with a model.

    python -m benchmarks.programs_engine [--model DIR] [--seconds 20] [--rate 0.5] [--shrink 16] [--running 8]

The same traces, with prompts, outputs and waits cut to a part, so that a CPU can follow. Each policy has an
engine of its own, one after the other. Times depend on the machine: read them as ratios within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from contextlib import aclosing
from typing import Any, cast

import numpy as np

import ramify as rm
from benchmarks.program_traces import Trace, generate
from benchmarks.programs_load import Work, plan
from ramify.messages import Generate
from ramify.runtime.scheduler.policy import POLICIES
from ramify.sampling_params import SamplingParams


class Run:
    """All programs of a trace on one engine, with lengths and times divided by `shrink`."""

    def __init__(self, engine: rm.Engine, vocab_size: int, shrink: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._shrink = shrink
        self._left: dict[str, int] = defaultdict(int)
        self._first: dict[str, float] = {}
        self.times: dict[str, float] = {}
        self.computed = 0
        """Prompt tokens that were not found in the cache."""

    async def run(self, trace: Trace) -> None:
        works = plan(trace)
        for work in works:
            self._left[work.program] += 1
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for work in works:
                if not work.missing:
                    group.create_task(self._after(work, began + work.call.start_s / self._shrink, group))

    async def _after(self, work: Work, moment: float, group: asyncio.TaskGroup) -> None:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
        self._first.setdefault(work.program, time.perf_counter())
        await self._call(work)
        now = time.perf_counter()
        for later in work.then:
            later.missing -= 1
            if not later.missing:
                group.create_task(self._after(later, now + later.gap_s / self._shrink, group))
        self._left[work.program] -= 1
        if not self._left[work.program]:
            waits = work.waits_s / self._shrink
            self.times[work.program] = now - self._first[work.program] - waits
            await self._engine.end_program(work.program)

    async def _call(self, work: Work) -> None:
        call = work.call
        prompt = call.prompt[: max(1, len(call.prompt) // self._shrink)] % self._vocab_size
        request = Generate(
            rid=f"{work.program}-{id(work)}",
            prompt=(tuple(prompt.tolist()),),
            sampling=SamplingParams(
                max_tokens=max(1, len(call.output) // self._shrink), temperature=0.0, ignore_eos=True
            ),
            hint=call.hint,
        )
        async with aclosing(cast("Any", self._engine.generate(request))) as chunks:
            async for chunk in chunks:
                usage = chunk.usage
        self.computed += usage.prompt_tokens - usage.cached_tokens
        if call.tools and call.hint is not None:
            await self._engine.await_tools(work.program, call.hint.branch, call.tools)


async def measure(args: argparse.Namespace, policy: str) -> None:
    engine = (
        rm.Engine(args.model, policy=policy, max_running=args.running)
        if args.model
        else rm.Engine(policy=policy, max_running=args.running)
    )
    try:
        run = Run(engine, (await engine.info()).vocab_size, args.shrink)
        await run.run(generate(args.seed, args.seconds, args.rate))
    finally:
        await engine.aclose()
    plain = [seconds for name, seconds in run.times.items() if name.startswith("plain")]
    rest = [seconds for name, seconds in run.times.items() if not name.startswith("plain")]
    print(
        f"{policy:<8} {len(rest):>9} {np.mean(rest):>8.2f} {np.percentile(rest, 99):>8.2f} {len(plain):>9}"
        f" {np.mean(plain):>8.2f} {np.percentile(plain, 99):>8.2f} {run.computed:>9,}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--shrink", type=int, default=16)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["fcfs", "program"])
    args = parser.parse_args()
    print(
        f"{'policy':<8} {'programs':>9} {'mean s':>8} {'p99 s':>8} {'plain':>9} {'mean s':>8} {'p99 s':>8}"
        f" {'computed':>9}"
    )
    for policy in args.policies:
        asyncio.run(measure(args, policy))


if __name__ == "__main__":
    main()
