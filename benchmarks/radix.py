"""Cost of the prefix tree: match, acquire, commit and release of long prompts in trees of many nodes.

    python -m benchmarks.radix [--nodes 1000 10000 100000 1000000] [--tokens 8000] [--page-size 16]

The tree is built through the public interface, as a server would fill it: prompts of 8 to 24 new tokens that
fork off earlier ones in the middle of a page, and the long prompts that are measured. Some of these are new,
and the others have a branch every 100 tokens. Times are in microseconds for one call.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ramify.radix.cache import PrefixCache

Tokens = npt.NDArray[np.int32]

T = TypeVar("T")

TURN = 100
"""Tokens between two branches on the path of a long prompt with branches."""


class Timer:
    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._times: dict[str, list[int]] = {}

    def run(self, name: str, call: Callable[..., T], *arguments: object) -> T:
        began = time.perf_counter_ns()
        result = call(*arguments)
        self._times.setdefault(name, []).append(time.perf_counter_ns() - began)
        return result

    def report(self) -> None:
        for name, times in self._times.items():
            median, p99 = np.percentile(times, [50, 99]) / 1000
            print(f"{self._nodes:>9,}  {name:<34} {median:>9.1f} {p99:>9.1f}", flush=True)


def request(cache: PrefixCache, tokens: Tokens, timer: Timer, name: str) -> None:
    """Run a request from its match to its release, and time each call."""
    match = timer.run(f"{name}match", cache.match, tokens, "", len(tokens) - 1)
    lock = timer.run(f"{name}acquire", cache.acquire, match)
    full = lock.length // cache.page_size
    fresh = timer.run(f"{name}allocate", cache.allocate, -(-len(tokens) // cache.page_size) - full)
    assert fresh is not None
    pages = lock.pages[:full] + fresh
    pages = timer.run(f"{name}commit", cache.commit, lock, tokens, pages)
    cache.free(pages[lock.private_from :])
    timer.run(f"{name}release", cache.release, lock)


def long_prompts(rng: np.random.Generator, count: int, length: int) -> list[Tokens]:
    return [rng.integers(0, 50_000, length, dtype=np.int32) for _ in range(count)]


def fill(cache: PrefixCache, rng: np.random.Generator, nodes: int, branched: list[Tokens]) -> int:
    """Grow the tree to at least `nodes` nodes. Returns the number of nodes."""
    untimed = Timer(0)
    for prompt in branched:
        request(cache, prompt, untimed, "")
        for cut in range(TURN, len(prompt), TURN):
            branch = rng.integers(50_000, 60_000, 8, dtype=np.int32)
            request(cache, np.concatenate([prompt[:cut], branch]), untimed, "")
    recent = [rng.integers(0, 50_000, 24, dtype=np.int32) for _ in range(64)]
    while (count := sum(1 for _ in cache.tree.nodes())) < nodes:
        for _ in range((nodes - count + 1) // 2):  # most add two nodes: a branch, and the cut above it
            slot = int(rng.integers(len(recent)))
            kept = recent[slot][: int(rng.integers(len(recent[slot])))]
            recent[slot] = np.concatenate(
                [kept, rng.integers(0, 50_000, int(rng.integers(8, 24)), dtype=np.int32)]
            )
            request(cache, recent[slot], untimed, "")
    return count


def measure(nodes: int, length: int, page_size: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    slots = -(-length // page_size)
    branched = long_prompts(rng, min(16, max(1, nodes * TURN // (4 * length))), length)
    cache = PrefixCache(
        nodes * (24 // page_size + 2) + (2 * samples + len(branched)) * (slots + 1), page_size
    )
    began = time.perf_counter()
    count = fill(cache, rng, nodes, branched)
    filled = time.perf_counter() - began
    plain = long_prompts(rng, samples, length)
    paths = [branched[i % len(branched)] for i in range(samples)]
    forks = [
        np.concatenate([path[: length // 2], new[: length // 2]])
        for path, new in zip(paths, plain, strict=True)
    ]
    gc.collect()
    gc.freeze()  # as a server does after start: a full collection walks all nodes otherwise
    print(f"{count:>9,}  (filled in {filled:.1f} s)")

    timer = Timer(count)
    for prompt in plain:
        timer.run("match, nothing found", cache.match, prompt)
        request(cache, prompt, timer, "new: ")
    for prompt in plain:
        timer.run("match, one node", cache.match, prompt)
    for path in paths:
        timer.run(f"match, {length // TURN} nodes", cache.match, path)
    for prompt in forks:
        request(cache, prompt, timer, "fork in the middle: ")
    drained = cache.allocate(cache.counts().free)
    for _ in range(samples):
        timer.run("allocate one page by eviction", cache.allocate, 1)
    timer.report()
    del drained
    gc.unfreeze()


def memory(nodes: int, page_size: int) -> None:
    rng = np.random.default_rng(0)
    cache = PrefixCache(nodes * (24 // page_size + 2), page_size)
    tracemalloc.start()
    count = fill(cache, rng, nodes, [])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{used / count:,.0f} bytes a node, pool included, in a tree of {count:,}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=400)
    args = parser.parse_args()
    print(f"prompts of {args.tokens:,} tokens, pages of {args.page_size}; microseconds")
    print(f"{'nodes':>9}  {'':<34} {'median':>9} {'p99':>9}")
    for nodes in args.nodes:
        measure(nodes, args.tokens, args.page_size, args.samples)
    memory(20_000, args.page_size)


if __name__ == "__main__":
    main()
