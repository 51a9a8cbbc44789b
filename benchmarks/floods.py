"""Chats beside one request body that asks for very much, on a real server with the default model.

    python -m benchmarks.floods [--rounds 3] [--chats 8] [--every 10] [--only n prompts …] [--threads 2]

Each round measures for each body, one after the other: `--chats` chats alone, the body alone, and the chats
beside the body. A chat has 40 tokens. The interval between chats is `--every` times the median time of a chat
alone. While something is measured beside a body, the body is sent again whenever its answer is complete; at
the end the connection is closed. Prints a table for docs/performance.md: the 50th and 95th percentile of the
chats' times; the ratio of the 95th percentile to that of the chats alone in the same round; and the engine's
tokens per second with body and chats, over those with the body alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import numpy as np

from tests.end_to_end.served import serve

MODEL = "default"
CHAT_TOKENS = 40
WARM_S = 2.0
"""Seconds for which a body runs before anything is measured."""

T = TypeVar("T")


Body = tuple[str, dict[str, Any]]
"""(path, JSON body) of a request."""


def bodies(rng: random.Random) -> dict[str, Callable[[], Body]]:
    """Name → function that makes an expensive request, with other content at each call."""

    def text(words: int) -> str:
        return " ".join(rng.choices(("one", "tree", "of", "red", "and", "seven", "lines", "north"), k=words))

    def ids(count: int) -> list[int]:
        return rng.choices(range(1000, 40_000), k=count)

    completion = {"model": MODEL, "temperature": 1.0}
    return {
        "n": lambda: ("/v1/completions", completion | {"prompt": text(30), "n": 128, "max_tokens": 400}),
        "prompts": lambda: (
            "/v1/completions",
            completion | {"prompt": [text(20) for _ in range(1000)], "max_tokens": 40},
        ),
        "lists": lambda: (
            "/v1/completions",
            completion | {"prompt": [ids(8000) for _ in range(500)], "max_tokens": 4},
        ),
        "prompt": lambda: ("/v1/completions", completion | {"prompt": ids(8000), "max_tokens": 4}),
    }


class Load:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._random = random.Random(1)

    async def chats(self, count: int, every_s: float) -> list[float]:
        """The times of `count` chats, one after the other. A chat begins `every_s` after the one before
        began, or when the one before has ended, whichever is later."""
        times = []
        for _ in range(count):
            times.append(await self._chat())
            await asyncio.sleep(max(0.0, every_s - times[-1]))
        return times

    @contextlib.asynccontextmanager
    async def flooded(self, body: Callable[[], Body]) -> AsyncIterator[None]:
        """Context in which requests with `body` are sent, one after the other. At its end the connection of
        the current request is closed."""
        flood = asyncio.create_task(self._flood(body))
        try:
            await asyncio.sleep(WARM_S)
            yield
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
            await asyncio.sleep(1.0)  # until its requests have ended

    async def rate(self, spending: Awaitable[T]) -> tuple[T, float]:
        """(result of `spending`, tokens per second that the engine computes meanwhile)."""
        before, began = await self._computed(), time.perf_counter()
        found = await spending
        return found, (await self._computed() - before) / (time.perf_counter() - began)

    async def _flood(self, body: Callable[[], Body]) -> None:
        while True:
            await self._send(*await asyncio.to_thread(body))

    async def _chat(self) -> float:
        words = " ".join(str(self._random.randrange(1000)) for _ in range(10))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Say something about {words}."}],
            "max_tokens": CHAT_TOKENS,
            "ignore_eos": True,
        }
        began = time.perf_counter()
        await self._send("/v1/chat/completions", body)
        return time.perf_counter() - began

    async def _send(self, path: str, body: dict[str, Any]) -> None:
        async with self._session.post(path, json=body) as response:
            await response.read()

    async def _computed(self) -> float:
        """The number of tokens that the engine has computed. Asks again if /metrics lacks it, as it does
        while the scheduler is in a long step."""
        while True:
            async with self._session.get("/metrics") as response:
                text = await response.text()
            found = re.search(r"^ramify_model_tokens_total\S* ([\d.e+]+)", text, re.MULTILINE)
            if found is not None:
                return float(found[1])


async def run(url: str, args: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=3600)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        load = Load(session)
        asked = {name: body for name, body in bodies(random.Random(0)).items() if name in args.only}
        async with load.flooded(bodies(random.Random(2))["n"]):
            await load.chats(2, 0.0)  # compiles what is compiled late
        rows: dict[str, list[tuple[list[float], list[float], float]]] = {name: [] for name in asked}
        for _ in range(args.rounds):
            for name, body in asked.items():
                alone = await load.chats(args.chats, 0.0)
                every_s = args.every * statistics.median(alone)
                async with load.flooded(body):
                    _, rate = await load.rate(asyncio.sleep(args.chats * every_s))
                async with load.flooded(body):
                    beside, together = await load.rate(load.chats(args.chats, every_s))
                over = together / rate
                rows[name].append((alone, beside, over))
                said = f"{_said(alone)} alone, {_said(beside)} beside"
                print(f"  {name}: {said}, {rate:.0f} tokens/s, {over:.2f}", flush=True)
    print("\n| body | chats alone: p50, p95 | beside it | p95 over alone | tokens/s, over without chats |")
    print("| --- | --- | --- | --- | --- |")
    for name, rounds in rows.items():
        alone = [each for one in rounds for each in one[0]]
        beside = [each for one in rounds for each in one[1]]
        over = statistics.median(np.percentile(one[1], 95) / np.percentile(one[0], 95) for one in rounds)
        rate = statistics.median(one[2] for one in rounds)
        print(f"| {name} | {_said(alone)} | {_said(beside)} | {over:.1f}x | {rate:.2f} |")


def _said(times: list[float]) -> str:
    return ", ".join(f"{one:.2f} s" for one in np.percentile(times, [50, 95]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", default=["n", "prompts", "lists", "prompt"])
    args = parser.parse_args()
    with serve(*([] if args.threads is None else ["--threads", str(args.threads)])) as served:
        asyncio.run(run(served.url, args))


if __name__ == "__main__":
    main()
