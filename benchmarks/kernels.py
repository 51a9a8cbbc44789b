"""Every Triton kernel against what this GPU can do and against torch's own on the same inputs.

    python -m benchmarks.kernels [--only decode] [--seconds 0.3] [--json out.json]

Measures two ceilings first: the bandwidth of a large copy (read plus written) and the rate of a large
bfloat16 matrix product. A case's floor is the longer of its bytes over the one and its operations over the
other, counting what must be read and written once; `of ceiling` is the floor over the time. `x torch` is the
time of the fastest of torch's own, named beside it, over ours. All of a case's calls run in turn, from an
empty cache, as CUDA graphs; times are medians. Without a CUDA device it exits with status 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str]:
    import triton

    driver = "unknown"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        driver = (done.stdout.split() or [driver])[0]
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }


def measure(case: Any, timer: Any, bandwidth: float, flops: float, seconds: float) -> dict[str, Any]:
    """The row of one case: {"skipped": why} where it cannot run here."""
    free, _ = torch.cuda.mem_get_info()
    if case.needs > 0.8 * free:
        return {"case": case.name, "skipped": f"needs about {case.needs / 1e9:.0f} GB"}
    try:
        work = case.build(torch.device("cuda", torch.cuda.current_device()))
    except torch.OutOfMemoryError:
        return {"case": case.name, "skipped": f"does not fit {free / 1e9:.0f} GB"}
    calls: dict[str, Callable[[], object]] = {"ours": work.run, **work.rivals}
    times, failed = timer.medians(calls, seconds=seconds)
    if "ours" in failed:
        return {"case": case.name, "skipped": failed["ours"]}
    ours = times.pop("ours")
    floors = {"bandwidth": work.moved / bandwidth, "products": work.flop / flops}
    bound = max(floors, key=floors.__getitem__)
    return {
        "case": case.name,
        "seconds": ours,
        "bound": bound,
        "rate": (work.moved if bound == "bandwidth" else work.flop) / ours,
        "of_ceiling": floors[bound] / ours,
        "rivals": {name: taken / ours for name, taken in times.items()},
        "unavailable": failed,
    }


def line(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['case']:<32} skipped: {row['skipped']}"
    rate = (
        f"{row['rate'] / 1e9:.0f} GB/s"
        if row["bound"] == "bandwidth"
        else f"{row['rate'] / 1e12:.1f} TFLOP/s"
    )
    torchs = {name: ratio for name, ratio in row["rivals"].items() if name.startswith("torch")}
    best = min(torchs, key=torchs.__getitem__, default=None)
    columns = f"{row['case']:<32}{row['seconds'] * 1e6:>10.1f}{rate:>15}{row['of_ceiling']:>12.0%}"
    columns += f"{torchs[best]:>8.2f}x {best.removeprefix('torch '):<10}" if best else f"{'':>20}"
    others = [f"{name} {ratio:.2f}x" for name, ratio in row["rivals"].items() if name not in torchs]
    return columns + ", ".join(others)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.3, help="of measuring for each call")
    parser.add_argument("--json", type=Path, help="write every figure to this file as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA device: torch.cuda.is_available() is False.", file=sys.stderr)
        return 2
    from benchmarks.gpu_timing import Timer, ceilings
    from tests.kernels.kernel_cases.base import cases

    torch.manual_seed(0)
    timer = Timer()
    facts = versions()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    bandwidth, flops = ceilings(timer)
    torch.cuda.empty_cache()
    print(f"ceilings: copy {bandwidth / 1e9:.0f} GB/s, bfloat16 products {flops / 1e12:.0f} TFLOP/s")
    print(f"{'':<32}{'us':>10}{'rate':>15}{'of ceiling':>12}{'x torch':>9}")
    rows = []
    for case in cases():
        if args.only in case.name:
            rows.append(measure(case, timer, bandwidth, flops, args.seconds))
            print(line(rows[-1]), flush=True)
            torch.cuda.empty_cache()
            if args.json:  # after every case, so that an interrupted run keeps its figures
                found = {**facts, "bandwidth": bandwidth, "flops": flops, "rows": rows}
                args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
