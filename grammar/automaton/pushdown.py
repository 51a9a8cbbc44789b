"""Pushdown automata over bytes, packed into arrays.

A *configuration* is a state and a stack of states to return to. The start is state 0 with an empty stack. A
text is complete in a final state when the stack holds final states only.

The edges of state s are ``[offsets[s], offsets[s + 1])``, sorted by byte. Edge e applies to the bytes
``low[e]`` to ``high[e]``:

    push[e] >= 0       push that state first
    target[e] >= 0     read the byte, and go to state target[e]
    target[e] < 0      go to state ~target[e] without reading: the start of a called rule

A final state returns where no edge applies: it pops the stack and reads the byte from the state popped.

A deterministic automaton has disjoint edges, and a final state that has an edge for a byte never needs to
return on that byte. In a nondeterministic automaton (`nondeterministic`) edges may overlap, every edge and
every return is taken, and one text may have several configurations. From every state the end can be reached
in both.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec
import numpy as np

from ramify.grammar.automaton.members import Members
from ramify.grammar.automaton.numba_types import array_dtypes, pack, unpack

ENDLESS = 255
"""`Arrays.run` of a state after which any number of characters may come."""


MANY_BYTES = 20
"""Bytes that a state reads from which on it is looked at for loops (`loops`): that takes 2 us."""


ENDLESS_WORDS = 1 << 30
"""`UniqueItems.words` of this number of texts and more."""

COUNTED_LENGTHS = 256
"""Most lengths in `UniqueItems.lengths`."""


class UniqueItems(msgspec.Struct, frozen=True, array_like=True):
    """Tables of a grammar in which items must be unique (`rules.expression.UniqueItem`).

    need       by state, the unique items that must still be read before the rule ends
    item       by state, the start state of those items, or -1
    words      by state, the number of texts from there to the end of its rule
    lengths    by start state of an item: pairs of a length in bytes and the number of items up to that length
    """

    need: list[int]
    item: list[int]
    words: list[int]
    lengths: dict[int, list[tuple[int, int]]]

    def of_first(self, states: int) -> UniqueItems:
        """The tables of the first `states` states."""
        return UniqueItems(self.need[:states], self.item[:states], self.words[:states], self.lengths)


def surcharge(lengths: list[tuple[int, int]], used: int, need: int) -> int:
    """Tokens of `need` unique items beyond `need` times the shortest item, where at worst the `used` shortest
    items are used. Counted in bytes, since a byte takes at most one token."""
    return sum(_length_of(lengths, used + i) - 1 for i in range(need) if used + i)


def _length_of(lengths: list[tuple[int, int]], rank: int) -> int:
    """Bytes of the item at index `rank` in the order of length."""
    for length, texts in lengths:
        if texts > rank:
            return length
    length, texts = lengths[-1]
    return length + (rank - texts + 1) * COUNTED_LENGTHS  # not counted, but there is one at least


class Arrays(NamedTuple):
    """`offsets` is (states + 1,); `low`, `high`, `target` and `push` are (edges,); all others are (states,).

    final          the rule may end here
    run            number of characters of one kind that may come next, whichever they are (`runs`)
    run_kind       that kind, an index into `runs.KINDS`
    run_cost       upper bound of `cost` after such characters
    cost           tokens of the shortest completion of the rule (`costs`)
    after_item     a unique item has just ended
    before_item    a unique item may still come in the same rule
    """

    offsets: np.ndarray
    low: np.ndarray
    high: np.ndarray
    target: np.ndarray
    push: np.ndarray
    final: np.ndarray
    run: np.ndarray
    run_kind: np.ndarray
    run_cost: np.ndarray
    cost: np.ndarray
    after_item: np.ndarray
    before_item: np.ndarray


DTYPES = array_dtypes(
    Arrays, uint8=("low", "high", "run", "run_kind"), flags=("final", "after_item", "before_item")
)
"""Types of `Arrays`, by name."""


@dataclasses.dataclass
class PushdownAutomaton:
    """A compiled grammar. `items` is None where no items must be unique, `members` where no object has its
    members in any order. `most_pushed`: most states pushed for one byte. `packed`, by `numba_types.pack`, has
    `arrays` as its views; empty where the automaton has just been compiled."""

    arrays: Arrays
    most_pushed: int
    items: UniqueItems | None = None
    members: Members | None = None
    nondeterministic: bool = False
    packed: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def states(self) -> int:
        return len(self.arrays.final)

    def __post_init__(self) -> None:
        arrays = self.arrays
        widths = np.concatenate([[0], np.cumsum(arrays.high.astype(np.int64) - arrays.low + 1)])
        self.reads_many = np.diff(widths[arrays.offsets]) >= MANY_BYTES
        """(states,) bool: the state reads many bytes, so that a walk from it may be long."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.arrays, *(self.members or ())))

    def to_bytes(self) -> bytes:
        packed = [
            array.astype(DTYPES[name], copy=False).tobytes()
            for name, array in zip(Arrays._fields, self.arrays, strict=True)
        ]
        members = None if self.members is None else [array.tobytes() for array in self.members]
        others = (self.most_pushed, self.items, members, self.nondeterministic)
        return msgspec.msgpack.encode((packed, *others))

    @staticmethod
    def from_bytes(data: bytes) -> PushdownAutomaton:
        """The automaton that `to_bytes` packed; its arrays are read-only views."""
        raw_arrays, most_pushed, items, raw_members, *others = msgspec.msgpack.decode(data, type=_Packed)
        packed = pack([np.frombuffer(raw, np.uint8) for raw in raw_arrays])
        arrays = [view.view(DTYPES[name]) for name, view in zip(Arrays._fields, unpack(packed), strict=True)]
        members = raw_members and Members(*(np.frombuffer(raw, np.int32) for raw in raw_members))
        automaton = PushdownAutomaton(Arrays(*arrays), most_pushed, items, members, *others)
        automaton.packed = packed
        return automaton


_Packed = tuple[list[bytes], int, UniqueItems | None, list[bytes] | None, bool]
