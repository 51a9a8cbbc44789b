"""Registers of objects whose members come in any order (`members`), in the form that a walk over tokens uses.

A register is a row of int32:

    0   required members that are missing
    1   number of members that may still come, or `members.NO_LIMIT`
    2   number of members that must come beyond the missing required ones
    3   tokens of everything that must come, the closing brace included; 0 if costs do not matter
    4   number of marks read since the walk began
    5   the frame that the register was copied from; -1 if the object began in the walk
    6   and following: a bit for each member that was read

Frame 0 has the register of the state from which the walk begins, frame i that of the i-th entry of the stack
from the top. The array `tested` records the parts of these registers that the result of the walk depends on,
with a row for each frame:

    0   0 if the result does not depend on the numbers (columns 0 to 2); else 1 more than the number of marks
        read before the walk looked at the numbers
    1   and following: a bit for each member that was looked up
"""

from __future__ import annotations

import numba
import numpy as np

from ramify.grammar.automaton.members import END, MEMBERS, NO_LIMIT, Members
from ramify.grammar.automaton.numba_types import INTS
from ramify.grammar.rules.expression import UNNAMED
from ramify.machine_code import part

MISSING, ROOM, FILL, OWED, READ, FRAME, SEEN = range(7)

DEAD, NONE = -2, -1
"""Codes in place of a register. DEAD: the member read is not allowed. NONE: no object is open."""

ROWS = numba.types.Array(numba.int32, 2, "C")
ROW = numba.types.Array(numba.int32, 1, "C")


@part()
def _is_seen(row: np.ndarray, member: int) -> bool:
    return bool(row[SEEN + (member >> 5)] >> (member & 31) & 1)


@part()
def _note_numbers(row: np.ndarray, tested: np.ndarray) -> None:
    if row[FRAME] >= 0:
        tested[row[FRAME], 0] = max(tested[row[FRAME], 0], row[READ] + 1)


@part()
def _may_come(members: Members, mark: int, row: np.ndarray) -> bool:
    number = members.number[mark]
    if number >= 0 and _is_seen(row, number):
        return False
    return bool(members.required[mark]) or row[ROOM] == NO_LIMIT or row[ROOM] > row[MISSING]


@part()
def _note(members: Members, mark: int, row: np.ndarray, tested: np.ndarray) -> None:
    """Note in `tested` the parts of `row` that `_may_come` depends on."""
    number = members.number[mark]
    if number >= 0:
        if row[FRAME] >= 0:
            tested[row[FRAME], 1 + (number >> 5)] |= numba.int32(1) << numba.int32(number & 31)
        if members.required[mark] or _is_seen(row, number):
            return
    if row[ROOM] < NO_LIMIT:
        _note_numbers(row, tested)


@numba.njit((MEMBERS, numba.int64, ROW, ROWS), cache=True, nogil=True)
def may_be_read(members: Members, mark: int, row: np.ndarray, tested: np.ndarray) -> bool:
    """Whether the member of `mark` may be read. Notes in `tested` the parts of `row` that decide this."""
    _note(members, mark, row, tested)
    return _may_come(members, mark, row)


@part()
def _filling(members: Members, mark: int, row: np.ndarray, fill: int, other: int) -> int:
    """Number of tokens of the first `fill` fillers that were not read yet. The member `other` counts as
    read."""
    kind = members.object[mark]
    found = 0
    for i in range(members.fillers[kind], members.fillers[kind + 1]):
        if fill <= 0:
            break
        number = members.filler_number[i]
        if number == UNNAMED:
            return found + fill * members.filler_tokens[i]
        if number != other and not _is_seen(row, number):
            found += members.filler_tokens[i]
            fill -= 1
    return found


@part()
def _owed_after(members: Members, mark: int, row: np.ndarray) -> int:
    """Number of tokens of everything that must come after the member of `mark`; 0 if costs do not matter."""
    if row[OWED] == 0:
        return 0
    if members.required[mark]:
        return int(row[OWED]) - int(members.tokens[mark])
    if row[FILL] <= 0:
        return int(row[OWED])
    before = _filling(members, mark, row, row[FILL], END)
    return int(row[OWED]) - before + _filling(members, mark, row, row[FILL] - 1, members.number[mark])


@numba.njit((MEMBERS, numba.int64, ROWS, numba.int64), cache=True, nogil=True)
def begin_object(members: Members, kind: int, rows: np.ndarray, count: int) -> None:
    """Write the register of a new object, number `kind`, into row `count` of `rows`."""
    rows[count, :] = 0
    rows[count, MISSING] = members.missing[kind]
    rows[count, ROOM] = members.room[kind]
    rows[count, FILL] = members.fill[kind]
    rows[count, OWED] = members.owed[kind]
    rows[count, FRAME] = -1


@numba.njit((MEMBERS, numba.int64, ROWS, numba.int64, numba.int64, ROWS), cache=True, nogil=True)
def entered_object(
    members: Members, mark: int, rows: np.ndarray, register: int, count: int, tested: np.ndarray
) -> int:
    """The row of the register after `mark`: `register` if nothing changes, else `count`, into which the new
    register is written. `NONE` if the object has ended, `DEAD` if `mark` may not be read."""
    row = rows[register]
    number = members.number[mark]
    if number == END:
        _note_numbers(row, tested)
        return NONE if row[MISSING] == 0 and row[FILL] == 0 else DEAD
    if not may_be_read(members, mark, row, tested):
        return DEAD
    fills = members.fill[members.object[mark]] > 0
    if number == UNNAMED and row[ROOM] == NO_LIMIT and not fills:
        return register
    owed = _owed_after(members, mark, row)
    rows[count, :] = row
    rows[count, OWED] = owed
    rows[count, READ] += 1
    if row[ROOM] < NO_LIMIT:
        rows[count, ROOM] -= 1
    if members.required[mark]:
        rows[count, MISSING] -= 1
    elif row[FILL] > 0:
        rows[count, FILL] -= 1
    if number >= 0:
        rows[count, SEEN + (number >> 5)] |= numba.int32(1) << numba.int32(number & 31)
    return count


@numba.njit((MEMBERS, INTS, numba.int64, ROW, numba.boolean, ROWS), cache=True, nogil=True)
def left_of(
    members: Members, cost: np.ndarray, state: int, row: np.ndarray, exact: bool, tested: np.ndarray
) -> int:
    """Number of tokens from `state` to the end of the object's rule; -1 if `state` has ways and none of them
    is left. Unless `exact`, the number is an upper bound."""
    begin, end = members.ways[state], members.ways[state + 1]
    if begin == end:
        return int(cost[state]) + int(row[OWED])
    least = -1
    for way in range(begin, end):
        mark = members.way_mark[way]
        if not _may_come(members, mark, row):
            continue
        if not exact:
            _note(members, mark, row, tested)
            return int(cost[state]) + int(row[OWED])
        left = int(members.way_tokens[way]) + _owed_after(members, mark, row)
        if least < 0 or left < least:
            least = left
    if least < 0 and not exact:
        for way in range(begin, end):
            _note(members, members.way_mark[way], row, tested)
    return least
