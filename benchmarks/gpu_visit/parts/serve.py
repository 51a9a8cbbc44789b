"""`ramify serve` as a user starts it: 64 requests at once, half of them with a schema, streamed.

The load test of `ramify bench` sends them, and checks each answer with a schema. A rehearsal serves a tiny
model on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.model import write_model
from benchmarks.jit import cache_on_disk, files_on_disk
from ramify.bench.client import Endpoint
from ramify.bench.plan import Plan, run_plan
from ramify.bench.workloads import Sizes
from ramify.constraint import closed_object
from ramify.loop import wait
from ramify.runtime.compile_ahead import compile_grammars
from tests.runtime.tiny import write_tiny

KIT_MODEL = Path(__file__).parents[3] / "gpu-visit-kit" / "model"
"""The model's folder in the kit, which carries it because the visit's machine lacks the default model's
tokenizer."""
READY_S, END_S = 300.0, 30.0
FACTS = {
    "pages": re.compile(r"(\d+) pages"),
    "graphs": re.compile(r"(\d+) CUDA graphs in"),
    "capture_s": re.compile(r"CUDA graphs in ([\d.]+) s"),
}
"""Figure → pattern of the number in the server's log."""


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests to send.

    words : of each prompt
    tokens : most tokens of an answer without a schema
    """

    requests: int = 64
    words: int = 120
    tokens: int = 64


TINY_LOAD = Load(requests=4, words=1, tokens=6)
SCHEMA_TOKENS = 64
"""max_tokens of answers with a schema: enough for any answer to one of `SCHEMAS`, even if each token is one
byte."""
TINY_FLAGS = ("--device=cpu", "--attention-backend=triton", "--dtype=float32", "--num-pages=200")
SCHEMAS: tuple[dict[str, Any], ...] = (
    closed_object(
        {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}}
    ),
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    closed_object({"done": {"type": "boolean"}, "kind": {"const": "note"}}),
    {"type": "integer", "minimum": 10, "maximum": 500},
)
"""Schemas with bounded answers."""


def run(figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        if figures.tiny:
            write_tiny(folder)
        elif KIT_MODEL.is_dir():
            folder = KIT_MODEL
        else:
            write_model(folder)
        # As `ramify pull` does. Else the server compiles them during the first requests with a schema.
        began = time.monotonic()
        compile_grammars()
        figures.add("grammar engine compiled", seconds=time.monotonic() - began)
        load, flags = (TINY_LOAD, TINY_FLAGS) if figures.tiny else (Load(), ("--load-format=dummy",))
        with (
            figures.attempt("server"),
            served(figures, folder, flags) as url,
            figures.attempt("answers"),
        ):
            _ask(figures, url, folder.name, load)


@contextlib.contextmanager
def served(figures: Figures, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """Context with a server, from when it is ready. Gives its address.

    The server's log goes to the part's. Raises if the server does not end cleanly.
    """
    cache = cache_on_disk()
    began, before = time.monotonic(), files_on_disk(cache)
    command = [sys.executable, "-m", "ramify", "serve", str(folder), "--port=0", "--log-level=info", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(f"server: {line}", end="", flush=True)
            if line.startswith("Serving "):
                ready.set()
        ready.set()  # it has ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(READY_S)
        said = next((line for line in lines if line.startswith("Serving ")), None)
        if said is None:
            raise RuntimeError(f"no server after {time.monotonic() - began:.0f} s: {''.join(lines[-5:])}")
        figures.add(
            "ready",
            ready_s=time.monotonic() - began,
            **{f"{name}_compiled": number - before[name] for name, number in files_on_disk(cache).items()},
            flags=" ".join(flags),
            **facts_in("".join(lines)),
        )
        yield said.split()[-1]
        ending = time.monotonic()
        process.send_signal(signal.SIGTERM)
        status = process.wait(END_S)
        figures.add("end", status=status, seconds=time.monotonic() - ending)
        if status:
            raise RuntimeError(f"the server ended with status {status}")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5)


def facts_in(log: str) -> dict[str, float]:
    found = {name: pattern.search(log) for name, pattern in FACTS.items()}
    return {name: float(match.group(1)) for name, match in found.items() if match is not None}


def _ask(figures: Figures, url: str, model: str, load: Load) -> None:
    """Send all requests at once by the load test. Raises RuntimeError if one fails, or an answer is not of
    its schema."""
    sizes = Sizes(concurrency=load.requests, prompts=[_body(load, index) for index in range(load.requests)])
    plan = Plan([Endpoint("the server", f"{url}/v1", model)], ["prompts"], sizes)
    (series,) = wait(run_plan(plan, lambda line: None))
    (found,) = series.runs
    figures.add(
        f"{load.requests} requests",
        seconds=found["duration_s"],
        tokens=found["output_tokens"],
        tokens_s=found["output_tokens_per_s"],
        valid_share=found["valid_share"],
        **{
            f"{name}_{rank}_s": found[f"{field}_s"][rank]
            for name, field in (("first_token", "ttft"), ("total", "e2e"))
            for rank in ("p50", "p99")
        },
    )
    if found["failed"] or found["valid_share"] < 1:
        raise RuntimeError(
            f"{found['failed']} requests failed ({found['first_error']}), "
            f"and {found['valid_share']:.0%} of the answers with a schema are valid"
        )


def _body(load: Load, index: int) -> dict[str, Any]:
    text = " ".join(f"word{(index * 31 + word * 7) % 997}" for word in range(load.words))
    body = {"messages": [{"role": "user", "content": text}], "temperature": 1.0, "seed": index}
    if index % 2 == 0:
        return {**body, "max_tokens": load.tokens}
    wanted = {"name": "answer", "schema": SCHEMAS[index // 2 % len(SCHEMAS)], "strict": True}
    form = {"type": "json_schema", "json_schema": wanted}
    return {**body, "max_tokens": SCHEMA_TOKENS, "response_format": form}
