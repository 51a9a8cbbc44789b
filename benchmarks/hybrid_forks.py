"""Prompt tokens that a hybrid computes: states where programs part, against states on a grid alone.

    python -m benchmarks.hybrid_forks [--seeds 1 2 3] [--seconds 300] [--states 32 64 128 256]
                                      [--grids 64 256 1024] [--kinds agent chat tree judge map plain]

Programs that fork (`tests.runtime.program_traces`) are replayed through the scheduler's own code for pages
and states, with KV pages for everything and few slots for states: a model with linear attention layers begins
only where there is a state. No model runs, so the figures are the same on every machine. Columns, in prompt
tokens computed, as multiples of those of a model that needs no states (`needed`):

    placed     as `runtime/scheduler/states.py` places and evicts them, told by the programs' hints
    no hints   the same without the hints: marks where prompts were seen to part
    ends       a state at the end of each prompt and each request; the least recently used is evicted
    grid G     and one at each multiple of G tokens, which is what SGLang and vLLM keep
"""

from __future__ import annotations

import argparse

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match, PrefixLock
from ramify.radix.node import Node
from ramify.radix.states import Rank, States
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.states import RequestStates
from tests.runtime.eviction_replay import UNBOUNDED, Replay, Replayed
from tests.runtime.program_traces import KINDS, Trace, generate

PAGE_SIZE = 16


class LastUsed(States):
    """Evicts the least recently used state, whatever it saves and whoever needs it."""

    def __init__(self, cache: PrefixCache) -> None:
        assert cache.states is not None
        super().__init__(cache.states.total, cache.tree, cache._leases, cache.usage.offer)

    def use(self, node: Node) -> int:
        slot = super().use(node)
        self.holders[node].since = self.now
        return slot

    def _rank(self, node: Node, needed: float | None) -> Rank:
        return False, 0.0, self.holders[node].since


class Grid(RequestStates):
    """Keeps a state at each multiple of `grid` tokens, and at the ends of prompts and requests."""

    def __init__(self, cache: PrefixCache, grid: int) -> None:
        super().__init__(cache)
        cache.states = LastUsed(cache)
        self._grid = grid

    def take_slot(self, request: Request, lock: PrefixLock, match: Match) -> None:
        super().take_slot(request, lock, match)
        if self._grid:
            first = request.pages.kept_len // self._grid + 1
            request.marks = list(range(first * self._grid, request.prompt_len, self._grid))

    def keep_copy(self, request: Request) -> None:
        assert request.pages.lock is not None
        if request.computed_len in (*request.marks, request.prompt_len):
            self._cache.copy_state(request.pages.lock, float("inf"))


def replayed(trace: Trace, states: int, hints: bool, grid: int | None = None) -> Replayed:
    replay = Replay(UNBOUNDED, PAGE_SIZE, hints, states)
    if grid is not None:
        replay._pages.states = Grid(replay.cache, grid)
    return replay.run(trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "plain"], default=[*KINDS, "plain"])
    parser.add_argument("--states", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--grids", type=int, nargs="+", default=[64, 256, 1024])
    args = parser.parse_args()
    names = ["placed", "no hints", "ends", *(f"grid {grid}" for grid in args.grids)]
    print(
        f"{'seed':>4} {'states':>6} {'needed':>10}  " + " ".join(f"{name:>9}" for name in names), "  waited"
    )
    for seed in args.seeds:
        trace = generate(seed, args.seconds, args.rate, args.kinds)
        needed = Replay(UNBOUNDED, PAGE_SIZE, hints=False).run(trace).computed
        for states in args.states:
            rows = [replayed(trace, states, hints=True), replayed(trace, states, hints=False)]
            rows += [replayed(trace, states, hints=False, grid=grid) for grid in (0, *args.grids)]
            shares = " ".join(f"{row.computed / needed:>9.2f}" for row in rows)
            print(
                f"{seed:>4} {states:>6} {needed:>10,}  {shares}   {[row.delayed for row in rows]}", flush=True
            )


if __name__ == "__main__":
    main()
