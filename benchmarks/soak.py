"""A long run of everything at once against one server, with every answer checked.

    python -m benchmarks.soak [--minutes 60] [--seed 1] [--clients 6] [--no-kills] [-- FLAGS OF SERVE]
    python -m benchmarks.soak [--minutes 60] --url http://127.0.0.1:30000

Starts `ramify serve --deterministic`, or takes the server at `--url`, which has to be deterministic too.
First each request of a fixed list is sent alone. Then the clients send the same requests at random, all
together: chats, streamed and not, schemas, decisions, embeddings, sampled texts with seeds, programs, batch
files. They also abort requests, close sockets in the middle of answers, and send prompts of random ids that
are never sent again. With a server of its own an engine process is killed now and then. If /v1/models shows
states, models are unloaded and loaded.

Checked: each answer, its usage and its probabilities equal those of the request alone, to the bit. Answers to
schemas satisfy them. Answers that are cut are prefixes. Only a request that overlaps a kill or the restart
after it may fail. At the end no request is left, and no page is in use or leased; after a flush all pages are
free. The memory (RssAnon), the descriptors and the threads of each process that lived from `WARM_S` on are
flat: the growth over the run by the Theil-Sen slope is at most `MOST_GROWTH`.

Prints a line a minute and a table at the end. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import openai

from benchmarks.soak_requests import KINDS, Cases, Client, Wrong
from tests.end_to_end.served import Served, serve

SAMPLE_S, KILL_S, LOAD_S, FLUSH_S = 10.0, 90.0, 20.0, 45.0
"""Mean seconds between two samples of the processes, kills, unloads of a model, and flushes of the cache."""
WARM_S = 60.0
"""Seconds at the beginning that do not count for growth; a quarter of the run if that is less."""
MOST_GROWTH = {"MB": 24.0, "fds": 3.0, "threads": 2.0}


class Processes:
    """Samples of the memory, the descriptors and the threads of a process and of all its descendants."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self.samples: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def pids(self) -> list[int]:
        """The process and its descendants; none if it is on another machine."""
        if self._pid is None:
            return []
        below: dict[int, list[int]] = defaultdict(list)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                below[int(stat.read_text().rsplit(")", 1)[1].split()[1])].append(int(stat.parent.name))
        found = [self._pid]
        for pid in found:
            found += below[pid]
        return found

    def sample(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError, KeyError):  # it has ended, or is a zombie
                here = Path(f"/proc/{pid}")
                status = dict(re.findall(r"^(\w+):\s+(\d+)", (here / "status").read_text(), re.M))
                found = int(status["RssAnon"]) / 1024, len(os.listdir(here / "fd")), int(status["Threads"])
                self.samples[f"{role_of(pid)} {pid}"].append((time.monotonic(), *found))

    def growth(self, began: float) -> Iterator[tuple[str, str, float, float]]:
        """(process, quantity, first value, growth a second) of each process with 8 samples since `began`."""
        for process, samples in self.samples.items():
            late = [sample for sample in samples if sample[0] >= began]
            for index, name in enumerate(MOST_GROWTH, 1) if len(late) >= 8 else ():
                yield process, name, late[0][index], theil_sen([(each[0], each[index]) for each in late])


def role_of(pid: int) -> str:
    """The module that a process runs; "server" for the first one, "ended" for one that is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "ended"
    found = re.search(r"ramify\.runtime\.([a-z_.]+)", command)
    return "server" if found is None else found[1]


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Sen 1968): a third of them may be outliers."""
    pairs = itertools.combinations(points, 2)
    return statistics.median((late - early) / (after - before) for (before, early), (after, late) in pairs)


class Soak:
    """One run. `served`: the server that this process has started; None for one elsewhere."""

    def __init__(self, client: Client, cases: Cases, served: Served | None, seed: int, kills: bool) -> None:
        self._client, self._cases, self._seed, self._kills = client, cases, seed, kills
        self._draw = random.Random(seed)
        self.processes = Processes(None if served is None else served.process.pid)
        self.counts, self.problems = Counter[str](), list[str]()
        self._down: list[tuple[float, float]] = []
        """(time of a kill, time at which the server was ready again); infinite until then."""

    async def run(self, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        tasks = [self._send(random.Random(f"{self._seed}/{index}"), end) for index in range(clients)]
        tasks += [self._every(SAMPLE_S, end, self._sample), self._every(FLUSH_S, end, self._flush)]
        if self._kills:
            tasks.append(self._every(KILL_S, end - 30, self._kill))
        states = (await self._client.get("/v1/models"))["data"]
        if len(states) > 1 and all("state" in model for model in states):
            tasks.append(self._every(LOAD_S, end - 30, self._unload_and_load))
        await asyncio.gather(*tasks)

    async def _every(self, mean: float, end: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(min(mean, max(0.0, end - time.monotonic())))
            if time.monotonic() >= end:
                return
            await act()

    async def _send(self, draw: random.Random, end: float) -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                kind = draw.choices(list(KINDS), KINDS.values())[0]
                await getattr(self._cases, kind)(draw)
                self.counts[kind] += 1
            except Exception as error:
                # A request that the kill reached may learn of it a little later.
                hit = any(began < up + 2 and time.monotonic() > down for down, up in self._down)
                if isinstance(error, Wrong | jsonschema.ValidationError) or not hit:
                    self._problem(f"{type(error).__name__}: {error}")
                else:
                    self.counts["failed by a kill"] += 1
                    await asyncio.sleep(0.2)

    async def _sample(self) -> None:
        self.processes.sample()
        if len(next(iter(self.processes.samples.values()), ())) % 6 == 1:
            print(f"{time.strftime('%H:%M:%S')} {dict(self.counts)}, {len(self.problems)} wrong", flush=True)

    async def _flush(self) -> None:
        with contextlib.suppress(openai.APIError):
            await self._client.post("/flush_cache", {})

    async def _kill(self) -> None:
        pid = self._draw.choice(self.processes.pids()[1:])
        role = role_of(pid)
        down = time.monotonic()
        self._down.append((down, float("inf")))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(1)
        one = {"model": self._client.models[0], "prompt": "x", "max_tokens": 1}
        up = False
        while not up and time.monotonic() < down + 120:
            with contextlib.suppress(openai.APIError):
                await self._client.post("/v1/completions", one)
                up = True
            await asyncio.sleep(0.3)
        self._down[-1] = (down, time.monotonic())
        self.counts[f"kill of {role}"] += 1
        if not up:
            self._problem(f"no answer 120 s after {role} was killed")

    async def _unload_and_load(self) -> None:
        name = self._draw.choice(self._client.models)
        for act in ("unload", "load"):
            try:
                await self._client.post(f"/models/{name}/{act}", {})
            except openai.APIError as error:
                if getattr(error, "status_code", 0) != 409 and not self._down:  # 409: it has requests
                    self._problem(f"{act} of {name}: {error}")
            self.counts[act] += 1

    async def end(self) -> None:
        """Check of each model that no request is left, and no page in use or leased."""
        for model in self._client.models:
            # The leases of programs whose client was cut off end by their time.
            for _ in range(600):
                stats, left = await self._left(model)
                if not left:
                    break
                await asyncio.sleep(0.5)
            else:
                self._problem(f"{model}: left 300 s after the last answer: {left}")
            parts = [stats[f"pages_{state}"] for state in ("free", "evictable", "leased", "in_use")]
            if sum(parts) != stats["pages_total"]:
                self._problem(f"{model}: pages {parts} do not add up to {stats['pages_total']}")
        await self._client.post("/flush_cache", {})
        stats, _ = await self._left(self._client.models[0])
        if len(self._client.models) == 1 and stats["pages_free"] != stats["pages_total"]:
            self._problem(f"{stats['pages_total'] - stats['pages_free']} pages are not free after a flush")

    async def _left(self, model: str) -> tuple[dict[str, Any], dict[str, int]]:
        """(counters of the scheduler, those that are 0 without requests and are not)."""
        info = await self._client.get(f"/get_server_info?model={quote(model)}")
        stats = info["internal_states"][0]
        names = ("running", "waiting", "compiling", "pages_in_use", "pages_leased")
        counted = {name: stats[name] for name in names} | {"in_flight": info["in_flight"]}
        return stats, {name: count for name, count in counted.items() if count}

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        print(f"{time.strftime('%H:%M:%S')} WRONG {text}", flush=True)


async def soak(options: argparse.Namespace, url: str, served: Served | None) -> int:
    names = [model["id"] for model in (await Client(url).get("/v1/models"))["data"]]
    client = Client(url, names)
    cases = Cases(client)
    run = Soak(client, cases, served, options.seed, served is not None and not options.no_kills)
    print(f"{len(cases.all)} requests alone, models {names}", flush=True)
    await cases.send_alone()
    seconds, began = 60 * options.minutes, time.monotonic()
    await run.run(options.clients, seconds)
    await run.end()
    client.close()
    warm = min(WARM_S, seconds / 4)
    for process, name, first, slope in run.processes.growth(began + warm):
        grown = slope * (seconds - warm)
        print(f"{process:32} {name:8} {first:7.1f} {grown:+7.2f} in the run {3600 * slope:+8.2f} an hour")
        if grown > MOST_GROWTH[name]:
            run.problems.append(f"{process} grew by {grown:.1f} {name}")
    print(f"{sum(run.counts.values())} in {options.minutes:g} minutes: {dict(run.counts)}")
    print("\n".join(["wrong:", *run.problems]) if run.problems else "nothing is wrong")
    return 1 if run.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("serve", nargs="*", help="models and flags for ramify serve, after --")
    options = parser.parse_args(argv)
    if options.url is not None:
        return asyncio.run(soak(options, options.url, None))
    with serve("--deterministic", *options.serve) as served:
        status = asyncio.run(soak(options, served.url, served))
        if status:
            print("".join(served.lines[-40:]))
        return status


if __name__ == "__main__":
    raise SystemExit(main())
