"""Deterministic automata of expressions, by partial derivatives (Brzozowski 1964, Antimirov 1996).

The derivative of an expression by a character describes the texts that may follow that character. It is a set
of expressions:

    ab|ac  by a   is  {b, c}        a state of the automaton is such a set, here the one after "a"
    (ab)*  by a   is  {b(ab)*}
    {b, c} by b   is  {EMPTY}       a state is final if some member matches the empty text

A state may also be a tuple of sets, one for each of several expressions. The automaton is then the product of
their automata. Depending on the states that are final, it accepts the intersection of their languages, or one
language without another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from ramify.grammar.rules.expression import (
    EMPTY,
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
    accepted,
    normal_ranges,
    nullable,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.rule_set import nullable_rules

State = TypeVar("State", bound=Hashable)

Residual = frozenset[Expression]
"""The derivative of an expression by a text: the expressions that may follow that text."""


class Derivatives:
    """Derivatives of expressions that may call `rules`.

    A rule that calls itself in any place but the last has infinitely many derivatives.
    """

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = rules
        self._nullable_rules = nullable_rules(rules)
        self._known: dict[Expression, tuple[tuple[Ranges, Expression], ...]] = {}

    def nullable(self, expression: Expression) -> bool:
        """Whether `expression` matches the empty text."""
        return nullable(expression, self._nullable_rules)

    def steps_of(self, expression: Expression) -> tuple[tuple[Ranges, Expression], ...]:
        """Pairs of a set of characters and an expression of the derivative by each of these characters. The
        sets may overlap."""
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = self._new_steps(expression)
        return known

    def _new_steps(self, expression: Expression) -> tuple[tuple[Ranges, Expression], ...]:
        match expression:
            case Chars(ranges):
                return ((ranges, EMPTY),)
            case Text(literal):
                return ((((ord(literal[0]), ord(literal[0])),), text(literal[1:])),)
            case Alt(options):
                return tuple(piece for option in options for piece in self.steps_of(option))
            case Seq(()):
                return ()
            case Seq(parts):
                rest = seq(*parts[1:])
                pieces = tuple((ranges, seq(after, rest)) for ranges, after in self.steps_of(parts[0]))
                return pieces + (self.steps_of(rest) if self.nullable(parts[0]) else ())
            case Repeat(item, low, high):
                rest = repeat(item, max(0, low - 1), None if high is None else high - 1)
                return tuple((ranges, seq(after, rest)) for ranges, after in self.steps_of(item))
            case Accepted(automaton, state):
                return tuple((ranges, accepted(automaton, after)) for ranges, after in automaton.edges[state])
            case Call(rule):
                return self.steps_of(self._rules[rule])
            case UniqueItem() | MemberMark() | ObjectEnd():
                raise AssertionError("What may follow depends on all texts that were read before.")

    def product_transitions(self, residuals: Sequence[Residual]) -> list[tuple[Ranges, tuple[Residual, ...]]]:
        """The transitions of the product automaton from the state `residuals`: (characters, next state), with
        disjoint sets of characters. Characters by which all derivatives are empty are left out."""
        pieces: dict[Ranges, list[tuple[int, Expression]]] = {}
        for part, residual in enumerate(residuals):
            for expression in residual:
                for ranges, after in self.steps_of(expression):
                    pieces.setdefault(ranges, []).append((part, after))
        sets = sorted(pieces)
        found: dict[tuple[Residual, ...], list[Ranges]] = {}
        for ranges, members in _divided(tuple(sets)):
            derivatives: list[set[Expression]] = [set() for _ in residuals]
            for i in members:
                for part, after in pieces[sets[i]]:
                    derivatives[part].add(after)
            found.setdefault(tuple(map(frozenset, derivatives)), []).append(ranges)
        return [(_joined(ranges), after) for after, ranges in found.items()]


@lru_cache(maxsize=4096)
def _divided(sets: tuple[Ranges, ...]) -> list[tuple[Ranges, tuple[int, ...]]]:
    """Divide the characters in `sets` by the sets that contain them: (characters, indices of the sets that
    contain them)."""
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for i, ranges in enumerate(sets):
        for low, high in ranges:
            opening.setdefault(low, []).append(i)
            closing.setdefault(high + 1, []).append(i)
    spans: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    live: set[int] = set()
    for begin, end in itertools.pairwise(sorted(opening.keys() | closing.keys())):
        live.difference_update(closing.get(begin, ()))
        live.update(opening.get(begin, ()))
        if live:
            spans.setdefault(tuple(sorted(live)), []).append((begin, end - 1))
    return [(tuple(ranges), members) for members, ranges in spans.items()]


class Product:
    """The product automaton of `conditions`. Each state has the derivative of each condition's expression.

    A condition is an expression, and True if a text must match the expression, False if it must not.
    """

    def __init__(self, conditions: Iterable[tuple[Expression, bool]]) -> None:
        pairs = list(conditions)
        self.start = tuple(frozenset([expression]) for expression, _ in pairs)
        self._positive = [positive for _, positive in pairs]
        self._derivatives = Derivatives({})

    def steps(self, state: tuple[Residual, ...]) -> list[tuple[Ranges, tuple[Residual, ...]]]:
        """The transitions of `state`, as (characters, next state). Next states in which some positive
        condition can no longer be met are left out."""
        return [
            (ranges, after)
            for ranges, after in self._derivatives.product_transitions(state)
            if all(residual or not positive for residual, positive in zip(after, self._positive, strict=True))
        ]

    def final(self, state: tuple[Residual, ...]) -> bool:
        """Whether the text read so far satisfies all conditions."""
        return all(
            any(map(nullable, residual)) == positive
            for residual, positive in zip(state, self._positive, strict=True)
        )


def explore(
    start: State,
    steps: Callable[[State], Iterable[tuple[Ranges, State]]],
    final: Callable[[State], bool],
    most_states: float = math.inf,
) -> CharAutomaton | None:
    """The automaton of all states that are reachable from `start` by `steps`, which gives the transitions of
    a state. Returns None if there are more than `most_states` states."""
    number = {start: 0}
    order = [start]
    edges: list[list[tuple[Ranges, int]]] = []
    for state in order:
        row = []
        for ranges, after in steps(state):
            if after not in number:
                if len(order) == most_states:
                    return None
                number[after] = len(order)
                order.append(after)
            row.append((ranges, number[after]))
        edges.append(row)
    return CharAutomaton(*_trimmed(edges, [final(state) for state in order]))


def _trimmed(
    edges: list[list[tuple[Ranges, int]]], final: list[bool]
) -> tuple[list[list[tuple[Ranges, int]]], list[bool]]:
    """The automaton without the states from which no final state can be reached."""
    successors = [[after for _, after in row] for row in edges]
    alive = _alive(successors, (state for state, ends in enumerate(final) if ends))
    if 0 not in alive:
        return [], []
    number = {state: i for i, state in enumerate(sorted(alive))}
    kept = [[(ranges, number[after]) for ranges, after in edges[state] if after in alive] for state in number]
    return kept, [final[state] for state in number]


def _alive(successors: Sequence[Iterable[int]], final: Iterable[int]) -> set[int]:
    """The states from which a final state can be reached. ``successors[s]`` are the next states of state
    s."""
    sources: list[list[int]] = [[] for _ in successors]
    for state, row in enumerate(successors):
        for after in row:
            sources[after].append(state)
    alive = set(final)
    queue = list(alive)
    while queue:
        for source in sources[queue.pop()]:
            if source not in alive:
                alive.add(source)
                queue.append(source)
    return alive


def minimal(automaton: CharAutomaton) -> CharAutomaton:
    """The automaton with equivalent states merged (Moore's partition refinement)."""
    edges, final = automaton.edges, automaton.final
    if not edges:
        return automaton
    # after[s, c] is the state to which the characters of class c lead from state s, or -1 for none.
    classes, count = _classes(list({ranges for row in edges for ranges, _ in row}))
    after = np.full((len(edges), count), -1)
    for state, row in enumerate(edges):
        for ranges, target in row:
            after[state, classes[ranges]] = target
    block = np.array([*final, -1])  # the block of each state; index -1 is that of no state
    blocks = 0
    while True:
        rows = np.ascontiguousarray(np.column_stack([block[:-1], block[after]]))
        _, first, found = np.unique(
            rows.view(np.dtype((np.void, rows.strides[0]))), return_index=True, return_inverse=True
        )
        block[:-1] = found.ravel()
        if len(first) == blocks:
            break
        blocks = len(first)
    order = np.argsort(first)  # the block of state 0 becomes state 0
    number = np.argsort(order)[block[:-1]].tolist()
    merged = []
    for state in first[order].tolist():
        spans: dict[int, list[Ranges]] = {}
        for ranges, target in edges[state]:
            spans.setdefault(number[target], []).append(ranges)
        merged.append([(_joined(pieces), target) for target, pieces in spans.items()])
    return CharAutomaton(merged, [final[state] for state in first[order].tolist()])


def _classes(sets: list[Ranges]) -> tuple[dict[Ranges, np.ndarray], int]:
    """Divide characters into classes, and return the numbers of the classes in each of `sets`, and the number
    of classes.

    Characters belong to one class if they are in the same sets.
    """
    cuts = sorted({cut for ranges in sets for low, high in ranges for cut in (low, high + 1)})
    place = {cut: i for i, cut in enumerate(cuts)}
    inside = np.zeros((len(cuts), len(sets)), np.bool_)
    for i, ranges in enumerate(sets):
        for low, high in ranges:
            inside[place[low] : place[high + 1], i] = True
    kinds, kind = np.unique(inside, axis=0, return_inverse=True)
    return {ranges: np.unique(kind[inside[:, i]]) for i, ranges in enumerate(sets)}, len(kinds)


def _joined(pieces: list[Ranges]) -> Ranges:
    return pieces[0] if len(pieces) == 1 else normal_ranges(itertools.chain.from_iterable(pieces))
