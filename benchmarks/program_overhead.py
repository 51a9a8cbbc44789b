"""What a call of a program costs outside of the model, in process.

    python -m benchmarks.program_overhead [--turns 200] [--programs 64]

Programs of many turns run on a backend that answers at once. Printed is the processor time of all threads
for each turn (a user turn, an assistant turn, a gen and where it is said a read), the least of several runs:
unlike the clock it does not count what else the machine does. The aim is under 100 us a call.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable

import ramify as rm
from ramify.lang.chat import chatml
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


def least(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--programs", type=int, default=64)
    options = parser.parse_args()
    turns, programs, backend = options.turns, options.programs, Instant()

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
        print(f"{name:32} {least(work) / count / turns * 1e6:7.1f} us a call")


if __name__ == "__main__":
    main()
