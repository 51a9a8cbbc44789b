"""Ramify programs beside the same programs written with the `openai` async client, in one run.

    python -m benchmarks.programs [--batch 32] [--repeat 3] [--only judge ...] [--ways process http ...]

The ten programs of `tests/lang/programs`, each in a batch whose programs all run at once, in these ways:

    process       in process on an `Engine`
    http          over HTTP on `ramify serve`
    http-graph    the same, compiled: a program, or its calls up to a decision in Python, is one request
    client        as `benchmarks/client_programs.py` with one async client on that same server

The ways take turns, each repetition has rows of its own, and caches are emptied before each run. Seconds are
medians. Further columns: the client's seconds over those of the way; the requests sent, the prompt tokens
computed, the output tokens, and the scheduler's seconds in forward passes. The last lines are the sums of a
way's medians over all programs.

A select that scores its choices may choose another one than the client, which has the model write the choice.
Later texts then differ too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import openai

import ramify as rm
from benchmarks.client_programs import PROGRAMS, Messages
from tests.end_to_end.served import serve
from tests.lang.programs import CASES, Case

Rows = Sequence[dict[str, Any]]
WARM_UP = 2
"""Rows of an uncounted first run, which compiles grammars and kernels, and opens connections."""
Way = Callable[["Case", Rows], "Done"]
"""A function that runs a batch."""
WAYS = ("process", "http", "http-graph", "client")
SETTLE_S = 1.0
"""Seconds of rest before each run, because the threads of a server spin on all cores for a while after its
last request."""


@dataclasses.dataclass
class Done:
    seconds: float = 0.0
    requests: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    model_s: float = 0.0
    """The scheduler's seconds in forward passes."""


def run_programs(backend: Any, compiled: bool, case: Case, rows: Rows, done: Done) -> None:
    states = case.program.run_batch(rows, backend=backend, concurrency=len(rows), compiled=compiled)
    for state in states:
        error = state.error()
        if error is not None:
            raise error
        usage = state.usage
        done.requests += state.trace.requests
        done.computed_tokens += usage.prompt_tokens - usage.cached_tokens
        done.output_tokens += usage.completion_tokens


class Clients:
    """The programs of `client_programs` on an OpenAI-compatible endpoint."""

    def __init__(self, base_url: str, model: str) -> None:
        self._runner = asyncio.Runner()
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=3600)
        self._model = model

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def run(self, case: Case, rows: Rows, done: Done) -> None:
        self._runner.run(self._together(case, rows, done))

    async def _together(self, case: Case, rows: Rows, done: Done) -> None:
        async def ask(
            name: str,
            prompt: str | Messages,
            *,
            max_tokens: int = 16,
            stop: str | Sequence[str] = (),
            regex: str | None = None,
            schema: Any = None,
            choices: Sequence[str] = (),
        ) -> str:
            options: dict[str, Any] = {"model": self._model, "temperature": 0.0, "max_tokens": max_tokens}
            if stop:
                options["stop"] = stop
            if regex is not None:
                options["extra_body"] = {"structured_outputs": {"regex": regex}}
            if choices:
                options["extra_body"] = {"structured_outputs": {"choice": list(choices)}}
            if schema is not None:
                # As OpenAI's strict mode requires. In open objects the model could add properties endlessly.
                closed = {**schema.model_json_schema(), "additionalProperties": False}
                named = {"name": name, "schema": closed, "strict": True}
                options["response_format"] = {"type": "json_schema", "json_schema": named}
            if isinstance(prompt, str):
                completion = await self._client.completions.create(prompt=prompt, **options)
                text = completion.choices[0].text
            else:
                completion = await self._client.chat.completions.create(messages=list(prompt), **options)
                text = completion.choices[0].message.content or ""
            usage = completion.usage
            details = usage.prompt_tokens_details
            done.requests += 1
            done.computed_tokens += usage.prompt_tokens - (details.cached_tokens or 0 if details else 0)
            done.output_tokens += usage.completion_tokens
            return text

        await asyncio.gather(*(PROGRAMS[case.name](ask, **row) for row in rows))


def model_s(backend: Any) -> float:
    """Seconds that the backend's scheduler has spent in forward passes so far."""
    if isinstance(backend, rm.Engine):
        return float(msgspec.to_builtins(backend.stats())["model_s"])
    (stats,) = backend.get_server_info()["internal_states"]
    return float(stats["model_s"])


def timed(backend: Any, run: Callable[[Case, Rows, Done], object], case: Case, rows: Rows) -> Done:
    """Run a batch on `backend`, whose cache is emptied first."""
    backend.flush_cache()
    done, before, began = Done(), model_s(backend), time.perf_counter()
    run(case, rows, done)
    done.seconds = time.perf_counter() - began
    done.model_s = model_s(backend) - before
    return done


@contextlib.contextmanager
def ways(options: argparse.Namespace) -> Iterator[dict[str, Way]]:
    """Context that gives the chosen ways to run a batch. Only servers and engines that the ways need are
    started."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Way] = {}
        if {"http", "http-graph", "client"} & set(options.ways):
            served = stack.enter_context(serve("--model", options.our_model, "--dtype", options.dtype))
            endpoint = stack.enter_context(contextlib.closing(rm.RuntimeEndpoint(served.url)))
            name = endpoint.get_server_info()["served_model_name"] or options.our_model
            clients = stack.enter_context(contextlib.closing(Clients(f"{served.url}/v1", name)))
            found["client"] = partial(timed, endpoint, clients.run)
            for way, compiled in (("http", False), ("http-graph", True)):
                found[way] = partial(timed, endpoint, partial(run_programs, endpoint, compiled))
        if "process" in options.ways:
            engine = stack.enter_context(rm.Engine(model=options.our_model, dtype=options.dtype))
            found["process"] = partial(timed, engine, partial(run_programs, engine, False))
        yield {way: found[way] for way in WAYS if way in options.ways}


def measure(case: Case, run: dict[str, Way], batch: int, repeat: int) -> dict[str, Done]:
    rows = case.rows(WARM_UP + batch * repeat)
    for way in run.values():
        way(case, rows[:WARM_UP])
    results: dict[str, list[Done]] = {name: [] for name in run}
    for number in range(repeat):
        mine = rows[WARM_UP + batch * number :][:batch]
        first = number % len(run)
        for name in [*list(run)[first:], *list(run)[:first]]:
            time.sleep(SETTLE_S)
            results[name].append(run[name](case, mine))
    return {name: sorted(done, key=lambda one: one.seconds)[len(done) // 2] for name, done in results.items()}


def show(name: str, found: dict[str, Done]) -> None:
    """Print a line for each way in which a program, or all programs, ran."""
    client = found.get("client")
    for way, done in found.items():
        sooner = f"{client.seconds / done.seconds:6.2f}x" if client else " " * 7
        print(
            f"{name:20} {way:11} {done.seconds:8.2f} {sooner} {done.requests:8} {done.computed_tokens:8} "
            f"{done.output_tokens:7} {done.model_s:7.2f}",
            flush=True,
        )


def total(batches: Sequence[Done]) -> Done:
    return Done(*map(sum, zip(*map(dataclasses.astuple, batches), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="PROGRAM")
    parser.add_argument("--our-model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help=", ".join(WAYS))
    options = parser.parse_args()
    print(
        f"{options.batch} programs at once, medians of {options.repeat}; {options.our_model}, {options.dtype}"
    )
    print(f"{'':32}  seconds  client requests computed  output   model")
    measured = []
    with ways(options) as run:
        for name in options.only:
            measured.append(measure(CASES[name], run, options.batch, options.repeat))
            show(name, measured[-1])
    show("all", {way: total([found[way] for found in measured]) for way in run})


if __name__ == "__main__":
    main()
