"""Placement of requests on replicas: Ramify's against the policies of other routers.

    python -m benchmarks.fleet [--replicas 2 8 32 64] [--kinds agents chats rows mixed] [--seconds 120]
                               [--load 0.7] [--seed 1]

A simulation: no model runs. Replicas have the scheduler's prefix tree with a bounded number of pages. Their
times follow from measured costs (SmolLM2-135M on two cores). All policies get the same programs. Columns:

    p50 p99  seconds from a request to its first token
    route    milliseconds of processor time for placing a request, of this machine: all else is simulated

    ramify       `runtime.fleet.placement`
    round-robin  all replicas in turn
    least        the replica with the fewest requests in flight
    approximate  the replica that was sent the prompt with the longest common prefix, unless loads differ too
                 much: the policy and the defaults of SGLang's router
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from ramify.engine_messages import TreeChange
from ramify.radix.cache import PrefixCache
from ramify.radix.digest import Digests
from ramify.radix.lock import PrefixLock
from ramify.radix.tree_log import TreeLog
from ramify.runtime.fleet.placement import Placement, Work

PAGE = 16
PAGES = 4096
CHUNK = 512
STEP_S, PROMPT_S, ROW_S = 0.007, 0.00033, 0.00085
"""Seconds of a step, of each prompt token in it, and of each decoding row."""
EVENT_S = 0.005
"""Seconds until the router learns of a change in a replica's tree."""
DIGESTS = Digests()

Call = tuple[np.ndarray, int]
"""(prompt, number of output tokens) of a request."""
Body = Iterator[list[Call] | float]
"""A program: yields a list of calls to be made at the same time, or seconds to wait."""


def text(draw: random.Random, count: int) -> np.ndarray:
    return np.random.default_rng(draw.getrandbits(32)).integers(0, 50_000, count).astype(np.int32)


# --- programs -----------------------------------------------------------------------------------


def agent(draw: random.Random, systems: list[np.ndarray]) -> Body:
    """An agent: turns with a tool call between them. Every third turn forks into four branches."""
    prompt = np.concatenate([draw.choice(systems), text(draw, draw.randint(50, 400))])
    for turn in range(draw.randint(3, 8)):
        if turn % 3 == 2:
            views = [np.concatenate([prompt, text(draw, 60)]) for _ in range(4)]
            yield [(view, draw.randint(20, 60)) for view in views]
        output = draw.randint(20, 120)
        yield [(prompt, output)]
        yield draw.expovariate(1 / 1.5)
        prompt = np.concatenate([prompt, text(draw, output + draw.randint(50, 500))])


def chat(draw: random.Random, systems: list[np.ndarray]) -> Body:
    prompt = draw.choice(systems)[:200]
    for _ in range(draw.randint(2, 8)):
        prompt = np.concatenate([prompt, text(draw, draw.randint(20, 300))])
        output = draw.randint(50, 200)
        yield [(prompt, output)]
        yield draw.expovariate(1 / 8)
        prompt = np.concatenate([prompt, text(draw, output)])


def rows(draw: random.Random, systems: list[np.ndarray]) -> Body:
    """A template applied to rows of data, 16 at a time."""
    template = text(draw, draw.randint(800, 2500))
    for _ in range(4):
        yield [(np.concatenate([template, text(draw, draw.randint(30, 150))]), 24) for _ in range(16)]


KINDS: dict[str, tuple[Callable[[random.Random, list[np.ndarray]], Body], float]] = {
    "agents": (agent, 2.6),
    "chats": (chat, 1.0),
    "rows": (rows, 2.9),
}
"""Kind of program → (function, seconds of a replica's time that one program takes if prefixes are found in
the tree)."""


# --- replicas -----------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Request:
    work: Work
    prompt: np.ndarray
    output: int
    sent: float
    ended: Callable[[float], None]
    lock: PrefixLock | None = None
    computed: int = 0
    said: int = 0


class Replica:
    """A scheduler with measured costs. A step takes the decoding rows, then chunks of prompts in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = TreeLog(PAGE)
        self.cache = PrefixCache(PAGES, PAGE, log=self.log)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stepping = False
        self.events = 0

    def step(self) -> tuple[float, list[Request]]:
        """Simulate one step. Returns (seconds, requests with a new token)."""
        budget, seconds = CHUNK, STEP_S
        speaking = [request for request in self.running if request.computed == len(request.prompt)]
        seconds += ROW_S * len(speaking)
        prefilled = []
        while budget > 0:
            prefilling = [request for request in self.running if request.computed < len(request.prompt)]
            request = prefilling[0] if prefilling else self._admitted()
            if request is None:
                break
            count = min(budget, len(request.prompt) - request.computed)
            request.computed += count
            budget -= count
            seconds += PROMPT_S * count
            if request.computed == len(request.prompt):
                prefilled.append(request)
                self._commit(request)
        return seconds, speaking + prefilled

    def _admitted(self) -> Request | None:
        if not self.waiting:
            return None
        request = self.waiting[0]
        lock = self.cache.acquire(self.cache.match(request.prompt, limit=len(request.prompt) - 1))
        needed = -(-(len(request.prompt) + request.output) // PAGE) - lock.length // PAGE
        if needed > self.cache.available():
            self.cache.release(lock)
            return None
        request.lock, request.computed = lock, lock.length
        self.running.append(self.waiting.popleft())
        return request

    def _commit(self, request: Request) -> None:
        """Put the pages of the prompt into the tree. Those of the output are not modelled."""
        lock = request.lock
        assert lock is not None
        whole = lock.length // PAGE
        new = self.cache.allocate(-(-len(request.prompt) // PAGE) - whole)
        if new is not None:
            table = self.cache.commit(lock, request.prompt, lock.pages[:whole] + new)
            self.cache.free(table[lock.private_from :])

    def end(self, request: Request) -> None:
        assert request.lock is not None
        self.cache.release(request.lock)
        self.running.remove(request)


# --- policies -----------------------------------------------------------------------------------


class Policy(Protocol):
    def place(self, work: Work, now: float) -> str: ...
    def progress(self, rid: str, tokens: int, now: float) -> None: ...
    def ended(self, rid: str) -> None: ...
    def apply(self, replica: str, events: TreeChange) -> bool: ...


class Least:
    """The policy that places a request on the replica with the fewest requests in flight."""

    def __init__(self, names: list[str]) -> None:
        self.in_flight = dict.fromkeys(names, 0)
        self.places: dict[str, str] = {}

    def place(self, work: Work, now: float) -> str:
        name = self.choose(work)
        self.in_flight[name] += 1
        self.places[work.rid] = name
        return name

    def choose(self, work: Work) -> str:
        return min(self.in_flight, key=lambda name: self.in_flight[name])

    def progress(self, rid: str, tokens: int, now: float) -> None:
        pass

    def ended(self, rid: str) -> None:
        self.in_flight[self.places.pop(rid)] -= 1

    def apply(self, replica: str, events: TreeChange) -> bool:
        return True


class RoundRobin(Least):
    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.next = itertools.cycle(names)

    def choose(self, work: Work) -> str:
        return next(self.next)


class Approximate(Least):
    """The cache-aware policy of sgl-router with its defaults: cache_threshold 0.5, balance_abs_threshold 32,
    balance_rel_threshold 1.0001."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.sent: dict[str, set[int]] = {name: set() for name in names}

    def choose(self, work: Work) -> str:
        most, least = max(self.in_flight.values()), min(self.in_flight.values())
        if most - least > 32 and most > 1.0001 * least:
            name = super().choose(work)
        else:
            matched = {name: sum(one in sent for one in work.digests) for name, sent in self.sent.items()}
            name = max(matched, key=lambda one: matched[one])
            if matched[name] <= 0.5 * len(work.digests):
                name = min(self.sent, key=lambda one: len(self.sent[one]))
        self.sent[name].update(work.digests)
        return name


def ramify(names: list[str]) -> Placement:
    placement = Placement(PAGE)
    for name in names:
        placement.join(name)
    return placement


POLICIES: dict[str, Callable[[list[str]], Policy]] = {
    "ramify": ramify,
    "round-robin": RoundRobin,
    "least": Least,
    "approximate": Approximate,
}


# --- the run ------------------------------------------------------------------------------------


class Fleet:
    def __init__(self, count: int, policy: Callable[[list[str]], Policy]) -> None:
        self.replicas = {f"r{i}": Replica(f"r{i}") for i in range(count)}
        self.policy = policy(list(self.replicas))
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = itertools.count()
        self.waits: list[float] = []
        self.routing_s = 0.0

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def run(self, arrivals: list[tuple[float, Body]]) -> tuple[float, float, float]:
        """Median and 99th percentile of the seconds to a first token, and milliseconds for a placement."""
        for program, (when, body) in enumerate(arrivals):
            self.at(when, lambda now, body=body, program=f"p{program}": self.go_on(body, program, now))
        while self.events:
            now, _, what = heapq.heappop(self.events)
            what(now)
        waits = sorted(self.waits)
        return waits[len(waits) // 2], waits[len(waits) * 99 // 100], 1e3 * self.routing_s / len(waits)

    def go_on(self, body: Body, program: str, now: float) -> None:
        todo = next(body, None)
        if todo is None:
            return
        if isinstance(todo, float):
            self.at(now + todo, lambda when: self.go_on(body, program, when))
            return
        left = len(todo)

        def ended(when: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.go_on(body, program, when)

        for prompt, output in todo:
            self.send(prompt, output, program, now, ended)

    def send(
        self, prompt: np.ndarray, output: int, program: str, now: float, ended: Callable[[float], None]
    ) -> None:
        digests = DIGESTS.page_ends(prompt, "", PAGE)
        # The length of an output is unknown: 64 tokens are assumed.
        work = Work(f"q{next(self.numbers)}", digests, len(prompt), 64.0, program)
        began = time.process_time()
        replica = self.replicas[self.policy.place(work, now)]
        self.routing_s += time.process_time() - began
        replica.waiting.append(Request(work, prompt, output, now, ended))
        if not replica.stepping:
            replica.stepping = True
            self.at(now, lambda when: self.step(replica, when))

    def step(self, replica: Replica, now: float) -> None:
        if not (replica.running or replica.waiting):
            replica.stepping = False
            return
        seconds, speaking = replica.step()
        self.at(now + seconds, lambda when: self.stepped(replica, speaking, when))
        pages, removed = replica.log.take()
        if pages or removed:
            replica.events += 1
            digests = tuple(page.digest for page in pages)
            events = TreeChange(epoch=1, number=replica.events, added=digests, removed=tuple(removed))
            self.at(now + seconds + EVENT_S, lambda when: self.told(replica.name, events))

    def told(self, name: str, events: TreeChange) -> None:
        assert self.policy.apply(name, events)

    def stepped(self, replica: Replica, speaking: list[Request], now: float) -> None:
        for request in speaking:
            if request.said == 0:
                self.waits.append(now - request.sent)
            request.said += 1
            self.policy.progress(request.work.rid, 1, now)
            if request.said == request.output:
                replica.end(request)
                self.policy.ended(request.work.rid)
                request.ended(now)
        self.step(replica, now)


def arrivals(kind: str, replicas: int, seconds: float, load: float, seed: int) -> list[tuple[float, Body]]:
    draw = random.Random(f"{kind} {replicas} {seed}")
    systems = [text(draw, draw.randint(600, 1800)) for _ in range(2 + replicas)]
    found: list[tuple[float, Body]] = []
    kinds = list(KINDS) if kind == "mixed" else [kind]
    for each in kinds:
        make, cost = KINDS[each]
        now = 0.0
        while (now := now + draw.expovariate(load * replicas / cost / len(kinds))) < seconds:
            found.append((now, make(random.Random(draw.getrandbits(32)), systems)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "mixed"], default=[*KINDS, "mixed"])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("kind     replicas  policy            p50     p99  route")
    for kind, count in itertools.product(args.kinds, args.replicas):
        for name, policy in POLICIES.items():
            given = arrivals(kind, count, args.seconds, args.load, args.seed)
            p50, p99, route = Fleet(count, policy).run(given)
            print(f"{kind:<8} {count:>8}  {name:<12} {p50:>7.3f} {p99:>7.3f} {route:>6.3f}", flush=True)


if __name__ == "__main__":
    main()
