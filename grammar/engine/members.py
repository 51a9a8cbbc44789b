"""Registers of objects whose members come in any order, and the masks that depend on them.

A mask depends on a register only as far as the walk looked at it (`automaton.registers`). Of an object with a
hundred optional members, a mask inside the value of one depends on none of them, or on whether a single one
was read: a comma may come if a member is left. It is kept with those bits, and found again by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ramify.grammar.automaton.members import END, NO_LIMIT, Members
from ramify.grammar.automaton.registers import SEEN
from ramify.grammar.engine.stack import NO_ITEMS, Entry, Memory, Register, states_of
from ramify.grammar.rules.expression import UNNAMED

if TYPE_CHECKING:
    from ramify.grammar.engine.pushdown import Mask

MAX_SHAPES = 32
"""Most sets of looked-up bits by which the masks of one state are kept."""


_Tested = tuple[tuple[int, int, int], ...]
"""What a mask depends on: triples of a frame, 1 more than the marks read before its numbers were looked at or
0, and the bits looked up."""


class MemberLists:
    """`Members` for Python."""

    def __init__(self, members: Members, cost: Sequence[int]) -> None:
        self._members = members
        self._cost = cost
        self.mark: list[int] = members.mark.tolist()
        self.start: list[int] = members.start.tolist()
        self._begin: list[int] = members.ways.tolist()
        self._way_mark: list[int] = members.way_mark.tolist()
        self._way_tokens: list[int] = members.way_tokens.tolist()
        self._object: list[int] = members.object.tolist()
        self._number: list[int] = members.number.tolist()
        self._required: list[int] = members.required.tolist()
        self._tokens: list[int] = members.tokens.tolist()
        first = (members.missing, members.room, members.fill, members.owed)
        self._first = [
            Register(0, *numbers) for numbers in zip(*(each.tolist() for each in first), strict=True)
        ]
        self._fillers = [
            list(
                zip(
                    members.filler_number[begin:end].tolist(),
                    members.filler_tokens[begin:end].tolist(),
                    strict=True,
                )
            )
            for begin, end in zip(members.fillers[:-1].tolist(), members.fillers[1:].tolist(), strict=True)
        ]

    def begun(self, start: int) -> Memory:
        """The memory of the rule that begins in the state `start`."""
        kind = self.start[start]
        return NO_ITEMS if kind < 0 else self._first[kind]

    def entered(self, state: int, register: Register) -> Memory | None:
        """The memory in `state` after a byte, or None where the state is dead or its mark may not be read."""
        mark = self.mark[state]
        if mark < 0:
            return register if self._is_alive(state, register) else None
        number = self._number[mark]
        if number == END:
            return None if register.missing or register.fill else NO_ITEMS
        if not self._may_come(mark, register):
            return None
        seen, missing, room, fill, _ = register
        owed = self._owed_after(mark, register)
        if number >= 0:
            seen |= 1 << number
        if self._required[mark]:
            missing -= 1
        elif fill:
            fill -= 1
        return Register(seen, missing, room - (room < NO_LIMIT), fill, owed)

    def left(self, state: int, register: Register) -> int | None:
        """Tokens up to the end of the rule of the object, or None where no way is left."""
        ways = range(self._begin[state], self._begin[state + 1])
        if not ways:
            return self._cost[state] + register.owed
        return min(
            (
                self._way_tokens[way] + self._owed_after(self._way_mark[way], register)
                for way in ways
                if self._may_come(self._way_mark[way], register)
            ),
            default=None,
        )

    def _is_alive(self, state: int, register: Register) -> bool:
        """Some way is left."""
        marks = self._way_mark[self._begin[state] : self._begin[state + 1]]
        return not marks or any(self._may_come(mark, register) for mark in marks)

    def may_run(self, state: int, memory: Memory, tested: np.ndarray) -> bool:
        """The run of `state` (`automaton.runs`) may come: a member without a name, which is the first way,
        where there are ways. Writes into `tested` what that depends on."""
        begin = self._begin[state]
        if begin == self._begin[state + 1] or not isinstance(memory, Register):
            return True
        if self._number[self._way_mark[begin]] != UNNAMED:
            return False
        if memory.room < NO_LIMIT:
            tested[0, 0] = 1
        return self._may_come(self._way_mark[begin], memory)

    def slack(self, state: int, stack: Entry | None, memory: Memory) -> int:
        """Tokens by which the costs that a mask's rise is counted from exceed those of the automaton and the
        stack."""
        found = memory.owed if isinstance(memory, Register) else 0
        if stack is not None and isinstance(stack.used, Register):
            left = self.left(stack.state, stack.used)
            assert left is not None
            found += self._cost[stack.state] + stack.used.owed - left
        return found

    def _may_come(self, mark: int, register: Register) -> bool:
        number = self._number[mark]
        if number >= 0 and register.seen >> number & 1:
            return False
        return bool(self._required[mark]) or register.room > register.missing

    def _owed_after(self, mark: int, register: Register) -> int:
        if self._required[mark]:
            return register.owed - self._tokens[mark]
        if not register.fill:
            return register.owed
        number = self._number[mark]
        filling = self._filling(mark, register.seen, register.fill)
        seen = register.seen | (1 << number if number >= 0 else 0)
        return register.owed - filling + self._filling(mark, seen, register.fill - 1)

    def _filling(self, mark: int, seen: int, fill: int) -> int:
        """Tokens of `fill` members of those that were not `seen`."""
        found = 0
        for number, tokens in self._fillers[self._object[mark]]:
            if number == UNNAMED:
                return fill * tokens
            if fill and not seen >> number & 1:
                found += tokens
                fill -= 1
        return found

    def rows(self, frames: Sequence[Memory], exact: bool) -> tuple[np.ndarray, np.ndarray]:
        """`frames` and `tested` of `registers`, for a walk that needs the costs of the frames if `exact`."""
        words = self._members.seen_words
        rows = np.zeros((len(frames), SEEN + words), np.int32)
        for i, memory in enumerate(frames):
            if isinstance(memory, Register):
                seen, missing, room, fill, owed = memory
                rows[i, :SEEN] = missing, room, fill, owed if exact else 0, 0, i
                rows[i, SEEN:] = np.frombuffer(seen.to_bytes(4 * words, "little"), np.int32)
            else:
                rows[i, 0] = -1
        return rows, np.zeros((len(frames), 1 + words), np.int32)


class MemberMasks:
    """The masks of a grammar with registers, by state, stack and what they depend on."""

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
    """The memory of frame 0, the rule that is read, or of the entry `frame` from the top of the stack."""
    while frame and stack is not None:
        memory, stack, frame = stack.used, stack.parent, frame - 1
    return None if frame else memory


def memories(stack: Entry | None, memory: Memory, count: int) -> list[Memory]:
    """The memory of the rule that is read, and of at most `count` entries of the stack."""
    found = [memory]
    while stack is not None and len(found) <= count:
        found.append(stack.used)
        stack = stack.parent
    return found
