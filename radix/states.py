"""States of linear attention layers at the ends of nodes, for models that cannot go on from KV pages alone.

A model with linear attention layers goes on from token n only with the state that has seen n tokens. So a
match ends at the deepest node on its path that holds a state. Example:

    tree        [0, 900) with a state ── [900, 1000) ── [1000, 1400) with a state
    prompt      shares the first 1200 tokens: its match is [0, 900), and 300 tokens are computed again
                the computed pages are duplicates of the tree's: `PrefixCache.commit` frees them
    prompt      shares all 1400 tokens: its match is [0, 1400)

A slot is in one of three places: free, in use by a request, or held by a node. Where none is free, the state
that is worth least goes, and its node keeps its pages (`States.evict`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ramify.radix.eviction import EvictionPolicy
from ramify.radix.lease import LeaseBook
from ramify.radix.node import Node
from ramify.radix.pages import PagePool
from ramify.radix.tree import RadixTree

Rank = tuple[bool, float, float]
"""(leased, minus the time when it is needed, value): states are evicted from the lowest rank on."""


@dataclasses.dataclass(slots=True, eq=False)
class NodeState:
    """The state at the end of a node."""

    slot: int
    uses: float
    """Times that a request began from it, and before that the number that is expected."""
    since: int
    """`States.now` when it was made."""


class States:
    """The slots, and the nodes that hold some. `offer` queues a node for eviction anew."""

    def __init__(
        self, num_slots: int, tree: RadixTree, leases: LeaseBook, offer: Callable[[Node], None]
    ) -> None:
        self._pool = PagePool(num_slots)
        self._tree = tree
        self._leases = leases
        self._offer = offer
        self.holders: dict[Node, NodeState] = {}
        self.in_use: set[int] = set()
        self.evicted = 0
        self.now = 0
        """Counts states that were made and requests that began from one."""

    @property
    def total(self) -> int:
        return self._pool.num_pages

    @property
    def free_slots(self) -> frozenset[int]:
        return self._pool.free_pages

    def at_or_above(self, node: Node | None, length: int) -> Node | None:
        """The deepest node on the path to `node` that holds a state and ends at token `length` or before."""
        while node is not None and (node.state is None or node.end > length):
            node = node.parent
        return node

    def take(self) -> int | None:
        """A slot for a request, if need be that of the state of the lowest rank; None if all are in use."""
        if not len(self._pool):
            if not self.holders:
                return None
            _, lowest = self._lowest()
            self.drop(lowest)
            self._offer(lowest)
            self.evicted += 1
        (slot,) = self._pool.allocate(1)
        self.in_use.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Raises `ValueError` where no request has `slot`."""
        if slot not in self.in_use:
            raise ValueError(f"State slot {slot} is not in use.")
        self.in_use.remove(slot)
        self._pool.free([slot])

    def hold(self, node: Node, slot: int, uses: float = 1.0) -> None:
        """The slot of a request becomes that of `node`, which holds none."""
        self.in_use.remove(slot)
        self.now += 1
        node.state = self.holders[node] = NodeState(slot, uses, self.now)
        self._tree.version += 1  # matches are out of date
        self._offer(node)

    def take_for(self, node: Node, uses: float) -> int | None:
        """A slot for a state of `node`, which holds none; None where that is worth less than the states there
        are. `uses` is the number of requests that are expected to begin from it."""
        rank = (False, 0.0, self._saved(node) * uses)
        if not len(self._pool) and (not self.holders or self._lowest()[0] >= rank):
            return None
        return self.take()

    def use(self, node: Node) -> int:
        """A request begins from the state of `node`. Returns its slot."""
        state = self.holders[node]
        state.uses += 1
        self.now += 1
        return state.slot

    def drop(self, node: Node) -> None:
        """`node` keeps its pages without a state; it may hold none."""
        state = self.holders.pop(node, None)
        if state is not None:
            node.state = None
            self._tree.version += 1
            self._pool.free([state.slot])

    def drop_all(self) -> None:
        for node in list(self.holders):
            self.drop(node)
            self._offer(node)

    def _lowest(self) -> tuple[Rank, Node]:
        """The state to evict next. Costs O(states and leases, with the nodes above each)."""
        needed: dict[Node, float] = {}
        for node, when in self._leases.ends():
            holder = self.at_or_above(node, node.end)
            if holder is not None:
                needed[holder] = min(when, needed.get(holder, math.inf))
        ranks = ((self._rank(node, needed.get(node)), node) for node in self.holders)
        return min(ranks, key=lambda found: found[0])

    def _rank(self, node: Node, needed: float | None) -> Rank:
        """Leased states go last, those needed furthest in the future first.

        Value: tokens that would be computed again without the state, times the uses for each tick of `now`
        since it was made (hyperbolic caching, Blankstein, Sen and Freedman, ATC 17). All slots have one size.
        """
        state = self.holders[node]
        value = self._saved(node) * state.uses / (self.now - state.since + 1)
        return needed is not None, 0.0 if needed is None else -needed, value

    def _saved(self, node: Node) -> int:
        above = self.at_or_above(node.parent, node.end)
        return node.end - (0 if above is None else above.end)


class UselessFirst:
    """Evict leaves without a state first: no request can go on from their pages. Then as `policy` says."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    def key(self, node: Node) -> float:
        return -math.inf if node.state is None else self._policy.key(node)
