"""States of linear attention layers at the ends of nodes: their slots, and the order of eviction.

A model with linear attention layers can continue after n tokens only from the state that has seen exactly
these n tokens. So a match ends at the deepest node on its path that holds a state. Example:

    tree        [0, 900) with a state ── [900, 1000) ── [1000, 1400) with a state
    prompt      shares the first 1200 tokens: its match is [0, 900), and 300 tokens are computed again
                the computed pages are duplicates of the tree's: `PrefixCache.commit` frees them
    prompt      shares all 1400 tokens: its match is [0, 1400)

A slot is in one of three places: free, in use by a request, or held by a node. If none is free, the least
valuable state is evicted; the node that held it keeps its pages (`States.take`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ramify.radix.lease import LeaseBook
from ramify.radix.node import Node
from ramify.radix.tree import RadixTree


@dataclasses.dataclass(slots=True, eq=False)
class NodeState:
    """The state at the end of a node."""

    slot: int
    uses: float
    """The number of requests that were expected to begin from the state when the state was made, plus the
    number of requests that have begun from it."""
    since: int
    """`States.now` when the state was made."""


class States:
    """The state slots, and the nodes that hold some of them. `offer` updates the place of a node in the
    eviction queue."""

    def __init__(
        self, num_slots: int, tree: RadixTree, leases: LeaseBook, offer: Callable[[Node], None]
    ) -> None:
        self.total = num_slots
        self.free_slots = list(range(num_slots))
        self._tree = tree
        self._leases = leases
        self._offer = offer
        self.holders: dict[Node, NodeState] = {}
        self.in_use: set[int] = set()
        self.evicted = 0
        self.now = 0
        """A clock for `_value`: the number of states made plus the number of requests that began from one."""

    def at_or_above(self, node: Node | None, length: int) -> Node | None:
        """The deepest node on the path to `node` that holds a state and has ``end <= length``; None if there
        is none."""
        while node is not None and (node.state is None or node.end > length):
            node = node.parent
        return node

    def take(self) -> int | None:
        """A slot for a request; None if requests have all slots. If no slot is free, evicts the state that
        `lowest` names."""
        if not self.free_slots:
            if not self.holders:
                return None
            lowest = self.lowest()
            self.drop(lowest)
            self._offer(lowest)
            self.evicted += 1
        slot = self.free_slots.pop()
        self.in_use.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Take `slot` back from a request. Raises `ValueError` if no request has it."""
        self._leave(slot)
        self.free_slots.append(slot)

    def hold(self, node: Node, slot: int, uses: float = 1.0) -> None:
        """Give `slot` of a request to `node`, which holds no state. `uses` is the number of requests that are
        expected to begin from the state. Raises `ValueError` if no request has `slot`."""
        self._leave(slot)
        self.now += 1
        node.state = self.holders[node] = NodeState(slot, uses, self.now)
        self._tree.version += 1  # matches are out of date
        self._offer(node)

    def take_for(self, node: Node, uses: float) -> int | None:
        """A slot for a state of `node`, which holds none. `uses` is the number of requests that are expected
        to begin from the state. None if no slot is free and no unleased state is worth less than the new
        one."""
        if not self.free_slots:
            unleased = self._unleased()
            if not unleased or min(map(self._value, unleased)) >= self._saved(node) * uses:
                return None
        return self.take()

    def use(self, node: Node) -> int:
        """Count a request that begins from the state of `node`. Returns the slot of the state."""
        state = self.holders[node]
        state.uses += 1
        self.now += 1
        return state.slot

    def drop(self, node: Node) -> None:
        """Drop the state of `node`, if it holds a state; its pages stay."""
        state = self.holders.pop(node, None)
        if state is not None:
            node.state = None
            self._tree.version += 1
            self.free_slots.append(state.slot)

    def drop_all(self, *, pins: bool) -> None:
        """Drop all states; without `pins`, those of pinned nodes stay."""
        for node in list(self.holders):
            if pins or not node.pins:
                self.drop(node)
                self._offer(node)

    def _leave(self, slot: int) -> None:
        if slot not in self.in_use:
            raise ValueError(f"State slot {slot} is not in use.")
        self.in_use.remove(slot)

    def _saved(self, node: Node) -> int:
        """The number of tokens that must be computed again if no state is at the end of `node`."""
        above = self.at_or_above(node.parent, node.end)
        return node.end - (0 if above is None else above.end)

    def lowest(self) -> Node:
        """The node whose state is evicted next: among the states that no lease needs, the state of the least
        value; if leases need all states, the state that is needed furthest in the future.

        Costs O(states and the nodes between each and the next state above). If leases need all states, costs
        O(leases and the nodes above each)."""
        if unleased := self._unleased():
            return min(unleased, key=self._value)
        needed: dict[Node, float] = {}
        for node, when in self._leases.ends():
            holder = self.at_or_above(node, node.end)
            if holder is not None:
                needed[holder] = min(when, needed.get(holder, math.inf))
        return min(self.holders, key=lambda node: (-needed[node], self._value(node)))

    def _unleased(self) -> list[Node]:
        """The nodes whose state no lease needs. A lease needs only the deepest state on its path."""
        if not len(self._leases):
            return list(self.holders)
        own = {node: node.leases for node in self.holders}
        for node in self.holders:
            above = self.at_or_above(node.parent, node.end)
            if above is not None:
                own[above] -= node.leases
        return [node for node, leases in own.items() if not leases]

    def _value(self, node: Node) -> float:
        """The value of the state of `node`: the tokens that it saves, times its uses per tick of `now` since
        the state was made (hyperbolic caching, Blankstein, Sen and Freedman, ATC 17). All slots have the same
        size, so the size is left out."""
        state = self.holders[node]
        return self._saved(node) * state.uses / (self.now - state.since + 1)
