"""Every Triton kernel, compiled in every form that the runtime launches, for GPUs that need not be there.

    python -m benchmarks.compile_kernels [--capability 80 89 90 100 120] [--only attend] [--json out.json]

Prints for each form its use of a multiprocessor: registers of a thread; instructions that spill registers to
memory, and how many of these are in loops that multiply matrices; bytes of shared memory; programs that run
at once; and numbers of accesses to device memory that move 16, 8 and fewer bytes a thread. Exit status 1: a
form does not compile, does not fit, or spills in a loop that multiplies. Takes some minutes for each
capability.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.kernels.kernel_compiler import GENERATIONS
from tests.kernels.kernel_forms import cases, line, measure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--capability", type=int, nargs="+", choices=list(GENERATIONS), default=list(GENERATIONS)
    )
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", type=Path, help="write every figure to this file as well")
    args = parser.parse_args(arguments)
    found: dict[int, list[dict[str, Any]]] = {}
    faults = 0
    for capability in args.capability:
        print(f"\nsm_{capability} ({GENERATIONS[capability].name})")
        print(
            f"{'kernel':<24}{'case':<32}{'regs':>5}{'spills':>7}{'hot':>4}{'shared':>9}{'warps':>6}{'programs':>9}"
            f"{'16 B':>6}{'8 B':>6}{'less':>6}"
        )
        found[capability] = []
        for row in measure(capability, args.only, cases(capability)):
            found[capability].append(row)
            faults += "fault" in row
            print(line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    print(f"\n{sum(map(len, found.values()))} forms, {faults} at fault")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
