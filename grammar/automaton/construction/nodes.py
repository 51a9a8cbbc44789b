"""The expressions of a grammar as arrays, for compiled code (`subset_construction`).

A node is an expression; equal expressions are the same node. An *atom* is a set of characters that no
expression of the grammar tells apart. With ``[a-z]`` and "ab", the atoms are a, b and [c-z].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ramify.grammar.automaton.characters import PLAIN
from ramify.grammar.automaton.construction.counted import Counting
from ramify.grammar.automaton.numba_types import array_dtypes, record, tuple_type
from ramify.grammar.rules.expression import (
    Accepted,
    Alt,
    Call,
    CharAutomaton,
    Chars,
    Expression,
    MemberMark,
    ObjectEnd,
    Ranges,
    Repeat,
    Seq,
    Text,
    UniqueItem,
    alt,
    size,
)
from ramify.grammar.rules.rule_set import ROOT

INLINED, TEXT, CHARS, SEQUENCE, OPTIONS, REPEAT, ACCEPTED, CALL, MARKED = range(9)

Mark = MemberMark | ObjectEnd

SHARED_COUNT = 4
SHARED_SIZE = 6
"""Least number of characters that the large options of an item have together to become one rule. This rule is
called, so that its states exist once. The item must be repeated at least SHARED_COUNT times."""

PLAIN_SET = 0
"""The index of the set of plain characters; every grammar has this set."""


class TooLarge(Exception):
    """Error: the grammar has more states than are allowed, or infinitely many."""


class NotCounted(TooLarge):
    """Error: the rules of a long repetition (`counted`) cannot be called, because an alternative begins with
    the same bytes."""


class Nodes(NamedTuple):
    """The nodes, as arrays of records. `atoms`, (1,), is the number of atoms.

    The kind of each `node` determines the meaning of its `first` and `last`:

    TEXT                the atoms of its characters are ``letters[first:last]``
    CHARS               the atoms of the set are ``set_atoms[first:last]``
    SEQUENCE, OPTIONS   the parts are the nodes ``parts[first:last]``
    REPEAT              the node `first`, ``bounds[last].low`` to ``high`` times; -1 is no limit
    ACCEPTED            ``parts[first]``: 1 if the empty text is accepted. Then, up to `last`, come pairs: a
                        node of the kind CHARS, and the node that follows, or -1 if none follows
    CALL                a call of the rule `first`
    MARKED              the empty text; `first` is the mark
    INLINED             the empty text, where an inlined recursive rule has ended: node 0

    A record of `rules` has the node `body` and flags: the rule is `called`; is `recursive`; was made of the
    item of a `UniqueItem` (`item`); remembers the text read in it (`array`); is a rule of a long repetition
    (`counted`). `greedy` is 0 except in rules that are read greedily (`Counting.greedy`): it numbers, from 1,
    the expressions that these rules repeat. A record of `ranges` has the `atom` of a range of characters, and
    the lowest and highest first byte of their UTF-8.
    """

    node: np.ndarray
    letters: np.ndarray
    set_atoms: np.ndarray
    parts: np.ndarray
    bounds: np.ndarray
    rules: np.ndarray
    ranges: np.ndarray
    atoms: np.ndarray


_RECORDS = {
    "node": record("kind", "first", "last"),
    "bounds": record("low", "high"),
    "rules": record("body", "called", "recursive", "item", "array", "counted", "greedy"),
    "ranges": record("atom", "lead", "last_lead"),
}
NODES = tuple_type(Nodes, array_dtypes(Nodes) | _RECORDS)


class Atoms(NamedTuple):
    """Disjoint ranges of characters, from ``cuts[i]`` up to ``cuts[i + 1]``, and their atoms. `of_range`,
    (ranges,), has the atom of each range. The atoms of set s of characters are `members` from ``begin[s]`` up
    to ``begin[s + 1]``."""

    cuts: np.ndarray
    of_range: np.ndarray
    members: np.ndarray
    begin: np.ndarray


def find_atoms(sets: Collection[Ranges], letters: np.ndarray) -> Atoms:
    """Divide the characters into atoms by `sets` and by the single characters `letters`. No atom has both
    ASCII and other characters."""
    ranges = np.array([span for ranges in sets for span in ranges], np.int64).reshape(-1, 2)
    owner = np.repeat(np.arange(len(sets)), [len(ranges) for ranges in sets])
    single = np.unique(letters)
    cuts = np.unique(
        np.concatenate([ranges[:, 0], ranges[:, 1] + 1, single, single + 1, [0, 0x80, 0x110000]])
    )
    count = len(cuts) - 1
    steps = np.zeros((len(sets), count + 1), np.int8)
    steps[owner, np.searchsorted(cuts, ranges[:, 0])] += 1
    steps[owner, np.searchsorted(cuts, ranges[:, 1] + 1)] -= 1
    inside = np.cumsum(steps[:, :count], axis=1, dtype=np.int8).astype(np.bool_)
    told = np.zeros((count, 5 + (len(sets) + 7) // 8), np.uint8)
    told[np.searchsorted(cuts, single), :4] = (
        np.arange(1, len(single) + 1, dtype=np.int32).view(np.uint8).reshape(-1, 4)
    )
    told[:, 4] = cuts[:-1] >= 0x80
    told[:, 5:] = np.packbits(inside, axis=0).T
    _, first, of_range = np.unique(
        told.view(np.dtype((np.void, told.shape[1]))).ravel(), return_index=True, return_inverse=True
    )
    sets_of, members = np.nonzero(inside[:, first])
    begin = np.searchsorted(sets_of, np.arange(len(sets) + 1))
    return Atoms(cuts, of_range.reshape(-1).astype(np.int32), members.astype(np.int32), begin)


def flatten(
    rules: Mapping[str, Expression], called: Collection[str], recursive: Collection[str], *, counting: bool
) -> tuple[Nodes, Atoms, dict[int, Mark]]:
    """Turn `rules` into nodes. Returns the nodes (rule ``root`` comes first), the atoms, and the marks of
    members by number.

    The rules named in `called` are called, all other rules inlined; the rules named in `recursive` call
    themselves. With `counting`, long repetitions become rules that are called (`counted`).
    """
    return _Flattening(rules, called, counting).nodes(recursive)


class _Flattening:
    def __init__(self, rules: Mapping[str, Expression], called: Collection[str], counting: bool) -> None:
        self._rules = rules
        self._called = called
        self._names = [ROOT, *(name for name in rules if name != ROOT)]
        self._number = {name: i for i, name in enumerate(self._names)}
        self._bodies = [rules[name] for name in self._names]
        self._counting = Counting(lambda body: self._added("counted", body)) if counting else None
        self._items: dict[Expression, Call] = {}
        self._automata: dict[CharAutomaton, int] = {}
        self._shared: dict[Expression, Expression] = {}
        self._marks: dict[Mark, int] = {}
        self._known: dict[Expression, int] = {}
        self._chars: dict[Ranges, int] = {}
        self._kind, self._first, self._last = [INLINED], [0], [0]
        self._sets: dict[Ranges, int] = {PLAIN: PLAIN_SET}
        self._parts: list[int] = []
        self._texts: list[str] = []
        self._letters = 0
        self._low: list[int] = []
        self._high: list[int] = []

    def nodes(self, recursive: Collection[str]) -> tuple[Nodes, Atoms, dict[int, Mark]]:
        body = [self._node(expression) for expression in self._bodies]  # grows while it is read
        letters = np.frombuffer("".join(self._texts).encode("utf-32-le"), np.int32)
        atoms = find_atoms(self._sets, letters)
        node = _records("node", self._kind, self._first, self._last)
        sets = node["kind"] == CHARS
        node["last"][sets] = atoms.begin[node["first"][sets] + 1]
        node["first"][sets] = atoms.begin[node["first"][sets]]
        items = {call.rule for call in self._items.values()}
        counted = self._counting.called if self._counting else set()
        greedy = self._counting.greedy if self._counting else {}
        number = {item: i for i, item in enumerate(dict.fromkeys(greedy.values()), 1)}
        names = self._names
        lead = _lead_bytes(atoms.cuts[:-1]), _lead_bytes(atoms.cuts[1:] - 1)
        nodes = Nodes(
            node,
            atoms.of_range[np.searchsorted(atoms.cuts, letters)],
            atoms.members,
            np.array(self._parts, np.int32),
            _records("bounds", self._low, self._high),
            _records(
                "rules",
                body,
                list(map(self._is_called, names)),
                [name in recursive for name in names],
                [name in items for name in names],
                [remembers(body) for body in self._bodies],
                [name in counted for name in names],
                [number[greedy[name]] if name in greedy else 0 for name in names],
            ),
            _records("ranges", atoms.of_range, *lead),
            np.array([atoms.of_range.max() + 1], np.int32),
        )
        return nodes, atoms, {number: mark for mark, number in self._marks.items()}

    def _node(self, expression: Expression) -> int:
        number = self._known.get(expression)
        if number is not None:
            return number
        kind = type(expression)
        if kind is Text:
            literal = expression.text  # type: ignore[union-attr]
            first, code = self._letters, TEXT
            self._texts.append(literal)
            last = self._letters = first + len(literal)
        elif kind is Chars:
            return self._characters(expression.ranges)  # type: ignore[union-attr]
        elif kind is Seq or kind is Alt:
            sequence = kind is Seq
            parts = expression.parts if sequence else expression.options  # type: ignore[union-attr]
            inner = [self._node(part) for part in parts]
            first = len(self._parts)
            self._parts += inner
            last = len(self._parts)
            code = SEQUENCE if sequence else OPTIONS
        elif kind is Call:
            first, last, code = self._number[expression.rule], 0, CALL  # type: ignore[union-attr]
        elif kind is MemberMark or kind is ObjectEnd:
            first, last, code = self._marks.setdefault(expression, len(self._marks)), 0, MARKED  # type: ignore[arg-type]
        elif kind is UniqueItem:
            return self._node(self._item_rule(expression.item))  # type: ignore[union-attr]
        elif kind is Accepted:
            return self._state(expression.automaton, expression.state)  # type: ignore[union-attr]
        else:
            assert isinstance(expression, Repeat)
            counted = self._counting.rewritten(expression) if self._counting else None
            if counted is not None:
                return self._node(counted)
            item, low, high = expression.item, expression.low, expression.high
            if max(low, high or 0) >= SHARED_COUNT:
                item = self._shared_item(item)
            first, last, code = self._node(item), len(self._low), REPEAT
            self._low.append(low)
            self._high.append(-1 if high is None else high)
        number = self._known[expression] = self._new(code, first, last)
        return number

    def _new(self, code: int, first: int, last: int) -> int:
        self._kind.append(code)
        self._first.append(first)
        self._last.append(last)
        return len(self._kind) - 1

    def _characters(self, ranges: Ranges) -> int:
        number = self._chars.get(ranges)
        if number is None:
            place = self._sets.setdefault(ranges, len(self._sets))
            number = self._chars[ranges] = self._new(CHARS, place, place)
        return number

    def _state(self, automaton: CharAutomaton, state: int) -> int:
        if automaton not in self._automata:
            begin = self._automata[automaton] = len(self._kind)
            count = len(automaton.edges)
            self._kind += [ACCEPTED] * count
            self._first += [0] * count
            self._last += [0] * count
            target = [begin + after if row else -1 for after, row in enumerate(automaton.edges)]
            for i, (row, final) in enumerate(zip(automaton.edges, automaton.final, strict=True), begin):
                self._first[i] = len(self._parts)
                self._parts.append(int(final))
                for ranges, after in row:
                    self._parts += (self._characters(ranges), target[after])
                self._last[i] = len(self._parts)
        return self._automata[automaton] + state

    def _item_rule(self, item: Expression) -> Call:
        if item not in self._items:
            self._items[item] = self._added("unique item", item)
        return self._items[item]

    def _added(self, what: str, body: Expression) -> Call:
        """Add a rule with this body, which is called rather than inlined, and return a call of it."""
        call = Call(f"{what} {len(self._names)}")
        self._number[call.rule] = len(self._names)
        self._names.append(call.rule)
        self._bodies.append(body)
        return call

    def _shared_item(self, item: Expression) -> Expression:
        """`item` with its large options replaced by a call of one shared rule."""
        known = self._shared.get(item)
        if known is None:
            options = item.options if isinstance(item, Alt) else (item,)
            if isinstance(item, Call) and not self._is_called(item.rule) and size(self._body(item)) > 1:
                large: list[Expression] = [item]
            else:
                large = [o for o in options if not isinstance(o, Chars | Call) and not o.has_unique_items]
            known = item
            if sum(size(self._body(o)) for o in large) >= SHARED_SIZE:
                small = [option for option in options if option not in large]
                known = alt(*small, self._added("shared", alt(*large)))
            self._shared[item] = known
        return known

    def _is_called(self, rule: str) -> bool:
        return rule in self._called or rule not in self._rules

    def _body(self, expression: Expression) -> Expression:
        return self._bodies[self._number[expression.rule]] if isinstance(expression, Call) else expression


def _records(name: str, *fields: Any) -> np.ndarray:
    """An array of the records that `_RECORDS` has under `name`; `fields` are its columns."""
    dtype = _RECORDS[name]
    return np.array(fields, np.int32).T.reshape(-1, len(fields)).copy().view(dtype).ravel()


def ends_object(body: Expression) -> bool:
    """Whether `body` is a rule for an object whose members come in any order."""
    return isinstance(body, Seq) and bool(body.parts) and isinstance(body.parts[-1], ObjectEnd)


def remembers(body: Expression) -> bool:
    """Whether the text that may come in a rule with this body depends on the text read in it before."""
    return body.has_unique_items or ends_object(body)


def _lead_bytes(chars: np.ndarray) -> np.ndarray:
    """The first byte of the UTF-8 of each character."""
    several = np.where(chars < 0x10000, 0xE0 | chars >> 12, 0xF0 | chars >> 18)
    return np.where(chars < 0x80, chars, np.where(chars < 0x800, 0xC0 | chars >> 6, several))
