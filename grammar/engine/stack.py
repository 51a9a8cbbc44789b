"""A pushdown automaton for reading byte by byte in Python: edges as lists, stacks as linked lists."""

from __future__ import annotations

import bisect
import weakref
from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.pushdown import PushdownAutomaton

UsedItems = frozenset[bytes]
NO_ITEMS: UsedItems = frozenset()


class Register(NamedTuple):
    """The register of an open object whose members come in any order. `seen` has a bit for each member read;
    the other fields are numbers of `masks.registers`."""

    seen: int
    missing: int
    room: int
    fill: int
    owed: int


Memory = Register | UsedItems
"""The memory of a rule that is being read: its unique items so far, or the register of its object."""


class Entry:
    """A state to return to, on top of the stack `parent`. Immutable; matchers share entries. `used` is the
    memory of the rule that is returned to. `cost` is the number of tokens of the shortest completion of the
    whole stack; `complete` is True if all states of the stack are final; `height` is the number of states."""

    __slots__ = ("__weakref__", "complete", "cost", "height", "parent", "state", "used")

    def __init__(
        self,
        state: int,
        parent: Entry | None,
        automaton: AutomatonLists,
        used: Memory = NO_ITEMS,
        own: int | None = None,
    ) -> None:
        """Make an entry. `own` is the number of tokens from `state` to the end of its rule, if that depends
        on `used`."""
        self.state = state
        self.parent = parent
        self.used = used
        self.cost: int = (automaton.cost[state] if own is None else own) + (parent.cost if parent else 0)
        self.complete: bool = automaton.final[state] and (parent is None or parent.complete)
        self.height: int = parent.height + 1 if parent else 1


class AutomatonLists:
    """The automaton as lists, which Python reads faster than arrays. `exit` is True for final states without
    edges."""

    def __init__(self, automaton: PushdownAutomaton) -> None:
        self._arrays = automaton.arrays
        self.final: list[bool] = self._arrays.final.tolist()
        self.cost: list[int] = self._arrays.cost.tolist()
        self.exit: list[bool] = (self._arrays.final & (np.diff(self._arrays.offsets) == 0)).tolist()
        self.after_item: list[bool] = self._arrays.after_item.tolist()
        self._edges: dict[int, tuple[list[int], ...]] = {}

    def edges(self, state: int) -> tuple[list[int], ...]:
        """`low`, `high`, `target` and `push` of the edges of `state`."""
        known = self._edges.get(state)
        if known is None:
            span = slice(self._arrays.offsets[state], self._arrays.offsets[state + 1])
            known = self._edges[state] = tuple(array[span].tolist() for array in self._arrays[1:5])
        return known

    def edge(self, state: int, byte: int) -> tuple[int, int] | None:
        """(target, push) of the edge for `byte`, None if there is none. The automaton must be
        deterministic."""
        low, high, target, push = self.edges(state)
        i = bisect.bisect_right(low, byte) - 1
        return (target[i], push[i]) if i >= 0 and byte <= high[i] else None


class SharedStacks:
    """The stacks of one grammar. Equal stacks are the same object, so that configurations compare quickly."""

    def __init__(self, automaton: AutomatonLists) -> None:
        self._automaton = automaton
        # An entry keeps its parent alive, so no other object can get the parent's id in the meantime.
        self._known: weakref.WeakValueDictionary[tuple[int, int, Memory], Entry] = (
            weakref.WeakValueDictionary()
        )

    def pushed(
        self, state: int, parent: Entry | None, used: Memory = NO_ITEMS, own: int | None = None
    ) -> Entry:
        key = (state, id(parent), used)
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = Entry(state, parent, self._automaton, used, own)
        return entry


def states_of(stack: Entry | None, count: int) -> list[int]:
    """The states of the stack from the top, at most `count`."""
    states: list[int] = []
    while stack is not None and len(states) < count:
        states.append(stack.state)
        stack = stack.parent
    return states
