"""Chats beside one request body that asks for very much, on a real server with the default model.

    python -m benchmarks.floods [--rounds 3] [--chats 8] [--every 10] [--only n prompts …] [--keys]
        [--threads 2]

Each round measures for each body, one after the other: `--chats` chats alone, the body alone, and the chats
beside the body. A chat has 40 tokens. The interval between chats is `--every` times the median time of a chat
alone. While something is measured beside a body, the body is sent again whenever its answer is complete; at
the end the connection is closed. Prints a table for docs/performance.md: the 50th and 95th percentile of the
chats' times; the ratio of the 95th percentile to that of the chats alone in the same round; and the engine's
tokens per second with body and chats, over those with the body alone.

The body `requests` is sent 256 times at a time, as requests of their own. With ``--keys`` bodies are of one
API key and chats of another; without it all are of nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import aiohttp
import numpy as np

from tests.end_to_end.served import serve

MODEL = "default"
CHAT_TOKENS = 40
FLOOD, CHATS = "rk-flood", "rk-chats"
AT_ONCE = {"requests": 256}
"""Body → number of times that it is sent at a time, if more than once."""
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
        "requests": lambda: ("/v1/completions", completion | {"prompt": text(100), "max_tokens": 400}),
    }


class Times(NamedTuple):
    """Seconds of one chat until its first token, and until its end."""

    first: float
    total: float


class Load:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._random = random.Random(1)

    async def chats(self, count: int, every_s: float) -> list[Times]:
        """The times of `count` chats, one after the other. A chat begins `every_s` after the one before
        began, or when the one before has ended, whichever is later."""
        times = []
        for _ in range(count):
            times.append(await self._chat())
            await asyncio.sleep(max(0.0, every_s - times[-1].total))
        return times

    @contextlib.asynccontextmanager
    async def flooded(self, body: Callable[[], Body], at_once: int = 1) -> AsyncIterator[None]:
        """Context in which requests with `body` are sent, `at_once` at a time. At its end the connections of
        the current requests are closed."""
        floods = [asyncio.create_task(self._flood(body)) for _ in range(at_once)]
        try:
            await asyncio.sleep(WARM_S)
            yield
        finally:
            for flood in floods:
                flood.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            await asyncio.sleep(1.0)  # until its requests have ended

    async def rate(self, spending: Awaitable[T]) -> tuple[T, float]:
        """(result of `spending`, tokens per second that the engine computes meanwhile)."""
        before, began = await self._computed(), time.perf_counter()
        found = await spending
        return found, (await self._computed() - before) / (time.perf_counter() - began)

    async def _flood(self, body: Callable[[], Body]) -> None:
        while True:
            await self._send(*await asyncio.to_thread(body), FLOOD)

    async def _chat(self) -> Times:
        words = " ".join(str(self._random.randrange(1000)) for _ in range(10))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Say something about {words}."}],
            "max_tokens": CHAT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.perf_counter()
        first = await self._send("/v1/chat/completions", body, CHATS)
        return Times(first - began, time.perf_counter() - began)

    async def _send(self, path: str, body: dict[str, Any], key: str) -> float:
        """Send a request, and read its response. Returns the time at which the first token came."""
        headers = {"authorization": f"Bearer {key}"}
        first = 0.0
        async with self._session.post(path, json=body, headers=headers) as response:
            async for line in response.content:
                if not first and b'"content":"' in line.replace(b'"content":""', b""):
                    first = time.perf_counter()
            if response.status != 200:
                raise RuntimeError(f"{path}: status {response.status}")
        return first

    async def _computed(self) -> float:
        """The number of tokens that the engine has computed. Asks again if /metrics lacks it, as it does
        while the scheduler is in a long step."""
        while True:
            headers = {"authorization": f"Bearer {FLOOD}"}
            async with self._session.get("/metrics", headers=headers) as response:
                text = await response.text()
            found = re.search(r"^ramify_model_tokens_total\S* ([\d.e+]+)", text, re.MULTILINE)
            if found is not None:
                return float(found[1])


async def run(url: str, args: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=3600)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        load = Load(session)
        asked = {name: body for name, body in bodies(random.Random(0)).items() if name in args.only}
        async with load.flooded(bodies(random.Random(2))["n"]):
            await load.chats(2, 0.0)  # compiles what is compiled late
        rows: dict[str, list[tuple[list[Times], list[Times], float]]] = {name: [] for name in asked}
        for _ in range(args.rounds):
            for name, body in asked.items():
                alone = await load.chats(args.chats, 0.0)
                every_s = args.every * statistics.median(chat.total for chat in alone)
                at_once = AT_ONCE.get(name, 1)
                async with load.flooded(body, at_once):
                    _, rate = await load.rate(asyncio.sleep(args.chats * every_s))
                async with load.flooded(body, at_once):
                    beside, together = await load.rate(load.chats(args.chats, every_s))
                over = together / rate
                rows[name].append((alone, beside, over))
                said = f"{_said(alone)} alone, {_said(beside)} beside"
                print(f"  {name}: {said}, {rate:.0f} tokens/s, {over:.2f}", flush=True)
    print(
        "\n| body | chats alone: p50, p95 | beside it | p95 over alone | of the first token"
        " | tokens/s, over without chats |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rounds in rows.items():
        alone = [each for one in rounds for each in one[0]]
        beside = [each for one in rounds for each in one[1]]
        total, first = (
            statistics.median(_p95(one[1], field) / _p95(one[0], field) for one in rounds)
            for field in ("total", "first")
        )
        rate = statistics.median(one[2] for one in rounds)
        print(f"| {name} | {_said(alone)} | {_said(beside)} | {total:.1f}x | {first:.1f}x | {rate:.2f} |")


def _p95(times: list[Times], field: str) -> float:
    return float(np.percentile([getattr(one, field) for one in times], 95))


def _said(times: list[Times]) -> str:
    totals, firsts = (
        np.percentile(part, [50, 95]) for part in ([t.total for t in times], [t.first for t in times])
    )
    return f"{totals[0]:.2f} s, {totals[1]:.2f} s (first token {firsts[0]:.2f} s, {firsts[1]:.2f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", default=["n", "prompts", "lists", "prompt"])
    parser.add_argument("--keys", action="store_true")
    args = parser.parse_args()
    flags = [] if args.threads is None else ["--threads", str(args.threads)]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as keys:
        if args.keys:
            for key, more in ((FLOOD, "admin = true\n"), (CHATS, "")):
                digest = hashlib.sha256(key.encode()).hexdigest()
                keys.write(f'[keys.{key.removeprefix("rk-")}]\nhash = "sha256:{digest}"\n{more}')
            keys.flush()
            flags += ["--keys", keys.name]
        with serve(*flags) as served:
            asyncio.run(run(served.url, args))


if __name__ == "__main__":
    main()
