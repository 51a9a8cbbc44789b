"""A live server under hostile constraints: is every one answered, and does anybody else notice?

    python -m benchmarks.hostile [--count 1000] [--at-once 4] [--seconds 20]

Starts a server of the default model. Some clients stream free text without end; their tokens per second and
gaps between tokens are measured alone, then while `hostile_constraints` are sent one after the other, then
alone again. Prints what the constraints were answered, how long that took, and the ratio of the gaps.
Exits 1 if one was not answered, if the server answered one with a 5xx, or if a process was replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from benchmarks.hostile_constraints import hostile

BUSY_CLIENTS = 4
ANSWER_S = 120.0


class Victims:
    """Clients that stream free text; `gaps` are the seconds between their chunks."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.gaps: list[float] = []

    async def run(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            while True:
                body = {
                    "model": "default",
                    "prompt": f"Story number {number}:",
                    "max_tokens": 200,
                    "temperature": 1.0,
                    "ignore_eos": True,
                    "stream": True,
                }
                async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                    last = None
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last is not None:
                                self.gaps.append(now - last)
                            last = now

    async def measured(self, seconds: float) -> list[float]:
        self.gaps = []
        await asyncio.sleep(seconds)
        return self.gaps


async def attack(
    url: str, count: int, at_once: int
) -> tuple[collections.Counter[str], list[float], list[str]]:
    """Send `count` constraints, `at_once` at a time."""
    answers: collections.Counter[str] = collections.Counter()
    times: list[float] = []
    wrong: list[str] = []
    numbers = iter(range(count))

    async def worker(client: httpx.AsyncClient) -> None:
        for number in numbers:
            kind, fields = hostile(number)
            if isinstance(fields, bytes):
                content = fields
            else:
                # Halves of surrogate pairs stay escaped: the server is to refuse them itself.
                whole = {"model": "default", "prompt": "Go:", "max_tokens": 4, "temperature": 0.0} | fields
                content = json.dumps(whole).encode()
            began = time.perf_counter()
            try:
                answer = await client.post(
                    f"{url}/v1/completions", content=content, headers={"content-type": "application/json"}
                )
            except httpx.HTTPError as error:
                wrong.append(f"{number} {kind}: {error!r}")
                continue
            times.append(time.perf_counter() - began)
            answers[f"{kind} {answer.status_code}"] += 1
            if answer.status_code >= 500:
                wrong.append(f"{number} {kind}: {answer.status_code} {answer.text[:200]}")

    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        await asyncio.gather(*(worker(client) for _ in range(at_once)))
    return answers, times, wrong


def processes_below(pid: int) -> set[int]:
    """The ring's long-lived processes: children of `pid`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


async def run(url: str, server: int, count: int, at_once: int, seconds: float) -> bool:
    victims = Victims(url)
    streams = [asyncio.create_task(victims.run(i)) for i in range(BUSY_CLIENTS)]
    await victims.measured(3.0)
    ring = processes_below(server)
    before = await victims.measured(seconds)
    victims.gaps = under = []
    began = time.perf_counter()
    answers, times, wrong = await attack(url, count, at_once)
    took = time.perf_counter() - began
    after = await victims.measured(seconds)
    same = processes_below(server) == ring
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    for kind, number in sorted(answers.items()):
        print(f"{kind:24} {number:5}")
    times.sort()
    print(
        f"{len(times)} answers in {took:.0f} s; p50 {times[len(times) // 2]:.3f} s, slowest {times[-1]:.1f} s"
    )
    alone = before + after
    for name, gaps in (("alone", alone), ("under attack", under)):
        gaps.sort()
        at = [1e3 * statistics.mean(gaps), *(1e3 * gaps[int(len(gaps) * part)] for part in (0.5, 0.99))]
        print(f"{name:13} gap: mean {at[0]:6.1f} ms, p50 {at[1]:6.1f}, p99 {at[2]:6.1f}")
    print(f"ratio of the means {statistics.mean(under) / statistics.mean(alone):.3f}")
    print("the same processes" if same else "A PROCESS WAS REPLACED")
    for line in wrong:
        print(line)
    return same and not wrong and sum(answers.values()) == count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    sys.setrecursionlimit(10_000)  # the schemas are nested deeper than json.dumps would go
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ramify", "serve", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if re.search(r"http://", line):
                break
        url = f"http://127.0.0.1:{port}"
        fine = asyncio.run(run(url, server.pid, args.count, args.at_once, args.seconds))
    finally:
        server.terminate()
        server.wait(60)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
