"""Loops: states that many characters lead back to, and the tokens that such a state can read.

After the opening quotation mark of a JSON string, every character but the quotation mark and the backslash
leads back to the same state. So a token consists of two parts: the characters before the first one that
leaves the loop, and the *rest*, which is read from the same state:

    token     loop     rest
    ab        ab                allowed
    ab",      ab       ",       allowed if the rest can be read
    ",                 ",       allowed if the rest can be read, in the same walk
    a\\n                         never allowed, since a line feed has no edge

The tokens without a rest are a bitmask, and the rests are a trie; both are made once for each set of
characters. A state may also lead into a loop of another state, such as the first state of ``[a-z][a-z0-9]*``.
After its first character, that state reads a token as the loop does.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ramify.grammar.automaton.numba_types import BYTES, packed_bytes, packed_flags, packed_ints
from ramify.machine_code import part

DEAD, LOOPS, LEAVES = 0, 1, 2
"""Effects of a byte in a state: the byte cannot be read, it leads back to the state, or it has any other
effect. The first byte of a character of several bytes is `LOOPS` if every character with this first byte
leads back."""

_LONGS = numba.types.Array(numba.int64, 1, "C", readonly=True)
_NEVER = -1


class Loop(NamedTuple):
    """Tokens by the way in which a loop reads them. `row`, (words,) int32, is the mask of the tokens without
    a rest. All other tokens are in packed tries: `rests` has the rests to be read from the loop; `others` has
    the tokens to be read from the state that leads into the loop, None if that state is the loop."""

    row: np.ndarray
    rests: tuple[np.ndarray, np.ndarray]
    others: tuple[np.ndarray, np.ndarray] | None


@part()
def _edge(offsets: np.ndarray, low: np.ndarray, high: np.ndarray, state: int, first: int, last: int) -> int:
    """The edge of `state` that applies to all bytes from `first` to `last`, or -1 if no single edge does."""
    for edge in range(offsets[state], offsets[state + 1]):
        if low[edge] <= first and last <= high[edge]:
            return edge
    return -1


@part()
def _second_byte(lead: int) -> tuple[int, int]:
    """The range of the second byte of a character whose first byte is `lead` (RFC 3629, section 4)."""
    if lead == 0xE0:
        return 0xA0, 0xBF
    if lead == 0xED:
        return 0x80, 0x9F
    if lead == 0xF0:
        return 0x90, 0xBF
    return 0x80, 0x8F if lead == 0xF4 else 0xBF


@part()
def _more_bytes(lead: int) -> int:
    """Number of bytes after the first byte `lead` of a character."""
    return 1 if lead < 0xE0 else 2 if lead < 0xF0 else 3


@numba.njit((BYTES, numba.int64), cache=True, nogil=True)
def byte_kinds(automaton: np.ndarray, state: int) -> tuple[int, np.ndarray]:
    """Find the loop next to `state` in the packed `pushdown.Arrays`: the state to which most ASCII characters
    lead, often `state` itself. Returns the loop, and (2, 256) uint8: the effect of each byte in the loop (row
    0) and in `state` (row 1).

    A byte is `LOOPS` in row 1 if it is `LOOPS` in row 0, and `state` has the same edge for it as the loop.
    """
    offsets, final = packed_ints(automaton, 0), packed_flags(automaton, 5)
    low, high = packed_bytes(automaton, 1), packed_bytes(automaton, 2)
    target, push, after_item = (
        packed_ints(automaton, 3),
        packed_ints(automaton, 4),
        packed_flags(automaton, 10),
    )
    loop, most = state, 0
    for edge in range(offsets[state], offsets[state + 1]):
        if push[edge] >= 0 or target[edge] < 0:
            continue
        width = 0
        for other in range(edge, offsets[state + 1]):
            if target[other] == target[edge] and low[other] < 0x80:
                width += numba.int64(high[other]) + 1 - low[other]
        if width > most:
            loop, most = target[edge], width
    kinds = np.empty((2, 256), np.uint8)
    for i in range(2):
        here = state if i else loop
        kinds[i] = LEAVES if final[here] else DEAD
        for edge in range(offsets[here], offsets[here + 1]):
            for byte in range(low[edge], numba.int64(high[edge]) + 1):
                kinds[i, byte] = LEAVES
    for edge in range(offsets[loop], offsets[loop + 1]):
        if target[edge] == loop and push[edge] < 0:
            kinds[0, low[edge] : min(0x80, numba.int64(high[edge]) + 1)] = LOOPS
    for lead in range(0xC2, 0xF5):
        edge = _edge(offsets, low, high, loop, lead, lead)
        if edge < 0:
            continue
        # The bytes after the first are often read by a called rule, which then returns to the loop.
        pushed, here = push[edge], target[edge]
        first, last = _second_byte(lead)
        for _ in range(_more_bytes(lead)):
            edge = _edge(offsets, low, high, here, first, last) if here >= 0 else -1
            here = target[edge] if edge >= 0 and push[edge] < 0 else -1
            first, last = 0x80, 0xBF
        if pushed == loop and here >= 0 and final[here] and offsets[here] == offsets[here + 1]:
            here = -1 if after_item[loop] else loop
        elif pushed >= 0:
            here = -1
        if here == loop:
            kinds[0, lead] = LOOPS
    for byte in range(256):
        if kinds[0, byte] == LOOPS:
            edge = _edge(offsets, low, high, state, byte, byte)
            other = _edge(offsets, low, high, loop, byte, byte)
            if edge >= 0 and target[edge] == target[other] and push[edge] == push[other]:
                kinds[1, byte] = LOOPS
    return loop, kinds


@numba.njit((BYTES, _LONGS, BYTES, BYTES), cache=True, nogil=True)
def rests(data: np.ndarray, sizes: np.ndarray, in_loop: np.ndarray, in_state: np.ndarray) -> np.ndarray:
    """(tokens,) int64: the index at which the rest of each token begins. It is the size of the token if there
    is no rest, 0 if the whole token must be read from the state itself, and -1 if the rest begins with a byte
    that cannot be read.

    `data` and `sizes` are those of `trie.Spellings`; `in_loop` and `in_state` are the rows of `byte_kinds`.
    """
    found = np.empty(sizes.size, np.int64)
    begin = 0
    for i in range(sizes.size):
        text = data[begin : begin + sizes[i]]
        begin += sizes[i]
        at = 0
        kinds = in_state
        while at < text.size and kinds[text[at]] == LOOPS:
            after = at + 1
            if text[at] >= 0x80:
                after += _more_bytes(text[at])
                first, last = _second_byte(text[at])
                whole = after <= text.size
                for k in range(at + 1, min(after, text.size)):
                    whole &= first <= text[k] <= last
                    first, last = 0x80, 0xBF
                if not whole:
                    break
            at = after
            kinds = in_loop
        found[i] = _NEVER if at < text.size and kinds[text[at]] == DEAD else at
    return found
