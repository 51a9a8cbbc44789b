"""Completion times of programs under load, by the policy that admits their requests.

    python -m benchmarks.programs_load [--seeds 1 2] [--seconds 60] [--rate 2.5] [--running 32]

No model runs: `tests.runtime.policy_simulation` gives steps simulated times. A program's time is from its
first call to its last, without waits for tools and people. `plain` are the requests without a program.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from ramify.runtime.scheduler.policy import POLICIES
from tests.runtime.policy_simulation import Simulation
from tests.runtime.program_traces import KINDS, generate


def report(name: str, simulation: Simulation, times: Sequence[tuple[str, float]]) -> None:
    plain = [seconds for program, seconds in times if program.startswith("plain")]
    programs = [seconds for program, seconds in times if not program.startswith("plain")] or [0.0]
    print(
        f"{name:<18} {len(programs):>9} {np.mean(programs):>8.2f} {np.percentile(programs, 99):>8.2f}"
        f" {len(plain):>9} {np.mean(plain):>8.2f} {np.percentile(plain, 99):>8.2f}"
        f" {simulation.longest_wait:>9.2f} {simulation.now:>8.1f}",
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
    args = parser.parse_args()
    print(
        f"{'policy':<18} {'programs':>9} {'mean s':>8} {'p99 s':>8} {'plain':>9} {'mean s':>8} {'p99 s':>8}"
        f" {'waited':>9} {'end':>8}"
    )
    for seed in args.seeds:
        for policy in args.policies:
            simulation = Simulation(policy, args.running, args.pages)
            times = simulation.run(generate(seed, args.seconds, args.rate, args.kinds))
            report(f"{policy} seed {seed}", simulation, list(times.items()))


if __name__ == "__main__":
    main()
