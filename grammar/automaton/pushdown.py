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
every return is taken, and one text may have several configurations. In both kinds of automaton, the end can
be reached from every state.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec
import numpy as np

from ramify.grammar.automaton.members import Members
from ramify.grammar.automaton.numba_types import array_dtypes, pack, unpack

ENDLESS = 255
"""`Arrays.run` of a state from which any number of characters of a kind may come."""


MANY_BYTES = 20
"""Least number of bytes that a state must read to be searched for loops (`loops`). A search takes 2 us."""


ENDLESS_WORDS = 1 << 30
"""Value of `UniqueItems.words` that stands for this number of texts or more."""

COUNTED_LENGTHS = 256
"""Most lengths in `UniqueItems.lengths`."""


class UniqueItems(msgspec.Struct, frozen=True, array_like=True):
    """Tables of a grammar in which items must be unique (`rules.expression.UniqueItem`).

    need       by state, the unique items that must still be read before the rule ends
    item       by state, the start state of the unique items that may follow, or -1
    words      by state, the number of texts from the state to the end of its rule
    lengths    by start state of an item, pairs of a length in bytes and the number of items up to that length
    """

    need: list[int]
    item: list[int]
    words: list[int]
    lengths: dict[int, list[tuple[int, int]]]

    def of_first(self, states: int) -> UniqueItems:
        """The tables of the first `states` states."""
        return UniqueItems(self.need[:states], self.item[:states], self.words[:states], self.lengths)


def surcharge(lengths: list[tuple[int, int]], used: int, need: int) -> int:
    """Upper bound of the tokens that `need` unique items take beyond `need` times the shortest item. Assumes
    the worst case, that the `used` items already used are the shortest ones, and one token for each byte."""
    return sum(_length_of(lengths, used + i) - 1 for i in range(need) if used + i)


def _length_of(lengths: list[tuple[int, int]], rank: int) -> int:
    """Number of bytes of the item at index `rank`, with the items sorted by length."""
    for length, texts in lengths:
        if texts > rank:
            return length
    length, texts = lengths[-1]
    # Longer items were not counted. Each further COUNTED_LENGTHS lengths have at least one.
    return length + (rank - texts + 1) * COUNTED_LENGTHS


class Arrays(NamedTuple):
    """Arrays: `offsets` (states + 1,); `low`, `high`, `target` and `push` (edges,); all others (states,).

    final          the rule may end here
    run            number of characters of one kind that may come next, whichever they are (`runs`)
    run_kind       the kind of these characters, an index into `characters.KINDS`
    run_cost       upper bound of `cost` after any of these characters
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
    """A compiled grammar.

    `packed` has the `Arrays`, packed by `numba_types.pack`. `items` is None if no items must be unique;
    `members` is None if no object has its members in any order. `most_pushed` is the largest number of states
    pushed for one byte.
    """

    packed: np.ndarray
    most_pushed: int
    items: UniqueItems | None = None
    members: Members | None = None
    nondeterministic: bool = False

    def __post_init__(self) -> None:
        views = zip(Arrays._fields, unpack(self.packed), strict=True)
        self.arrays = Arrays(*(view.view(DTYPES[name]) for name, view in views))
        """Read-only views of `packed`."""
        widths = self.arrays.high.astype(np.int64) - self.arrays.low + 1
        ends = np.concatenate([[0], np.cumsum(widths)])
        self.reads_many = np.diff(ends[self.arrays.offsets]) >= MANY_BYTES
        """(states,) bool: the state reads many bytes, so that a walk from it may be long."""

    @property
    def states(self) -> int:
        return len(self.arrays.final)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.packed, *(self.members or ())))

    def to_bytes(self) -> bytes:
        members = None if self.members is None else [array.tobytes() for array in self.members]
        others = (self.most_pushed, self.items, members, self.nondeterministic)
        return msgspec.msgpack.encode((self.packed.tobytes(), *others))

    @staticmethod
    def from_bytes(data: bytes) -> PushdownAutomaton:
        """The automaton that `to_bytes` packed."""
        packed, most_pushed, items, members, *others = msgspec.msgpack.decode(data, type=_Packed)
        tables = members and Members(*(np.frombuffer(raw, np.int32) for raw in members))
        return PushdownAutomaton(np.frombuffer(packed, np.uint8), most_pushed, items, tables, *others)


_Packed = tuple[bytes, int, UniqueItems | None, list[bytes] | None, bool]


def packed_arrays(arrays: Arrays) -> np.ndarray:
    """`arrays` for `PushdownAutomaton.packed`, each as its type of `DTYPES`."""
    return pack(
        array.astype(DTYPES[name], copy=False) for name, array in zip(Arrays._fields, arrays, strict=True)
    )
