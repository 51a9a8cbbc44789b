"""Ramify programs beside the same programs written with the `openai` async client, in one run.

    python -m benchmarks.programs [--batch 32] [--repeat 3] [--only judge ...] [--ways process-graph http ...]
    python -m benchmarks.programs --base-url http://127.0.0.1:8000/v1 --model NAME

The ten programs of `tests/lang/programs`, each in a batch whose programs all run at once, in these ways:

    process, process-graph   in process on an `Engine`, step by step and compiled
    http, http-graph         the same over HTTP on `ramify serve`; compiled, a program is one request
    client                   as `benchmarks/client_programs.py` with one async client on that same server
    other                    these with --base-url, on that endpoint

If a program decides in Python, its whole graph cannot be compiled. Then http-graph runs the graph of the
calls before the decision, and is marked. process-graph is left out, because in process this equals step by
step. The ways take turns, each repetition has rows of its own, and our caches are emptied before each run (an
endpoint given by --base-url keeps its own). Seconds are medians. The last lines are sums: of a way's medians
over the programs that ran in it, beside the sums of the other ways over the same programs.

Further columns: how many times sooner the batch is finished than by the client on our server, and than by the
client on the other endpoint; the processor time of all our processes, client and server, which other work on
the machine lengthens less than the seconds; the requests sent, the prompt tokens computed, the output tokens,
the steps of our scheduler and its seconds in forward passes; and the share of texts that are equal to the
client's. A select that scores its choices may choose another one than the client, which has the model write
the choice. Later texts then differ too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass
class Done:
    """A batch that has finished."""

    seconds: float = 0.0
    processor_s: float = 0.0
    """Processor seconds that all processes on this machine spent for the batch."""
    texts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Count of each (variable, text) in the results."""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    """Steps of the scheduler; 0 if they are not known."""
    model_s: float = 0.0
    """The scheduler's seconds in forward passes."""

    def charge(self, before: tuple[int, float], after: tuple[int, float]) -> None:
        """Set `steps` and `model_s` from the results of `spent` before and after the batch."""
        self.steps, self.model_s = after[0] - before[0], after[1] - before[1]

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


WAYS = ("process", "process-graph", "http", "http-graph", "client", "other")
SETTLE_S = 1.0
"""Seconds of rest before each run, because the threads of a server spin on all cores for a while after its
last request."""

Ways = dict[str, Callable[[Case, Rows], Done]]
"""Name of a way → function that runs a batch."""


class Programs:
    """Ramify programs on a backend of ours."""

    def __init__(self, backend: Any, *, compiled: bool = False) -> None:
        self._backend, self._compiled = backend, compiled

    def run(self, case: Case, rows: Rows) -> Done:
        self._backend.flush_cache()
        before = spent(self._backend)
        began = time.perf_counter()
        states = case.program.run_batch(
            rows, backend=self._backend, concurrency=len(rows), compiled=self._compiled
        )
        done = Done(time.perf_counter() - began)
        done.charge(before, spent(self._backend))
        for state in states:
            error = state.error()
            if error is not None:
                raise error
            usage, steps = state.usage, [c for c in state.trace.walk() if c.kind in ("gen", "select")]
            done.texts.update((call.name, call.text) for call in steps)
            done.requests += state.trace.requests
            done.prompt_tokens += usage.prompt_tokens
            done.cached_tokens += usage.cached_tokens
            done.output_tokens += usage.completion_tokens
        return done


class Clients:
    """The programs of `client_programs` on an OpenAI-compatible endpoint.

    ours : our backend, if the endpoint is its server
    """

    def __init__(self, base_url: str, model: str, api_key: str, ours: Any = None) -> None:
        self._runner = asyncio.Runner()
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=3600)
        self._model = model
        self._ours = ours

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def run(self, case: Case, rows: Rows) -> Done:
        done = Done()
        if self._ours is not None:
            self._ours.flush_cache()
        before = (0, 0.0) if self._ours is None else spent(self._ours)
        began = time.perf_counter()
        self._runner.run(self._together(case, rows, done))
        done.seconds = time.perf_counter() - began
        if self._ours is not None:
            done.charge(before, spent(self._ours))
        return done

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
            done.prompt_tokens += usage.prompt_tokens
            done.cached_tokens += 0 if details is None else details.cached_tokens or 0
            done.output_tokens += usage.completion_tokens
            done.texts[name, text] += 1
            return text

        await asyncio.gather(*(PROGRAMS[case.name](ask, **row) for row in rows))


def spent(backend: Any) -> tuple[int, float]:
    """(steps of the backend's scheduler so far, its seconds in forward passes)."""
    if isinstance(backend, rm.Engine):
        stats = msgspec.to_builtins(backend.stats())
    else:
        (stats,) = backend.get_server_info()["internal_states"]
    return stats["steps"], stats["model_s"]


def processor_s() -> float:
    """Processor seconds so far of this process and all its descendants (Linux: proc(5))."""
    times: dict[int, tuple[int, int]] = {}  # process → (its parent, ticks)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            times[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))

    def below(process: int) -> int:
        return times[process][1] + sum(below(one) for one in times if times[one][0] == process)

    return below(os.getpid()) / os.sysconf("SC_CLK_TCK")


def same(one: Done, other: Done) -> float:
    """The share of texts that two batches have in common."""
    return (one.texts & other.texts).total() / max(one.texts.total(), other.texts.total())


@contextlib.contextmanager
def ways(options: argparse.Namespace) -> Iterator[Ways]:
    """Context that gives the chosen ways to run a batch. Only the servers and engines that these need are
    started."""
    chosen = options.ways
    with contextlib.ExitStack() as stack:
        found: Ways = {}
        if {"http", "http-graph", "client"} & set(chosen):
            served = stack.enter_context(serve("--model", options.our_model, "--dtype", options.dtype))
            endpoint = rm.RuntimeEndpoint(served.url)
            stack.callback(endpoint.close)
            name = endpoint.get_server_info()["served_model_name"] or options.our_model
            ours = Clients(f"{served.url}/v1", name, "none", endpoint)
            found["client"] = stack.enter_context(contextlib.closing(ours)).run
            found["http"] = Programs(endpoint).run
            found["http-graph"] = Programs(endpoint, compiled=True).run
        if {"process", "process-graph"} & set(chosen):
            engine = stack.enter_context(rm.Engine(model=options.our_model, dtype=options.dtype))
            found["process"] = Programs(engine).run
            found["process-graph"] = Programs(engine, compiled=True).run
        if "other" in chosen:
            other = Clients(options.base_url, options.model, options.api_key)
            found["other"] = stack.enter_context(contextlib.closing(other)).run
        yield {way: found[way] for way in WAYS if way in chosen}


def decides(case: Case) -> bool:
    """Return whether the program has no whole graph, because Python code decides by a result."""
    try:
        case.program.compile(**case.arguments[0])
    except rm.CompileError:
        return True
    return False


def measure(case: Case, run: Ways, batch: int, repeat: int) -> dict[str, Done]:
    """Way → its run with the median time."""
    rows = case.rows(WARM_UP + batch * repeat)
    for way in run.values():
        way(case, rows[:WARM_UP])
    results: dict[str, list[Done]] = {name: [] for name in run}
    for number in range(repeat):
        mine = rows[WARM_UP + batch * number :][:batch]
        order = list(run)[number % len(run) :] + list(run)[: number % len(run)]
        for name in order:
            time.sleep(SETTLE_S)
            before = processor_s()
            results[name].append(run[name](case, mine))
            results[name][-1].processor_s = processor_s() - before
    return {name: sorted(done, key=lambda one: one.seconds)[len(done) // 2] for name, done in results.items()}


def line(name: str, way: str, done: Done, found: dict[str, Done], note: str = "") -> None:
    """Print the line of a program in one way, or of all programs, with a comparison with the ways in
    `found`."""
    others = [found[other].seconds if other in found else None for other in ("client", "other")]
    sooner = [f"{seconds / done.seconds:6.2f}x" if seconds else " " * 7 for seconds in others]
    agreed = f"{100 * same(done, found['client']):5.0f}%" if done.texts and "client" in found else " " * 6
    print(
        f"{name:20} {way:13} {done.seconds:8.2f} {' '.join(sooner)} {done.processor_s:8.2f} "
        f"{done.requests:8} {done.computed_tokens:8} {done.output_tokens:7} {done.steps:6} "
        f"{done.model_s:7.2f} {agreed}  {note}".rstrip(),
        flush=True,
    )


def total(batches: Sequence[Done]) -> Done:
    """The sums of all figures of `batches`, without the texts."""
    sums = Done()
    for done in batches:
        for figure in dataclasses.fields(Done):
            if figure.name != "texts":
                setattr(sums, figure.name, getattr(sums, figure.name) + getattr(done, figure.name))
    return sums


def totals(measured: Sequence[dict[str, Done]]) -> None:
    """Print a line for each way: sums over the programs that ran in it, compared with sums of the other ways
    over the same programs."""
    for way in WAYS:
        mine = [found for found in measured if way in found]
        if mine:
            sums = {
                other: total([one[other] for one in mine])
                for other in mine[0]
                if other in ("client", "other")
            }
            line(
                "all" if len(mine) == len(measured) else f"{len(mine)} of them",
                way,
                total([one[way] for one in mine]),
                sums,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="PROGRAM")
    parser.add_argument("--our-model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--base-url", help="another endpoint for the client programs, ending in /v1")
    parser.add_argument("--model", help="what that endpoint calls its model")
    parser.add_argument("--api-key", default="none", help="of that endpoint")
    options = parser.parse_args()
    if (options.base_url is None) != (options.model is None):
        parser.error("--base-url and --model belong together")
    if options.ways is None:
        options.ways = WAYS if options.base_url is not None else WAYS[:-1]
    if ("other" in options.ways) != (options.base_url is not None):
        parser.error("the way other and --base-url belong together")
    print(
        f"{options.batch} programs at once, medians of {options.repeat}; {options.our_model}, {options.dtype}"
    )
    heads = "  seconds  client   other       cpu requests computed  output  steps   model   same"
    print(f"{'':34}{heads}")
    measured = []
    with ways(options) as run:
        for name in options.only:
            case = CASES[name]
            deciding = decides(case)
            mine = {way: run[way] for way in run if way != "process-graph" or not deciding}
            found = measure(case, mine, options.batch, options.repeat) if mine else {}
            measured.append(found)
            for way in run:
                if way in found:
                    note = "calls before its decision" if deciding and way == "http-graph" else ""
                    line(name, way, found[way], found, note)
                else:
                    print(f"{name:20} {way:13}        - it decides in Python, so that it has no graph")
    totals(measured)


if __name__ == "__main__":
    main()
