"""Every Triton kernel against what this GPU can do and against torch's own on the same inputs.

    python -m benchmarks.kernels [--only decode] [--compiled] [--seconds 0.3] [--json out.json]

Measures two ceilings first: the bandwidth of a large copy (read plus written) and the rate of a large
bfloat16 matrix product. A case's floor is the longer of two times: its bytes over the bandwidth, and its
operations over the rate. Each byte that must be read or written is counted once. `of ceiling` is the floor
over the time, with the estimate for an H100 in parentheses. `x torch` is the time of torch's fastest
implementation, named beside it, over ours.

All of a case's calls run in turn, on random numbers, as CUDA graphs. Before each call 512 MiB are read, to
empty the cache. Times are medians, and `+-` is the difference between the first and the second half of the
calls. Every kernel is checked first, on an output filled with NaN: it must write all of it, give the same
bits twice, and agree with an implementation of torch's or with the twin. `error` is the least ‖ours - other‖
/ ‖other‖. A kernel with an error above 1e-2 is not timed.

`--compiled` also measures code that torch.compile makes for the cases, which takes 10 to 20 s for each.
Without a CUDA device it exits with status 2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import Timer, ceilings
from benchmarks.gpu_visit.parts.versions import smi, software
from benchmarks.jit import watched
from tests.kernels.kernel_cases.base import Case, Work, cases, reason

MOST_ERROR = 1e-2
"""Largest ‖ours - other‖ / ‖other‖ of a right kernel. With bfloat16 operands right kernels are between
1e-3 and this limit."""
OTHERS = ("torch", "twin")
"""Beginnings of the names of independent implementations. All other implementations are forms of our kernel,
and may have the same error."""

Row = dict[str, Any]


class Wrong(Exception):
    """A kernel whose result differs from that of every other implementation."""


def check(work: Work) -> tuple[dict[str, float], dict[str, str]]:
    """The errors of `work` against each other implementation, and the reasons of those that cannot run.

    Raises `Wrong` if the kernel agrees with no independent implementation, and the errors of `Work.errors`.
    """
    errors, unavailable = work.errors()
    others = {name: error for name, error in errors.items() if name.startswith(OTHERS)}
    if others and not any(error <= MOST_ERROR for error in others.values()):
        raise Wrong(f"agrees with none: {others}")
    return errors, unavailable


def versions() -> dict[str, str | None]:
    """The current CUDA device, its driver, and the versions of the software."""
    try:
        driver = smi()["driver_version"]
    except (OSError, RuntimeError, subprocess.SubprocessError):
        driver = "unknown"
    found = software()
    named = {name: found[name] for name in ("torch", "triton", "commit", "date")}
    return {"device": torch.cuda.get_device_name(), "driver": driver, **named}


@torch.inference_mode()
def measure(case: Case, timer: Timer, bandwidth: float, flops: float, seconds: float = 0.3) -> Row:
    """The row of one case, or {"skipped": reason} if it cannot run here, or {"error": reason} if the kernel
    is wrong."""
    row: Row = {"case": case.name}
    if lack := case.lacks(timer.device):
        return row | {"skipped": lack}
    try:
        work = case.build(timer.device)
    except torch.OutOfMemoryError as error:
        return row | {"skipped": reason(error)}
    try:
        errors, unavailable = check(work)
    except Exception as error:  # kernels and compilers fail with types of their own
        return row | {"error": reason(error)}
    unavailable |= {
        name: f"differs by {error:.2g}" for name, error in errors.items() if not error <= MOST_ERROR
    }
    calls: dict[str, Callable[[], object]] = {"ours": work.run}
    calls |= {name: call for name, call in work.rivals.items() if name not in unavailable}
    times, failed = timer.timings(calls, seconds=seconds)
    if "ours" in failed:
        return row | {"error": failed["ours"]}
    ours = times.pop("ours")
    floors = {"bandwidth": work.moved / bandwidth, "products": work.flop / flops}
    bound = max(floors, key=floors.__getitem__)
    return row | {
        "seconds": ours.seconds,
        "spread": ours.spread,
        "bound": bound,
        "rate": (work.moved if bound == "bandwidth" else work.flop) / ours.seconds,
        "of_ceiling": floors[bound] / ours.seconds,
        "expected": case.expected,
        "error_of": {
            name: error for name, error in errors.items() if name.startswith(OTHERS) and error <= MOST_ERROR
        },
        "rivals": {name: timing.seconds / ours.seconds for name, timing in times.items()},
        "unavailable": unavailable | failed,
        "eager": [name for name, timing in {"ours": ours, **times}.items() if timing.captured is False],
    }


def line(row: Row) -> str:
    for name in ("skipped", "error"):
        if name in row:
            return f"{row['case']:<32} {name}: {row[name]}"
    rate = (
        f"{row['rate'] / 1e9:.0f} GB/s"
        if row["bound"] == "bandwidth"
        else f"{row['rate'] / 1e12:.1f} TFLOP/s"
    )
    torchs = {name: ratio for name, ratio in row["rivals"].items() if name.startswith("torch")}
    best = min(torchs, key=torchs.__getitem__, default=None)
    expected = f"({row['expected']:.0%})" if row["expected"] else ""
    columns = f"{row['case']:<32}{row['seconds'] * 1e6:>10.1f}{row['spread']:>7.1%}{rate:>15}"
    columns += f"{row['of_ceiling']:>12.0%} {expected:<6}"
    # Unchecked: here only another form of our kernel computes the same.
    columns += f"{min(row['error_of'].values()):>9.1e}" if row["error_of"] else f"{'unchecked':>10}"
    columns += f"{torchs[best]:>8.2f}x {best.removeprefix('torch '):<10}" if best else f"{'':>20}"
    others = [f"{name} {ratio:.2f}x" for name, ratio in row["rivals"].items() if name not in torchs]
    if row["eager"]:
        others.append(f"without a graph: {', '.join(row['eager'])}")
    return columns + ", ".join(others)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--compiled", action="store_true", help="the cases beside torch.compile instead")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring for each call")
    parser.add_argument("--json", type=Path, help="write every figure to this file as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device: torch.cuda.is_available() is False.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    compiled, timer = watched(), Timer()
    facts = versions()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    bandwidth, flops = ceilings(timer)
    torch.cuda.empty_cache()
    print(f"ceilings: copy {bandwidth / 1e9:.0f} GB/s, bfloat16 products {flops / 1e12:.0f} TFLOP/s")
    print(f"{'':<32}{'us':>10}{'+-':>7}{'rate':>15}{'of ceiling':>12}{'':>7}{'error':>9}{'x torch':>9}")
    rows = []
    for case in cases(compiled=args.compiled):
        if args.only in case.name:
            rows.append(measure(case, timer, bandwidth, flops, args.seconds))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
            if args.json:  # after every case, so that an interrupted run keeps its figures
                found = {**facts, "bandwidth": bandwidth, "flops": flops, "rows": rows}
                args.json.write_text(json.dumps(found, indent=1))
    print(f"{compiled.kernels} kernels compiled in {compiled.seconds:.1f} s, {compiled.loaded} loaded")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
