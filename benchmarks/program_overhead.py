"""What a call of a program costs outside of the model, in process and over HTTP.

    python -m benchmarks.program_overhead [--turns 200] [--programs 64] [--http]

Programs of many turns run on a backend that answers at once. Printed is the processor time of all threads
for each turn (a user turn, an assistant turn, a gen and where it is said a read), the least of several runs:
unlike the clock it does not count what else the machine does. The aim is under 100 us a call in process.

With ``--http`` a server process stands between, and its time is added; the aim is under 1 ms a call. "steps"
sends each call as a request, "compiled" submits each program as one graph.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator

import ramify as rm
from ramify.lang.prompt.chat import chatml
from ramify.messages import Finish, Generate, ModelInfo, TextChunk, Usage

REPEATS = 5


class Instant:
    """Answers two tokens at once."""

    async def info(self) -> ModelInfo:
        return ModelInfo(
            name="instant",
            path="",
            vocab_size=2,
            context_length=1 << 20,
            eos_token_ids=(0,),
            bos_token_id=None,
            dtype="",
            device="",
            chat_format=chatml(),
        )

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        yield TextChunk(
            rid=request.rid,
            text="ok",
            ids=(0, 1),
            usage=Usage(prompt_tokens=3, completion_tokens=2),
            finish=Finish(reason="stop"),
            kept_ids=2,
        )

    async def end_program(self, program: str) -> None: ...

    async def aclose(self) -> None: ...


@rm.function
def queued(s: rm.ProgramState, turns: int) -> None:
    """All steps are taken before the first is done."""
    for _ in range(turns):
        s += rm.user("hello") + rm.assistant(rm.gen("answer", max_tokens=8))


@rm.function
def read(s: rm.ProgramState, turns: int) -> None:
    """Each answer is read before the next question."""
    for _ in range(turns):
        s += rm.user("hello") + rm.assistant(rm.gen("answer", max_tokens=8))
        _ = s["answer"]


@rm.function
async def awaited(s: rm.ProgramState, turns: int) -> None:
    """`read` in an event loop."""
    for _ in range(turns):
        s += rm.user("hello") + rm.assistant(rm.gen("answer", max_tokens=8))
        await s.aget("answer")


def least(
    work: Callable[[], object], used_elsewhere: Callable[[], float] = lambda: 0.0
) -> tuple[float, float]:
    """Seconds of processor time, here and elsewhere."""
    times = []
    for _ in range(REPEATS):
        here, elsewhere = time.process_time(), used_elsewhere()
        work()
        times.append((time.process_time() - here, used_elsewhere() - elsewhere))
    return min(times, key=sum)


def serve() -> None:
    """Serve `Instant`; a line on standard input is answered with the processor time so far."""
    from ramify.programs.route import router
    from tests.server.fake_frontend import FakeFrontend, LiveServer

    class StubFrontend(FakeFrontend):
        def __init__(self) -> None:
            super().__init__()
            self._instant = Instant()
            self.info = asyncio.run(self._instant.info())

        def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
            return self._instant.generate(request)

    with LiveServer(StubFrontend(), router, max_running=256) as server:
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)


@contextlib.contextmanager
def served() -> Iterator[tuple[rm.RuntimeEndpoint, Callable[[], float]]]:
    """A backend, and the processor time of the server behind it."""
    command = [sys.executable, "-m", "benchmarks.program_overhead", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def used() -> float:
            print(file=stdin, flush=True)
            return float(stdout.readline())

        backend = rm.RuntimeEndpoint(stdout.readline().strip())
        try:
            yield backend, used
        finally:
            backend.close()
            stdin.close()


def over_http(turns: int, programs: int) -> None:
    rows = [{"turns": turns}] * programs
    with served() as (backend, used):
        for how in ("steps", "compiled"):
            run = queued.with_options(backend=backend, compiled=how == "compiled").run_batch
            spent = least(functools.partial(run, rows, concurrency=programs), used)
            here, there = (seconds / programs / turns * 1e6 for seconds in spent)
            name = f"{programs} programs over HTTP, {how}"
            print(f"{name:32} {here + there:7.1f} us a call: {here:.1f} here, {there:.1f} in the server")


def in_process(turns: int, programs: int) -> None:
    backend = Instant()

    async def together() -> None:
        await asyncio.gather(*(awaited.run(turns, backend=backend) for _ in range(programs)))

    cases: list[tuple[str, int, Callable[[], object]]] = [
        ("one program, queued", 1, lambda: queued.run(turns, backend=backend)),
        ("one program, each answer read", 1, lambda: read.run(turns, backend=backend)),
        ("one async program", 1, lambda: asyncio.run(awaited.run(turns, backend=backend))),
        (f"{programs} async programs", programs, lambda: asyncio.run(together())),
        (
            f"{programs} programs in threads",
            programs,
            lambda: queued.run_batch([{"turns": turns}] * programs, backend=backend, concurrency=programs),
        ),
    ]
    for name, count, work in cases:
        print(f"{name:32} {sum(least(work)) / count / turns * 1e6:7.1f} us a call")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.http:
        over_http(options.turns, options.programs)
    else:
        in_process(options.turns, options.programs)


if __name__ == "__main__":
    main()
