"""Everything that needs a GPU, within nine minutes: its tests, both benchmarks, and a short table last.

    python -m benchmarks.gpu_check [--shape benchmarks/configs/llama-3.1-8b.json]

Each part has a time limit of its own; one that passes it is stopped, and what it had found is kept. Without a
CUDA device it says so and exits with status 2. Status 1 means that a part failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

TESTS_S, KERNELS_S, ENGINE_S = 210, 130, 170
"""Together 8.5 minutes."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One command: its name, how it ended, and its seconds."""

    name: str
    outcome: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.outcome != "passed"


def run(name: str, command: list[str], limit_s: float) -> Part:
    """Run `command`, its output shown as it comes."""
    print(f"--- {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    try:
        status = subprocess.run([sys.executable, "-m", *command], timeout=limit_s, check=False).returncode
        outcome = "passed" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {limit_s:.0f} s"
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
        parts = [
            run("tests/gpu", ["pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu"], TESTS_S),
            run(
                "benchmarks.engine",
                ["benchmarks.engine", "--deterministic", "--json", str(engine), *shape],
                ENGINE_S,
            ),
            run(
                "benchmarks.kernels",
                ["benchmarks.kernels", "--seconds", "0.1", "--json", str(kernels)],
                KERNELS_S,
            ),
        ]
        print(table(parts, loaded(kernels), loaded(engine)))
    return int(any(part.failed for part in parts))


if __name__ == "__main__":
    sys.exit(main())
