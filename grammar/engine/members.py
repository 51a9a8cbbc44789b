"""Registers of objects whose members come in any order, and the masks that depend on them.

A mask depends only on those parts of a register that the walk looked at (`masks.registers`). In an object
with a hundred optional members, a mask inside the value of a member depends on no other member, or on a
single one: a comma may come if some member is left. A mask is stored under the bits that it depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.grammar.automaton.masks.registers import (
    DEAD,
    FRAME,
    MISSING,
    NONE,
    OWED,
    SEEN,
    begin_object,
    entered_object,
    left_of,
    may_be_read,
)
from ramify.grammar.automaton.members import Members
from ramify.grammar.engine.stack import NO_ITEMS, Entry, Memory, Register, states_of
from ramify.grammar.rules.expression import UNNAMED

if TYPE_CHECKING:
    from ramify.grammar.engine.pushdown import Mask

MAX_SHAPES = 32
"""Most different sets of looked-up bits under which the masks of one state are stored."""

MAX_KNOWN = 1 << 14
"""Most pairs of a state and a register for which a grammar caches the result of compiled code. Each call of
compiled code takes 6 us."""

_Tested = tuple[tuple[int, int, int], ...]
"""Parts of registers on which a mask depends: triples of a frame, column 0 of `tested` for this frame
(`masks.registers`), and the bits looked up."""


class MemberRegisters:
    """Registers of a grammar's objects, computed by the compiled functions of `automaton.masks.registers`.
    `cost` is that of `pushdown.Arrays`."""

    def __init__(self, members: Members, cost: np.ndarray) -> None:
        self._members = members
        self._cost = cost
        self._width = SEEN + members.seen_words
        self._no_frames = np.zeros((1, 1 + members.seen_words), np.int32)
        self._start: list[int] = members.start.tolist()
        self._new = [self._begun(kind) for kind in range(len(members.room))]
        self.entered = functools.lru_cache(MAX_KNOWN)(self._entered)
        self.left = functools.lru_cache(MAX_KNOWN)(self._left)

    def begun(self, start: int) -> Memory:
        """The memory of the rule that begins in the state `start`."""
        kind = self._start[start]
        return NO_ITEMS if kind < 0 else self._new[kind]

    def _begun(self, kind: int) -> Register:
        rows = np.zeros((1, self._width), np.int32)
        begin_object(self._members, kind, rows, 0)
        return _register(rows[0])

    def _entered(self, state: int, register: Register) -> Memory | None:
        """The memory after a byte that led to `state`; None if `state` is dead, or if its mark may not be
        read."""
        rows = np.zeros((2, self._width), np.int32)
        self._write(register, rows[0], -1)
        mark = self._members.mark[state]
        if mark < 0:
            left = left_of(self._members, self._cost, state, rows[0], False, self._no_frames)
            return register if left >= 0 else None
        after = entered_object(self._members, mark, rows, 0, 1, self._no_frames)
        if after in (DEAD, NONE):
            return None if after == DEAD else NO_ITEMS
        return _register(rows[after])

    def _left(self, state: int, register: Register) -> int | None:
        """Number of tokens from `state` to the end of the object's rule; None if no way is left."""
        row = np.zeros(self._width, np.int32)
        self._write(register, row, -1)
        left = left_of(self._members, self._cost, state, row, True, self._no_frames)
        return left if left >= 0 else None

    def may_run(self, state: int, memory: Memory, rows: np.ndarray, tested: np.ndarray) -> bool:
        """Whether the run of `state` (`construction.runs`) may come. In a state with ways, the run may come
        only if the first way is an unnamed member that may be read. `memory` is that of frame 0; `rows` and
        `tested` are those of all frames."""
        begin = self._members.ways[state]
        if begin == self._members.ways[state + 1] or not isinstance(memory, Register):
            return True
        mark = self._members.way_mark[begin]
        return self._members.number[mark] == UNNAMED and may_be_read(self._members, mark, rows[0], tested)

    def slack(self, state: int, stack: Entry | None, memory: Memory) -> int:
        """Number of tokens that, added to the costs of `state` and `stack` and to `Mask.rise`, gives an upper
        bound of the cost of completion after any allowed token."""
        found = memory.owed if isinstance(memory, Register) else 0
        if stack is not None and isinstance(stack.used, Register):
            left = self.left(stack.state, stack.used)
            assert left is not None
            found += int(self._cost[stack.state]) + stack.used.owed - left
        return found

    def rows(self, frames: Sequence[Memory], exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """The arrays `frames` and `tested` of `registers` for a walk. `exact` says whether the walk needs the
        costs of the frames."""
        rows = np.zeros((len(frames), self._width), np.int32)
        for i, memory in enumerate(frames):
            if isinstance(memory, Register):
                self._write(memory, rows[i], i)
                rows[i, OWED] *= exact
            else:
                rows[i, MISSING] = -1
        return rows, np.zeros((len(frames), 1 + self._width - SEEN), np.int32)

    def _write(self, register: Register, row: np.ndarray, frame: int) -> None:
        """Write `register` into `row` as the register of `frame`. If `frame` is -1, nothing is noted in
        `tested`."""
        seen, *numbers = register
        row[: len(numbers)] = numbers
        row[FRAME] = frame
        row[SEEN:] = np.frombuffer(seen.to_bytes(4 * (self._width - SEEN), "little"), np.int32)


def _register(row: np.ndarray) -> Register:
    missing, room, fill, owed = row[: OWED + 1].tolist()
    return Register(int.from_bytes(row[SEEN:].tobytes(), "little"), missing, room, fill, owed)


class MemberMasks:
    """A cache of the masks of a grammar with registers, by state, by stack, and by the parts of registers
    that the masks depend on."""

    def __init__(self) -> None:
        self._shapes: dict[int, dict[tuple[int, _Tested], dict[Any, Mask]]] = {}

    def clear(self) -> None:
        self._shapes.clear()

    def find(self, state: int, stack: Entry | None, memory: Memory) -> Mask | None:
        for (examined, tested), masks in self._shapes.get(state, {}).items():
            known = masks.get(_key(stack, memory, examined, tested))
            if known is not None:
                return known
        return None

    def keep(
        self, mask: Mask, state: int, stack: Entry | None, memory: Memory, examined: int, tested: np.ndarray
    ) -> None:
        looked_up: _Tested = tuple(
            (int(i), int(tested[i, 0]), int.from_bytes(tested[i, 1:].tobytes(), "little"))
            for i in np.flatnonzero(tested.any(axis=1))
        )
        shapes = self._shapes.setdefault(state, {})
        if len(shapes) >= MAX_SHAPES and (examined, looked_up) not in shapes:
            shapes.clear()
        masks = shapes.setdefault((examined, looked_up), {})
        masks[_key(stack, memory, examined, looked_up)] = mask


def _key(stack: Entry | None, memory: Memory, examined: int, tested: _Tested) -> tuple[Any, ...]:
    found: list[Any] = [tuple(states_of(stack, examined))]
    for frame, depth, bits in tested:
        register = memory_at(stack, memory, frame)
        if not isinstance(register, Register):
            found.append(None)
            continue
        seen, missing, room, fill, _ = register
        found.append((seen & bits, min(missing, depth), min(fill, depth), min(room - missing, depth)))
    return tuple(found)


def memory_at(stack: Entry | None, memory: Memory, frame: int) -> Memory | None:
    """The memory of a frame: 0 is the rule being read, i the i-th entry from the top of the stack. None if
    the stack has fewer entries."""
    while frame and stack is not None:
        memory, stack, frame = stack.used, stack.parent, frame - 1
    return None if frame else memory


def memories(stack: Entry | None, memory: Memory, count: int) -> list[Memory]:
    """The memory of the rule being read, followed by those of at most `count` entries from the top of the
    stack."""
    found = [memory]
    while stack is not None and len(found) <= count:
        found.append(stack.used)
        stack = stack.parent
    return found
