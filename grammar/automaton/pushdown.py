"""Deterministic pushdown automata over bytes, packed into arrays.

A configuration is a state and a stack of states to return to. State 0 with an empty stack is the start;
a text is complete in a final state with final states alone on the stack. The edges of state s are
``[offsets[s], offsets[s + 1])``, sorted and disjoint. On a byte in ``[low[e], high[e]]``, edge e pushes
``push[e]``, if it is not -1; then it reads the byte and leads to ``target[e]``, or, where that is
negative, the byte is read from state ``~target[e]`` on. Where a state has no edge for the byte and is
final, the state on top of the stack is popped and the byte is read from there on; nowhere could both be
done, so there is never a choice. From every state the end can be reached.

Where `forks` is set, edges overlap and a final state may have an edge for the same byte: all of these are
ways to read on, and a text may have several configurations.

What else is known of each state: `run`, `run_kind` and `run_cost` are for whole groups of tokens
(`runs`), `cost` and `token` for the shortest completion (`costs`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from ramify.messages import Unenforced

ENDLESS = 255
"""`run` where any number of characters may come."""


class UniqueItems(msgspec.Struct, frozen=True, array_like=True):
    """What is known of each state where texts must be fresh (`rules.expression.Fresh`).

    `need`: fresh texts that must still be read before the rule ends. `item`: the state in which these begin,
    or -1. `words`: how many texts lead from the state to the end of its rule. `lengths`, by the state in
    which fresh texts begin: pairs of a length in bytes and of how many texts there are up to it.
    """

    need: list[int]
    item: list[int]
    words: list[int]
    lengths: dict[int, list[tuple[int, int]]]


class PushdownAutomaton:
    """The arrays of an automaton.

    By edge, (edges,): `low` and `high` uint8, `target` and `push` int32. `offsets` (states + 1,) int32.
    By state, (states,):

        final          bool
        cost           int32, tokens that suffice up to the end of the rule
        token          int32, the first of these; -1 where the cost is 0
        run            uint8, how many characters of a kind may come next, whichever they are
        run_kind       uint8, that kind
        run_cost       int32, an upper bound of the cost after such characters
        fresh          bool, the state follows a text that must be fresh
        before_fresh   bool, such a text may still come in the same rule

    `items` says more of fresh texts, if there are any. `most_pushed`: states that are pushed for one byte at
    most.
    """

    FIELDS = (
        ("offsets", np.int32),
        ("low", np.uint8),
        ("high", np.uint8),
        ("target", np.int32),
        ("push", np.int32),
        ("final", np.bool_),
        ("run", np.uint8),
        ("run_kind", np.uint8),
        ("cost", np.int32),
        ("token", np.int32),
        ("run_cost", np.int32),
        ("after_item", np.bool_),
        ("before_item", np.bool_),
    )

    offsets: np.ndarray
    low: np.ndarray
    high: np.ndarray
    target: np.ndarray
    push: np.ndarray
    final: np.ndarray
    run: np.ndarray
    run_kind: np.ndarray
    cost: np.ndarray
    token: np.ndarray
    run_cost: np.ndarray
    after_item: np.ndarray
    before_item: np.ndarray

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        most_pushed: int,
        items: UniqueItems | None = None,
        nondeterministic: bool = False,
        unenforced: tuple[Unenforced, ...] = (),
    ) -> None:
        for name, _ in self.FIELDS:
            setattr(self, name, arrays[name])
        self.most_pushed = most_pushed
        self.items = items
        self.nondeterministic = nondeterministic
        self.unenforced = unenforced

    @property
    def states(self) -> int:
        return len(self.final)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name, _ in self.FIELDS)

    def to_bytes(self) -> bytes:
        packed = [getattr(self, name).astype(kind, copy=False).tobytes() for name, kind in self.FIELDS]
        return msgspec.msgpack.encode(
            _Packed(packed, self.most_pushed, self.items, self.nondeterministic, self.unenforced)
        )

    @staticmethod
    def from_bytes(data: bytes) -> PushdownAutomaton:
        packed, *others = msgspec.structs.astuple(msgspec.msgpack.decode(data, type=_Packed))
        arrays: dict[str, np.ndarray] = {
            name: np.frombuffer(raw, kind)
            for (name, kind), raw in zip(PushdownAutomaton.FIELDS, packed, strict=True)
        }
        return PushdownAutomaton(arrays, *others)


class _Packed(msgspec.Struct, array_like=True):
    arrays: list[bytes]
    most_pushed: int
    items: UniqueItems | None
    nondeterministic: bool
    unenforced: tuple[Unenforced, ...]
