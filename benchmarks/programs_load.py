"""Completion times of programs under load, by the policy that admits their requests.

    python -m benchmarks.programs_load [--seeds 1 2] [--seconds 60] [--rate 2.5] [--running 32]
    python -m benchmarks.programs_load --engine --seconds 20 --rate 2 --kinds judge plain

Without `--engine` no model runs: `tests.runtime.policy_simulation` gives steps simulated times, assumed
for an 8B model, or with `--cpu` those of SmolLM2-135M on two cores. With `--engine` the default model gets
the same calls. A program's time is from its first call to its last, without waits for tools and people.
`plain` are the requests without a program.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping

import numpy as np

import ramify as rm
from ramify.loop import submit
from ramify.messages import Generate
from ramify.runtime.scheduler.admission import POLICIES
from ramify.sampling_params import SamplingParams
from tests.runtime import policy_simulation
from tests.runtime.policy_simulation import Simulation, Work, plan
from tests.runtime.program_traces import KINDS, Trace, generate

CPU_STEP = {"CHUNK_TOKENS": 512, "STEP_S": 5.5e-3, "PREFILL_TOKEN_S": 430e-6, "DECODE_S": 600e-6}
"""In the place of the simulation's own."""


class Replay:
    """Makes the calls of a trace on an engine. A call follows those that it waited for in the trace, after
    the same gap."""

    def __init__(self, engine: rm.Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._left: Counter[str] = Counter()
        self._first: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.times: dict[str, float] = {}

    async def run(self, trace: Trace) -> dict[str, float]:
        works = plan(trace)
        self._left.update(work.program for work in works)
        began = [work for work in works if not work.missing]
        self._tasks = [asyncio.create_task(self._call(work, work.call.start_s)) for work in began]
        for task in self._tasks:  # the list grows
            await task
        return self.times

    async def _call(self, work: Work, after_s: float) -> None:
        await asyncio.sleep(after_s)
        call = work.call
        self._first.setdefault(work.program, time.perf_counter())
        request = Generate(
            rid=f"{work.program}-{next(self._numbers)}",
            prompt=(tuple((call.prompt % 40_000 + 1000).tolist()),),
            sampling=SamplingParams(max_tokens=len(call.output), ignore_eos=True, temperature=0.0),
            hint=call.hint,
        )
        async for _ in self._engine.generate(request):
            pass
        if call.tools and call.hint is not None:
            await self._engine.await_tools(work.program, call.hint.branch, call.tools)
        for later in work.then:
            later.missing -= 1
            if not later.missing:
                self._tasks.append(asyncio.create_task(self._call(later, later.gap_s)))
        self._left[work.program] -= 1
        if not self._left[work.program]:
            self.times[work.program] = time.perf_counter() - self._first[work.program] - work.waits_s
            await self._engine.end_program(work.program)


def report(name: str, times: Mapping[str, float], end: float) -> None:
    plain = [seconds for program, seconds in times.items() if program.startswith("plain")] or [0.0]
    programs = [seconds for program, seconds in times.items() if not program.startswith("plain")] or [0.0]
    print(
        f"{name:<18} {len(programs):>9} {np.mean(programs):>8.2f} {np.percentile(programs, 99):>8.2f}"
        f" {len(plain):>9} {np.mean(plain):>8.2f} {np.percentile(plain, 99):>8.2f} {end:>8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2.5)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--pages", type=int, default=40_000)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "plain"], default=[*KINDS, "plain"])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--cpu", action="store_true", help="simulate steps of the default engine")
    parser.add_argument("--engine", action="store_true", help="run the calls on the default engine")
    args = parser.parse_args()
    for name, value in CPU_STEP.items() if args.cpu else ():
        setattr(policy_simulation, name, value)
    print(
        f"{'policy':<18} {'programs':>9} {'mean s':>8} {'p99 s':>8} {'plain':>9} {'mean s':>8} {'p99 s':>8}"
        f" {'end':>8}"
    )
    for seed in args.seeds:
        for policy in args.policies:
            report(f"{policy} seed {seed}", *measure(args, policy, seed))


def measure(args: argparse.Namespace, policy: str, seed: int) -> tuple[Mapping[str, float], float]:
    """The time of each program, and of everything."""
    trace = generate(seed, args.seconds, args.rate, args.kinds)
    if not args.engine:
        simulation = Simulation(policy, args.running, args.pages)
        return simulation.run(trace), simulation.now
    with rm.Engine(policy=policy, num_pages=args.pages, max_running=args.running) as engine:
        engine.complete("warm", max_tokens=4)
        began = time.perf_counter()
        return submit(Replay(engine).run(trace)).result(), time.perf_counter() - began


if __name__ == "__main__":
    main()
