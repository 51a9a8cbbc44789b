"""A long run of everything at once against one server, with every answer checked.

    python -m benchmarks.soak [--minutes 60] [--seed 1] [--clients 6] [--no-kills] [-- MODELS, FLAGS OF SERVE]
    python -m benchmarks.soak [--minutes 60] --url http://127.0.0.1:30000 [--api-key KEY]…

Starts `ramify serve --deterministic` with two API keys, a cold tier, and KV pages for fewer tokens than the
clients use together; or takes the server at `--url`, which has to be deterministic too. The cache scopes of
its keys have to be different, and the first key is for operators.

First each request of a fixed list is sent alone. Then the clients send the same requests at random, all
together, with either key: chats, streamed and not, schemas, decisions, embeddings, sampled texts with seeds,
programs and pins of them, leases, batch files. They also abort requests, close sockets in the middle of
answers, and send prompts of random ids. The cache is flushed now and then.

Of several models all but the first are unloaded and loaded, and with a server of its own their processes are
killed; those of the first model live for the whole run. With one model its processes are killed in the first
half of the run.

Checked: each answer, its usage and its probabilities equal those of the request alone, to the bit. Answers to
schemas satisfy them. Answers that are cut are prefixes. No key finds a prompt of the other one in the cache,
or aborts its request. Only a request of a killed model may fail that overlaps the kill or the restart after
it. At the end no request is left, nothing is held, and no page is in use; after a flush all pages are free.
The memory (RssAnon), the descriptors and the threads of each process are flat from `WARM_S` after its start
on: the growth while it lived, by the Theil-Sen slope, is at most `MOST_GROWTH`.

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
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import openai

from benchmarks.soak_requests import KINDS, Cases, Client, Wrong
from ramify.runtime.server.keys.file import new_key
from tests.end_to_end.served import Served, serve

SAMPLE_S, KILL_S, LOAD_S, FLUSH_S = 10.0, 90.0, 20.0, 45.0
"""Mean seconds between two samples of the processes, kills, unloads of a model, and flushes of the cache."""
WARM_S = 240.0
"""Seconds at the start of a process that do not count for growth."""
MOST_GROWTH = {"MB": 24.0, "fds": 3.0, "threads": 2.0}
KV_GB = 0.5
"""GiB of KV pages of each model: 23,000 tokens of the default model."""


class Processes:
    """Samples of the memory, the descriptors and the threads of a process and of all its descendants."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self.samples: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def pids(self, without: Collection[int] = ()) -> list[int]:
        """The process and its descendants, but for the processes `without` and theirs; none if it is on
        another machine."""
        if self._pid is None:
            return []
        below: dict[int, list[int]] = defaultdict(list)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                below[int(stat.read_text().rsplit(")", 1)[1].split()[1])].append(int(stat.parent.name))
        found = [self._pid]
        for pid in found:
            found += [child for child in below[pid] if child not in without]
        return found

    def sample(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(OSError, KeyError):  # it has ended, or is a zombie
                here = Path(f"/proc/{pid}")
                status = dict(re.findall(r"^(\w+):\s+(\d+)", (here / "status").read_text(), re.M))
                found = int(status["RssAnon"]) / 1024, len(os.listdir(here / "fd")), int(status["Threads"])
                self.samples[f"{role_of(pid)} {pid}"].append((time.monotonic(), *found))

    def growth(self, warm_s: float) -> Iterator[tuple[str, str, float, float, float]]:
        """(process, quantity, first value, growth a second, seconds) of each process that was sampled 8 times
        after its first `warm_s`."""
        for process, samples in self.samples.items():
            late = [sample for sample in samples if sample[0] >= samples[0][0] + warm_s]
            for index, name in enumerate(MOST_GROWTH, 1) if len(late) >= 8 else ():
                slope = theil_sen([(each[0], each[index]) for each in late])
                yield process, name, late[0][index], slope, late[-1][0] - late[0][0]


def role_of(pid: int) -> str:
    """Role of a process, such as "scheduler"; "server" for the first one, "ended" for one that is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "ended"
    found = re.search(r"worker_start\0(?:processes\.)?(\w+)", command)
    return "server" if found is None else found[1]


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Sen 1968): a third of them may be outliers."""
    pairs = itertools.combinations(points, 2)
    return statistics.median((late - early) / (after - before) for (before, early), (after, late) in pairs)


class Soak:
    """One run. `served`: the server that this process has started; None for one elsewhere."""

    def __init__(self, cases: Cases, served: Served | None, seed: int, kills: bool) -> None:
        self._client, self._cases, self._seed, self._kills = cases.clients[0], cases, seed, kills
        self._draw = random.Random(seed)
        self.processes = Processes(None if served is None else served.process.pid)
        self.counts, self.problems = Counter[str](), list[str]()
        self._harmed: Sequence[str] = cases.models
        """Names of the models that are killed and unloaded."""
        self._spared: Collection[int] = ()
        """Processes that are not killed: those of the first of several models."""
        self._down: list[tuple[float, float]] = []
        """(time of a kill, time at which the server was ready again); infinite until then."""

    async def run(self, clients: int, seconds: float) -> None:
        states = (await self._client.get("/v1/models"))["data"]
        if several := len(states) > 1 and all("state" in model for model in states):
            first, *self._harmed = self._cases.models
            await self._client.post(f"/models/{quote(first)}/load", {})
            self._spared = self.processes.pids()[1:]
        await self._cases.send_alone()
        await self._touch_all_pages()
        began = time.monotonic()
        end = began + seconds
        tasks = [self._send(random.Random(f"{self._seed}/{index}"), end) for index in range(clients)]
        tasks += [self._every(SAMPLE_S, end, self._sample), self._every(FLUSH_S, end, self._flush)]
        if self._kills:
            tasks.append(self._every(KILL_S, end - 30 if several else began + seconds / 2, self._kill))
        if several:
            tasks.append(self._every(LOAD_S, end - 30, self._unload_and_load))
        await asyncio.gather(*tasks)

    async def _touch_all_pages(self) -> None:
        """Send prompts of random ids to the first model until one takes no page that nobody has had before:
        the first use of a page is no growth."""
        model, before = self._cases.models[0], -1
        while (touched := (await self._left(model))[0]["pages_touched"]) > before:
            before = touched
            ids = self._draw.choices(range(1000, 30_000), k=2000)
            await self._client.post("/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1})

    async def _every(self, mean: float, end: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(min(mean, max(0.0, end - time.monotonic())))
            if time.monotonic() >= end:
                return
            await act()

    async def _send(self, draw: random.Random, end: float) -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            kind = draw.choices(list(KINDS), KINDS.values())[0]
            # Programs use the first model.
            model = self._cases.models[0] if kind == "pin" else draw.choice(self._cases.models)
            try:
                await getattr(self._cases, kind)(draw, draw.choice(self._cases.clients), model)
                self.counts[kind] += 1
            except Exception as error:
                hit = model in self._harmed and self._overlaps_kill(began)
                if isinstance(error, Wrong | jsonschema.ValidationError) or not hit:
                    self._problem(f"{kind} of {model}: {type(error).__name__}: {error}")
                else:
                    self.counts["failed by a kill"] += 1
                    await asyncio.sleep(0.2)

    def _overlaps_kill(self, began: float) -> bool:
        """Whether what has begun then may have failed by a kill, of which it may learn a little later."""
        return any(began < up + 2 and time.monotonic() > down for down, up in self._down)

    async def _sample(self) -> None:
        self.processes.sample()
        if len(next(iter(self.processes.samples.values()), ())) % 6 == 1:
            print(f"{time.strftime('%H:%M:%S')} {dict(self.counts)}, {len(self.problems)} wrong", flush=True)

    async def _flush(self) -> None:
        with contextlib.suppress(openai.APIError):
            await self._client.post("/flush_cache", {})

    async def _kill(self) -> None:
        pids = self.processes.pids(self._spared)[1:]
        if not pids:
            return  # the models are unloaded
        pid = self._draw.choice(pids)
        role = role_of(pid)
        down = time.monotonic()
        self._down.append((down, float("inf")))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(1)
        left = list(self._harmed)
        while left and time.monotonic() < down + 120:
            with contextlib.suppress(openai.APIError):
                await self._client.post("/v1/completions", {"model": left[0], "prompt": "x", "max_tokens": 1})
                left.pop(0)
            await asyncio.sleep(0.3)
        self._down[-1] = (down, time.monotonic())
        self.counts[f"kill of {role}"] += 1
        if left:
            self._problem(f"no answer of {left[0]} 120 s after {role} was killed")

    async def _unload_and_load(self) -> None:
        name = self._draw.choice(self._harmed)
        for act in ("unload", "load"):
            began = time.monotonic()
            try:
                await self._client.post(f"/models/{quote(name)}/{act}", {})
            except openai.APIError as error:
                if not self._overlaps_kill(began):
                    self._problem(f"{act} of {name}: {error}")
            self.counts[act] += 1

    async def end(self) -> None:
        """Check of each model that no request is left, nothing is held, and after a flush each page is
        free."""
        for model in self._cases.models:
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
            if cold := {name: value for name, value in stats.items() if value and name.startswith("cold_")}:
                print(f"{model}: {cold}")
        await self._client.post("/flush_cache", {})
        for model in self._cases.models:
            stats, _ = await self._left(model)
            if stats["pages_free"] != stats["pages_total"]:
                lost = stats["pages_total"] - stats["pages_free"]
                self._problem(f"{model}: {lost} pages are not free after a flush")

    async def _left(self, model: str) -> tuple[dict[str, Any], dict[str, int]]:
        """(counters of the scheduler, those that are 0 without requests and are not)."""
        info = await self._client.get(f"/get_server_info?model={quote(model)}")
        stats = info["internal_states"][0]
        names = ("running", "waiting", "compiling", "pages_in_use", "pages_leased", "pages_pinned")
        counted = {name: stats[name] for name in names} | {"in_flight": info["in_flight"]}
        return stats, {name: count for name, count in counted.items() if count}

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        print(f"{time.strftime('%H:%M:%S')} WRONG {text}", flush=True)


async def soak(options: argparse.Namespace, url: str, served: Served | None, keys: Sequence[str]) -> int:
    clients = [Client(url, key) for key in keys]
    names = [model["id"] for model in (await clients[0].get("/v1/models"))["data"]]
    cases = Cases(names, clients)
    run = Soak(cases, served, options.seed, served is not None and not options.no_kills)
    print(f"{sum(map(len, cases.all.values()))} requests alone, models {names}, {len(keys)} keys", flush=True)
    await run.run(options.clients, 60 * options.minutes)
    await run.end()
    for client in clients:
        await client.close()
    for process, name, first, slope, lived in run.processes.growth(WARM_S):
        grown = slope * lived
        print(
            f"{process:26} {name:8} {first:7.1f} {grown:+7.2f} in {lived / 60:4.1f} min"
            f" {3600 * slope:+8.2f} an hour"
        )
        if grown > MOST_GROWTH[name]:
            run.problems.append(f"{process} grew by {grown:.1f} {name}")
    print(f"{sum(run.counts.values())} in {options.minutes:g} minutes: {dict(run.counts)}")
    print(f"of new prompts {cases.found['sent again']} were sent again, and {cases.found['found']} found")
    print("\n".join(["wrong:", *run.problems]) if run.problems else "nothing is wrong")
    return 1 if run.problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--url")
    parser.add_argument("--api-key", action="append", default=[], help="a key of the server at --url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("serve", nargs="*", help="models and flags for ramify serve, after --")
    options = parser.parse_args(argv)
    if options.url is not None:
        return asyncio.run(soak(options, options.url, None, options.api_key or ["none"]))
    with tempfile.TemporaryDirectory() as folder:
        (operator, first), (other, second) = new_key("operator"), new_key("other")
        file = Path(folder, "keys.toml")
        file.write_text(f"{first}admin = true\n{second}")
        flags = ("--deterministic", "--keys", str(file), "--kv-memory-gb", str(KV_GB))
        cold = ("--cold-dir", f"{folder}/cold", "--cold-gb", "1")
        with serve(*flags, *cold, *options.serve) as served:
            status = asyncio.run(soak(options, served.url, served, [operator, other]))
            if status:
                print("".join(served.lines[-40:]))
            return status


if __name__ == "__main__":
    raise SystemExit(main())
