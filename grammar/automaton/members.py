"""Objects whose members come in any order: the state alone does not tell which members were read.

The rule of such an object has one loop over all members. The states inside names form a trie of all names; a
*mark* after each name says which member the name belongs to. The members read so far are in a *register*
beside the state (`masks.registers`), which also counts the members that must and may still come. For ``a``
(required) and ``ab`` the rule has the states

    0   {  → 1
    1   " → 2                       ways: a, ab
    2   a → 3                       ways: a, ab
    3   " → 4 (mark a), b → 5       ways: a, ab
    5   " → 6 (mark ab)             ways: ab
    …   values; after them: "," → 7 and "}" → 8 (mark: end)
    7   " → 2                       ways: a, ab

From a state with *ways*, the text can only go on to the mark of one of these ways. The state is alive as long
as one of its ways is: state 5 is dead once ab was read. The mark of a member that was read is dead, and the
mark of the end is dead while a is missing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramify.grammar.automaton.numba_types import array_dtypes, tuple_type

END = -2
"""`Members.number` of the mark at the end of an object."""

NO_LIMIT = 1 << 30
"""`Members.room` of an object that may have any number of members."""


class Members(NamedTuple):
    """Arrays of int32, by state (states,), way (ways,), mark (marks,), object (objects,), filler (fillers,).

    mark            by state, the mark that was read just before the state, or -1
    start           by state, the object whose rule begins in the state, or -1
    ways            (states + 1,): the ways of state s are ``[ways[s], ways[s + 1])``
    always          by state, 1 if any number of unnamed members may come, so that some way is always left
    way_mark        by way, its mark
    way_tokens      by way, tokens to the end of the value of its member
    object          by mark
    number          by mark, the member's number in its object, `UNNAMED`, or END
    required        by mark, 1 for a required member
    tokens          by mark, tokens of its member and a comma before it
    missing         by object, the number of required members
    room            by object, the largest number of members, or NO_LIMIT
    fill            by object, the number of members that must come beyond the required ones
    owed            by object, tokens of the members that a new object must have, and of its closing brace
    fillers         (objects + 1,): the members to fill object o with, in this order, are
                    ``[fillers[o], fillers[o + 1])``
    filler_number   by filler, the member's number, or `UNNAMED` for any number of members
    filler_tokens   by filler, its tokens
    """

    mark: np.ndarray
    start: np.ndarray
    ways: np.ndarray
    always: np.ndarray
    way_mark: np.ndarray
    way_tokens: np.ndarray
    object: np.ndarray
    number: np.ndarray
    required: np.ndarray
    tokens: np.ndarray
    missing: np.ndarray
    room: np.ndarray
    fill: np.ndarray
    owed: np.ndarray
    fillers: np.ndarray
    filler_number: np.ndarray
    filler_tokens: np.ndarray

    @property
    def seen_words(self) -> int:
        """Number of int32 words that hold one bit for each member."""
        return (int(self.number.max(initial=0)) >> 5) + 1


DTYPES = array_dtypes(Members)
MEMBERS = tuple_type(Members, DTYPES, readonly=True)
NO_MEMBERS = Members(*(np.frombuffer(b"", np.int32) for _ in Members._fields))
