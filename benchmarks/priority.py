"""Chats beside a batch, with and without priorities, on the real engine.

    python -m benchmarks.priority [--rows 128] [--every 2.5] [--seconds 60] [--rounds 3]

Chats have 40 prompt tokens and 20 of output. One comes every `--every` seconds, give or take a fifth,
whether or not the one before has ended. The batch keeps `--rows` requests in flight. Each has 150 prompt
tokens, of which 60 are the same for all, and 60 to 180 of output. Each round measures, for `--seconds` each:
chats alone, the batch alone, both with equal priorities, and both with the batch at -1. Prints a table for
docs/performance.md: medians over rounds of what each round has measured, and of its ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np

import ramify as rm
from ramify.loop import submit
from ramify.messages import SchedulerStats
from ramify.priority import BATCH

WARM_S = 5.0
"""A batch runs this long before it is measured, so that its rows are out of step."""
VOCABULARY = range(1000, 40_000)


@dataclasses.dataclass(frozen=True)
class Measured:
    chats: Sequence[float]
    """Seconds of each chat."""
    batch: float
    """Output tokens of the batch in each second."""


class Load:
    def __init__(self, engine: rm.Engine, rows: int, every_s: float, seed: int) -> None:
        self._engine = engine
        self._rows, self._every_s = rows, every_s
        self._random = random.Random(seed)
        self._common = self._ids(60)
        self._tokens = 0

    async def measure(self, seconds: float, *, chats: bool, batch: int | None) -> Measured:
        """batch : the priority of its requests; None for no batch"""
        async with self._batch(batch):
            before, began = await self._stats(), time.perf_counter()
            times = await self._chats(seconds) if chats else await asyncio.sleep(seconds, [])
            after, took = await self._stats(), time.perf_counter() - began
        own = after.output_tokens - before.output_tokens - 20 * len(times)
        return Measured(times, own / took)

    async def _chats(self, seconds: float) -> list[float]:
        running: list[asyncio.Task[float]] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            running.append(asyncio.create_task(self._chat()))
            await asyncio.sleep(self._every_s * self._random.uniform(0.8, 1.2))
        return await asyncio.gather(*running)

    async def _chat(self) -> float:
        began = time.perf_counter()
        await self._engine.acomplete([self._ids(40)], max_tokens=20, ignore_eos=True, priority=0)
        return time.perf_counter() - began

    @contextlib.asynccontextmanager
    async def _batch(self, priority: int | None) -> AsyncIterator[None]:
        rows = 0 if priority is None else self._rows
        running = [asyncio.create_task(self._row_after_row(priority or 0)) for _ in range(rows)]
        try:
            if rows:
                await asyncio.sleep(WARM_S)
            yield
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _row_after_row(self, priority: int) -> None:
        for _ in itertools.count():
            await self._engine.acomplete(
                [self._common + self._ids(90)],
                max_tokens=self._random.randrange(60, 180),
                ignore_eos=True,
                priority=priority,
            )

    async def _stats(self) -> SchedulerStats:
        return await self._engine._frontend.control.stats()

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.choices(VOCABULARY, k=count))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--every", type=float, default=2.5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cases = {
        "chats alone": {"chats": True, "batch": None},
        "batch alone": {"chats": False, "batch": 0},
        "both, equal priorities": {"chats": True, "batch": 0},
        "both, batch at -1": {"chats": True, "batch": BATCH},
    }
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    # 300 tokens a row, and as many again for what was computed before.
    with rm.Engine(kv_memory_gb=4 * args.rows / 128, max_running=args.rows) as engine:
        load = Load(engine, args.rows, args.every, seed=0)
        submit(load.measure(args.every, chats=True, batch=0)).result()  # compiles what is compiled late
        for _ in range(args.rounds):
            for name, case in cases.items():
                found[name].append(submit(load.measure(args.seconds, **case)).result())  # type: ignore[arg-type]
                print(f"  {name}: {_seconds(found[name][-1].chats)}, {found[name][-1].batch:.0f}", flush=True)
    print(f"\n{args.rows} rows, a chat of 20 tokens every {args.every:g} s, {args.rounds} rounds\n")
    print("| | chats: p50, p95 | over alone | batch, tokens/s | over alone |")
    print("| --- | --- | --- | --- | --- |")
    alone, batch = found["chats alone"], found["batch alone"]
    for name, rounds in found.items():
        chats = [np.percentile(one.chats, [50, 95]) for one in rounds if one.chats]
        over = [here[1] / np.percentile(one.chats, 95) for here, one in zip(chats, alone, strict=False)]
        shares = [here.batch / one.batch for here, one in zip(rounds, batch, strict=True)]
        p50, p95 = (statistics.median(column) for column in zip(*chats, strict=True)) if chats else (0, 0)
        beside = name != "chats alone"
        print(
            f"| {name}"
            f" | {f'{p50:.2f} s, {p95:.2f} s' if chats else ''}"
            f" | {f'p95 {statistics.median(over):.1f}x' if chats else ''}"
            f" | {f'{statistics.median([one.batch for one in rounds]):.0f}' if beside else ''}"
            f" | {f'{statistics.median(shares):.2f}' if beside else ''} |"
        )


def _seconds(times: Sequence[float]) -> str:
    return ", ".join(f"{one:.2f} s" for one in np.percentile(times, [50, 95])) if times else "no chats"


if __name__ == "__main__":
    main()
