"""`ramify serve` as a user starts it: 64 requests at once, half of them with a schema, streamed.

Each answer is checked: its status, its end, and with a schema the whole text, by checks written for the
schema. A rehearsal serves a tiny model on the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gpu_visit.figures import Figures
from benchmarks.gpu_visit.model import write_model
from benchmarks.jit import cache_on_disk, files_on_disk
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


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: tuple[tuple[dict[str, Any], Callable[[Any], bool]], ...] = (
    (
        _object(colour={"enum": ["red", "green"]}, count={"type": "integer", "minimum": 0, "maximum": 99}),
        lambda it: (
            list(it) == ["colour", "count"] and it["colour"] in ("red", "green") and it["count"] in range(100)
        ),
    ),
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        lambda it: isinstance(it, list) and 1 <= len(it) <= 3 and set(it) <= {"a", "b"},
    ),
    (
        _object(done={"type": "boolean"}, kind={"const": "note"}),
        lambda it: list(it) == ["done", "kind"] and isinstance(it["done"], bool) and it["kind"] == "note",
    ),
    (
        {"type": "integer", "minimum": 10, "maximum": 500},
        lambda it: type(it) is int and 10 <= it <= 500,
    ),
)
"""(schema with bounded answers, check of an answer's value)."""


@dataclasses.dataclass
class Answer:
    """A streamed answer. `first_s` and `total_s` are seconds since the request was sent."""

    schema: int | None
    text: str = ""
    finish: str | None = None
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0

    def check(self) -> None:
        """Raise ValueError unless the answer is complete and valid for its schema."""
        if self.finish not in ("stop", "length") or not self.tokens:
            raise ValueError(
                f"an answer ended with {self.finish!r} after {self.tokens} tokens: {self.text!r}"
            )
        if self.schema is None:
            return
        if self.finish != "stop" or not SCHEMAS[self.schema][1](json.loads(self.text)):
            raise ValueError(f"{self.text!r} ({self.finish}) is not of {SCHEMAS[self.schema][0]}")


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
            asyncio.run(_ask(figures, url, folder.name, load))


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


async def _ask(figures: Figures, url: str, model: str, load: Load) -> None:
    began = time.perf_counter()
    limits = httpx.Limits(max_connections=load.requests)
    async with httpx.AsyncClient(base_url=url, timeout=READY_S, limits=limits, trust_env=False) as client:
        answers = await asyncio.gather(
            *(_answer(client, model, load, index) for index in range(load.requests))
        )
    seconds = time.perf_counter() - began
    tokens = sum(answer.tokens for answer in answers)
    figures.add(
        f"{load.requests} requests", seconds=seconds, tokens=tokens, tokens_s=tokens / seconds, status=200
    )
    for case, some in (
        ("free text", [answer for answer in answers if answer.schema is None]),
        ("with a schema", [answer for answer in answers if answer.schema is not None]),
    ):
        with figures.attempt(case):
            for answer in some:
                answer.check()
            first, total = ([getattr(answer, name) for answer in some] for name in ("first_s", "total_s"))
            figures.add(
                case,
                right=len(some),
                first_token_p50_s=statistics.median(first),
                first_token_p99_s=_percentile(first, 0.99),
                total_p50_s=statistics.median(total),
                tokens=sum(answer.tokens for answer in some),
                example=some[0].text[:60],
            )


async def _answer(client: httpx.AsyncClient, model: str, load: Load, index: int) -> Answer:
    """The answer to request `index`; every second request has a schema. Raises RuntimeError for a status
    other than 200."""
    answer = Answer(schema=index // 2 % len(SCHEMAS) if index % 2 else None)
    text = " ".join(f"word{(index * 31 + word * 7) % 997}" for word in range(load.words))
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": load.tokens,
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if answer.schema is not None:
        body["max_tokens"] = SCHEMA_TOKENS
        wanted = {"name": f"schema{answer.schema}", "schema": SCHEMAS[answer.schema][0], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(f"a stream ended with {event['error']}")
            for choice in event["choices"]:
                answer.first_s = answer.first_s or time.perf_counter() - began
                answer.text += choice["delta"].get("content") or ""
                answer.finish = choice["finish_reason"] or answer.finish
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    answer.total_s = time.perf_counter() - began
    return answer


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
