"""Prefill tokens that are computed again because pages were evicted: plain LRU against hints of programs.

    python -m benchmarks.eviction [--seeds 1 2 3] [--seconds 300] [--budget 0.5] [--page-size 16]
    python -m benchmarks.eviction --recorded trace.json … [--every 2.0] [--copies 8]

Traces are generated (`tests.runtime.program_traces`) or read from files of ``state.trace.to_dict()``, and
replayed by `tests.runtime.eviction_replay`. The budget of pages is a share of the working set: of the most
pages that are between their first and last use at one time. Columns:

    lru        no hints: the least recently used leaf is evicted
    program    the hints of the programs: leases by branch and fork, in the order of their next use
    optimum    Belady's: the page whose next use is latest is evicted
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.runtime.eviction_replay import Row, compare
from tests.runtime.program_traces import KINDS, generate, recorded


def show(name: str, row: Row) -> None:
    ratio = row.program / row.lru if row.lru else float("nan")
    floor = row.optimum / row.lru if row.lru else float("nan")
    print(
        f"{name:<12} {row.calls:>6} {row.prompt_tokens:>11,} {row.needed:>10,} {row.working_set:>8,}"
        f" {row.budget:>8,} {row.lru:>10,} {row.program:>10,} {ratio:>6.2f} {row.optimum:>10,} {floor:>6.2f}"
        f"  {row.delayed}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "plain"], default=[*KINDS, "plain"])
    parser.add_argument("--budget", type=float, nargs="+", default=[0.5])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--recorded", type=Path, nargs="+")
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--copies", type=int, default=8)
    args = parser.parse_args()
    print(
        f"{'trace':<12} {'calls':>6} {'prompt':>11} {'needed':>10} {'set':>8} {'budget':>8}"
        f" {'lru':>10} {'program':>10} {'/lru':>6} {'optimum':>10} {'/lru':>6}  waited"
    )
    for part in args.budget:
        for seed in args.seeds:
            if args.recorded:
                trace = recorded(args.recorded, args.copies, args.every, seed)
            else:
                trace = generate(seed, args.seconds, args.rate, args.kinds)
            show(f"{part:g} seed {seed}", compare(trace, part, args.page_size))


if __name__ == "__main__":
    main()
