"""The cold tier: seconds to the first token after a restart, against computing the prompt again.

    python -m benchmarks.cold [--model MODEL] [--tokens 1024 4096 8000] [--rounds 3] [--threads 2]
                              [--context N] [--llama FOLDER]

For each round a new folder: one engine computes prompts of random tokens and ends; another one, a new process
with the same folder, gets the same prompts. Each answer has 16 greedy tokens. Columns, medians over rounds:

    computed  seconds to the first token where nothing is cached
    read      the same after the restart, with the pages in the operating system's memory
    disk      the same after another restart, with the operating system's copies dropped first
    cached    the share of the prompt that `cached_tokens` reports after the restart
    same      rounds in which the answer after the restart has the tokens of the answer before

The last line is the length from which the gate reads, by the times that it measured. With --llama and a
GGUF file as MODEL, the same prompts by llama.cpp in process (node-llama-cpp in FOLDER): a sequence saved to a
file, and loaded by a new context.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ramify.messages import SchedulerStats
from ramify.runtime.cold.gate import OVERHEAD_S
from ramify.runtime.engine.engine import Engine

DRIVER = Path(__file__).parent / "peer_drivers" / "cold_llama_cpp.mjs"
OUTPUT = 16


def answer(engine: Engine, prompt: list[int]) -> tuple[float, tuple[int, ...], int]:
    """(seconds to the first token, tokens, cached tokens) of the greedy answer to `prompt`."""
    done = engine.complete(prompt, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    return done.usage.first_token_s or 0.0, done.ids, done.usage.cached_tokens


def drop_caches(folder: Path) -> None:
    """Have the operating system forget its copies of the files in `folder`."""
    for path in folder.glob("*/*.kv"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_round(options: dict[str, Any], prompts: list[list[int]]) -> tuple[list[Any], SchedulerStats]:
    """The answers of three processes to each prompt, and the statistics of the last."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place in range(3):
            if place == 2:
                drop_caches(Path(folder))
            with Engine(cold_dir=folder, **options) as engine:
                engine.complete("Hello", max_tokens=2)
                rows.append([answer(engine, prompt) for prompt in prompts])
                stats = engine.stats()
                done = -1
                while place == 0 and done != engine.stats().cold_written_bytes:
                    done = engine.stats().cold_written_bytes
                    time.sleep(1.0)
    return list(zip(*rows, strict=True)), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, help="context length, by YaRN beyond the model's own")
    parser.add_argument("--llama", metavar="FOLDER", help="the folder of node-llama-cpp")
    given = parser.parse_args()
    options: dict[str, Any] = {"model": given.model, "threads": given.threads, "kv_memory_gb": 4.0}
    if given.context:
        scaling = {"rope_type": "yarn", "factor": given.context / 8192}
        options |= {"context_length": given.context, "rope_scaling": scaling}
    found: dict[int, list[Any]] = {count: [] for count in given.tokens}
    for number in range(given.rounds):
        draw = np.random.default_rng(number)
        prompts = [draw.integers(1000, 30_000, count).tolist() for count in given.tokens]
        rows, stats = run_round(options, prompts)
        for count, row in zip(given.tokens, rows, strict=True):
            found[count].append(row)
    print("tokens  computed     read     disk  cached  same")
    for count, rounds in found.items():
        computed, read, disk = (statistics.median(row[place][0] for row in rounds) for place in range(3))
        cached = min(row[2][2] for row in rounds) / count
        same = sum(row[0][1] == row[1][1] == row[2][1] for row in rounds)
        print(
            f"{count:6}  {computed:7.3f}s {read:7.3f}s {disk:7.3f}s {cached:6.1%}  {same}/{len(rounds)}"
            f"   computed {min(row[0][0] for row in rounds):.3f} to {max(row[0][0] for row in rounds):.3f},"
            f" disk {min(row[2][0] for row in rounds):.3f} to {max(row[2][0] for row in rounds):.3f}"
        )
    token_bytes = stats.cold_bytes / max(1, stats.cold_tokens)
    gained = stats.cold_token_s - token_bytes * stats.cold_byte_s
    print(
        f"a token: {stats.cold_token_s * 1e3:.3f} ms to compute, {token_bytes / 1e3:.1f} KB,"
        f" {token_bytes * stats.cold_byte_s * 1e3:.4f} ms to read; the gate reads"
        + (f" from {OVERHEAD_S / gained:.0f} tokens on" if gained > 0 else " nothing")
    )
    if given.llama:
        with tempfile.TemporaryDirectory() as folder:
            job = {"folder": given.llama, "model": given.model, "threads": given.threads, "output": OUTPUT}
            job |= {"prompts": prompts, "files": folder, "context": max(given.tokens) + 64}
            subprocess.run(["node", str(DRIVER), json.dumps(job)], check=True)


if __name__ == "__main__":
    main()
