"""Everything that needs a GPU, within nine minutes: its tests, both benchmarks, and a short table last.

    python -m benchmarks.gpu_check [--shape benchmarks/configs/llama-3.1-8b.json]

Each part has a time limit; one that passes it is stopped, and what it had found is kept. Without a
CUDA device it says so and exits with status 2. Status 1 means that a part failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

TESTS_S, ENGINE_TESTS_S, ENGINE_S, KERNELS_S = 150, 80, 150, 120
"""Together 8.3 minutes. What one part leaves of its time, the next ones may take."""
SHARES = max(1, min(12, (os.cpu_count() or 1) - 2))
"""Processes among which the kernels' tests are shared out: most of their time is Triton's compiling."""
ENGINE_TESTS = "tests/gpu/test_engine.py"
"""They measure the device's memory, and so are alone on it."""
PYTEST = ["pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--maxfail=20"]
"""Without `filterwarnings = error`: what a driver or a library of the host deprecates is no fault of ours."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One command: its name, how it ended, and its seconds."""

    name: str
    outcome: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.outcome != "passed"


def run(name: str, command: list[str], limit_s: float, shares: int = 0) -> Part:
    """Run `command`, its output shown as it comes; with `shares`, that many of it at once, each its share."""
    print(f"--- {name}: {' '.join(command)}{f', in {shares} processes' if shares else ''}", flush=True)
    began = time.monotonic()
    options = [["--share", f"{share}/{shares}"] for share in range(shares)] or [[]]
    started = [subprocess.Popen([sys.executable, "-m", *command, *more]) for more in options]
    outcome = "passed"
    for process in started:
        try:
            status = process.wait(max(0.0, began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            outcome = f"stopped after {limit_s:.0f} s"
            continue
        if status and outcome == "passed":
            outcome = f"failed with status {status}"
    return Part(name, outcome, time.monotonic() - began)


def kernel_lines(found: dict[str, Any]) -> list[str]:
    """Each kernel's share of its ceiling."""
    return [
        f"{row['case']:<34}{row['of_ceiling']:>8.0%} of its ceiling"
        for row in found.get("rows", ())
        if "of_ceiling" in row
    ]


def engine_lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for row in found.get("rows", ()):
        if "tokens_s" not in row:
            continue
        text = f"{row['case']:<34}{row['tokens_s']:>8.0f} tokens/s"
        if "of_roofline" in row:
            text += f", {row['of_roofline']:.0%} of the roofline"
        if "host_s" in row:
            text += f", host {row['host_s'] / row['seconds']:.1%}"
        if "ratio" in row:
            text += f", {row['ratio']:.2f}x {row['of']}"
        lines.append(text)
    return lines


def table(parts: list[Part], kernels: dict[str, Any], engine: dict[str, Any]) -> str:
    facts = engine or kernels
    named = [
        f"{name} {facts[name]}" for name in ("device", "driver", "torch", "triton", "date") if name in facts
    ]
    ended = [f"{part.name:<34}{part.outcome}, {part.seconds:.0f} s" for part in parts]
    return "\n".join(["=" * 72, ", ".join(named), *ended, *kernel_lines(kernels), *engine_lines(engine)])


def loaded(path: Path) -> dict[str, Any]:
    """The figures in a file; none where there is none."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", help="of the engine's model")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "gpu-check needs a CUDA device, and torch finds none: torch.cuda.is_available() is False "
            f"(torch {torch.__version__}).",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        kernels, engine = Path(folder) / "kernels.json", Path(folder) / "engine.json"
        shape = ["--shape", args.shape] if args.shape else []
        began, limit, parts = time.monotonic(), 0, []
        for name, command, seconds, shares in (
            ("tests/gpu", [*PYTEST, "tests/gpu", f"--ignore={ENGINE_TESTS}"], TESTS_S, SHARES),
            (ENGINE_TESTS, [*PYTEST, ENGINE_TESTS], ENGINE_TESTS_S, 0),
            (
                "benchmarks.engine",
                ["benchmarks.engine", "--deterministic", "--json", str(engine), *shape],
                ENGINE_S,
                0,
            ),
            (
                "benchmarks.kernels",
                ["benchmarks.kernels", "--seconds", "0.1", "--json", str(kernels)],
                KERNELS_S,
                0,
            ),
        ):
            limit += seconds
            parts.append(run(name, command, began + limit - time.monotonic(), shares))
        print(table(parts, loaded(kernels), loaded(engine)))
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main())
