"""A chat beside one body that asks for very much, on a real server with the default model.

    python -m benchmarks.floods [--rounds 3] [--seconds 20] [--every 2] [--only n prompts …]

Each round measures for each body, one after the other: chats alone, the body alone, and chats beside the
body, for `--seconds` each. A chat of 40 tokens comes every `--every` seconds, on a connection of its own, give
or take a fifth. A body that is not done by then is hung up on, and one that is done is followed by the next.
Prints a table for docs/performance.md: the 50th and 95th percentile of the chats, the ratio of the 95th to that
alone in the same round, and the tokens that the engine computes per second beside chats, over those of the body
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import numpy as np

MODEL = "default"
CHAT_TOKENS = 40


Body = tuple[str, dict[str, Any]]
"""The path of a request, and its body."""


def bodies(rng: random.Random) -> dict[str, Callable[[], Body]]:
    """By name: makes a request that asks for very much, another one each time."""

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
        "messages": lambda: (
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "hi"}] * 100_000, "max_tokens": 4},
        ),
    }


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server that this process has started."""
    command = [sys.executable, "-c", "from ramify.cli.main import main; main()", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://[\w.]+:\d+", line):
                yield found[0]
                return
        raise RuntimeError("The server has not started.")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class Load:
    def __init__(self, session: aiohttp.ClientSession, every_s: float) -> None:
        self._session, self._every_s = session, every_s
        self._random = random.Random(1)

    async def measure(
        self, seconds: float, body: Callable[[], Body] | None, *, chats: bool
    ) -> tuple[list[float], float]:
        """The times of the chats, and the tokens computed per second."""
        flood = None if body is None else asyncio.create_task(self._flood(body))
        before, began = await self._computed(), time.perf_counter()
        times = []
        while time.perf_counter() - began < seconds:
            await asyncio.sleep(self._every_s * self._random.uniform(0.8, 1.2) if chats else 0.2)
            if chats:
                times.append(await self._chat())
        rate = (await self._computed() - before) / (time.perf_counter() - began)
        if flood is not None:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
            await asyncio.sleep(1.0)  # until its requests have ended
        return times, rate

    async def _flood(self, body: Callable[[], Body]) -> None:
        """One request after the other."""
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
        async with self._session.get("/metrics") as response:
            text = await response.text()
        found = re.search(r"^ramify_model_tokens_total\S* ([\d.e+]+)", text, re.MULTILINE)
        assert found is not None
        return float(found[1])


async def run(url: str, args: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=3600)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        load = Load(session, args.every)
        asked = {name: body for name, body in bodies(random.Random(0)).items() if name in args.only}
        await load.measure(5.0, bodies(random.Random(2))["n"], chats=True)  # compiles what is compiled late
        rows: dict[str, list[tuple[list[float], list[float], float]]] = {name: [] for name in asked}
        for _ in range(args.rounds):
            for name, body in asked.items():
                alone, _ = await load.measure(args.seconds, None, chats=True)
                _, rate = await load.measure(args.seconds, body, chats=False)
                beside, together = await load.measure(args.seconds, body, chats=True)
                rows[name].append((alone, beside, together / rate))
                said = f"{_said(alone)} alone, {_said(beside)} beside"
                print(f"  {name}: {said}, {rate:.0f} tokens/s, {together / rate:.2f}", flush=True)
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
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--only", nargs="*", default=["n", "prompts", "lists", "prompt", "messages"])
    args = parser.parse_args()
    with server() as url:
        asyncio.run(run(url, args))


if __name__ == "__main__":
    main()
