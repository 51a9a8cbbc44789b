"""A pushdown automaton for reading byte by byte in Python: its edges as lists, its stack as a linked list."""

from __future__ import annotations

import bisect

import numpy as np

from ramify.grammar.automaton.pushdown import PushdownAutomaton


class Entry:
    """A state to return to, on top of others; immutable, shared by all that went on from it."""

    __slots__ = ("__weakref__", "complete", "cost", "height", "parent", "state")

    def __init__(self, state: int, parent: Entry | None, automaton: AutomatonLists) -> None:
        self.state = state
        self.parent = parent
        self.cost: int = automaton.cost[state] + (parent.cost if parent else 0)
        self.complete: bool = automaton.final[state] and (parent is None or parent.complete)
        self.height: int = parent.height + 1 if parent else 1


class AutomatonLists:
    """The automaton as lists, which Python reads faster than arrays."""

    def __init__(self, automaton: PushdownAutomaton) -> None:
        self.final: list[bool] = automaton.final.tolist()
        self.cost: list[int] = automaton.cost.tolist()
        self.exit: list[bool] = (automaton.final & (np.diff(automaton.offsets) == 0)).tolist()
        self._automaton = automaton
        self._edges: dict[int, tuple[list[int], list[int], list[int], list[int]]] = {}

    def edges(self, state: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """`low`, `high`, `target` and `push` of its edges."""
        known = self._edges.get(state)
        if known is None:
            automaton = self._automaton
            span = slice(automaton.offsets[state], automaton.offsets[state + 1])
            known = self._edges[state] = (
                automaton.low[span].tolist(),
                automaton.high[span].tolist(),
                automaton.target[span].tolist(),
                automaton.push[span].tolist(),
            )
        return known

    def edge(self, state: int, byte: int) -> tuple[int, int] | None:
        """(target, push) of the edge for `byte`."""
        low, high, target, push = self.edges(state)
        i = bisect.bisect_right(low, byte) - 1
        return (target[i], push[i]) if i >= 0 and byte <= high[i] else None


def states_of(stack: Entry | None, count: int) -> list[int]:
    """The uppermost states of the stack, `count` if there are so many."""
    states: list[int] = []
    while stack is not None and len(states) < count:
        states.append(stack.state)
        stack = stack.parent
    return states
