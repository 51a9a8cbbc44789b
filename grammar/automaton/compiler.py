"""Grammars as deterministic pushdown automata: which rules are called, and the way to the packed form.

A rule that calls itself in another place than the last must be called, with a stack; a large one that is
used several times is called so that its states are there once. All others are read in their caller's
place, which costs nothing at run time and is never in doubt.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ramify.errors import InvalidConstraint
from ramify.grammar.automaton import byte_edges, costs, pruning
from ramify.grammar.automaton.positions import Positions, TooLarge, holds_fresh
from ramify.grammar.automaton.pushdown import Frames
from ramify.grammar.automaton.runs import runs
from ramify.grammar.automaton.states import States
from ramify.grammar.automaton.token_trie import token_trie
from ramify.grammar.automaton.unique_items import fresh_tables
from ramify.grammar.rules.expression import Alt, Call, Chars, Expression, Repeat, Seq, Text, UniqueText
from ramify.grammar.rules.rule_set import ROOT, components
from ramify.grammar.vocabulary import Vocabulary

MAX_STATES = 100_000
"""Most states, over characters, of a grammar: a few seconds to build, and ten megabytes. Counting the
characters of a string of up to n of them takes n states."""

MAX_UNCALLED_STATES = 250_000
"""The same where no rule calls itself, and nothing else can be tried: a text of so many characters."""

CALLED_SIZE = 8
CALLED_SAVING = 24
"""A rule of so many states is called where that saves so many."""


def compile_rules(
    rules: Mapping[str, Expression],
    vocabulary: Vocabulary,
    most_states: int = MAX_STATES,
    *,
    forks: bool = False,
) -> Frames:
    """The automaton of the rule ``root`` over the bytes that `vocabulary` can spell.

    Raises `TooLarge` where `rules` have no deterministic automaton of at most `most_states` states over
    characters (with `forks`: none at all that is so small), `InvalidConstraint` where no text that can be
    spelled satisfies them.
    """
    with _without_collecting():
        return _compiled(rules, vocabulary, most_states, forks)


def compile_grammar(rules: Mapping[str, Expression], vocabulary: Vocabulary) -> Frames:
    """A deterministic automaton, or where there is none one that forks. Raises as `compile_rules` does, and
    `InvalidConstraint` where it is not clear of which `Fresh` a text would be."""
    _, recursive = called_rules(rules)
    remembers = any(map(holds_fresh, rules.values()))
    may_fork = recursive or remembers
    try:
        return compile_rules(rules, vocabulary, MAX_STATES if may_fork else MAX_UNCALLED_STATES)
    except TooLarge:
        if not may_fork:
            raise
    try:
        return compile_rules(rules, vocabulary, forks=True)
    except TooLarge:
        if not remembers:
            raise
    raise InvalidConstraint(
        "Texts that must differ cannot be told from what else may come there.",
        remedy="Leave uniqueItems out, or make the options that hold it begin differently.",
    )


@contextmanager
def _without_collecting() -> Iterator[None]:
    # Hundreds of thousands of objects come up, none of them in cycles; looking for these takes a third of
    # the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _compiled(
    rules: Mapping[str, Expression], vocabulary: Vocabulary, most_states: int, forks: bool
) -> Frames:
    positions = Positions(rules, *called_rules(rules))
    edges = byte_edges.to_bytes(States(positions, ROOT, most_states, forks), vocabulary.spelled_bytes)
    length, _ = costs.shortest(edges.offsets, edges.target, edges.push, edges.final)
    if length[0] >= costs.UNREACHABLE:
        raise InvalidConstraint("No text that this model's tokenizer can spell satisfies the constraint.")
    return _finished(pruning.pruned(edges, length), vocabulary, forks)


def _finished(edges: byte_edges.Edges, vocabulary: Vocabulary, forks: bool) -> Frames:
    length, best = costs.shortest(edges.offsets, edges.target, edges.push, edges.final)
    cost, token = token_trie(vocabulary).completions(edges, length, best)
    before_fresh = np.zeros(len(cost), np.bool_)
    items = None
    if edges.fresh.any():
        tables = fresh_tables(edges, length, best)
        if tables.words_missing:
            raise InvalidConstraint("There are not enough different texts for all that must differ.")
        before_fresh, items = tables.before, tables.items
        cost += tables.extra
    run, run_kind, run_cost = runs(edges, cost)
    run[before_fresh] = 0
    arrays = {
        "offsets": edges.offsets,
        "low": edges.low,
        "high": edges.high,
        "target": edges.target,
        "push": edges.push,
        "final": edges.final,
        "run": run,
        "run_kind": run_kind,
        "cost": cost,
        "token": token,
        "run_cost": run_cost,
        "fresh": edges.fresh,
        "before_fresh": before_fresh,
    }
    return Frames(arrays, _most_pushed(edges), items, forks)


def _most_pushed(edges: byte_edges.Edges) -> int:
    """States that are pushed for one byte at most. Raises `TooLarge` where a rule begins with itself."""
    deepest: dict[int, int] = {}
    calling = np.repeat(np.arange(len(edges.final)), np.diff(edges.offsets))
    calls: dict[int, list[tuple[int, int]]] = {}
    for edge in np.flatnonzero(edges.target < 0).tolist():
        pushed = int(edges.push[edge] >= 0)
        calls.setdefault(int(calling[edge]), []).append((int(~edges.target[edge]), pushed))
    consuming = int(bool((edges.push[edges.target >= 0] >= 0).any()))

    def depth(state: int, path: tuple[int, ...]) -> int:
        if state in path or len(path) > 200:
            raise TooLarge
        if state not in deepest:
            inner = [pushed + depth(start, (*path, state)) for start, pushed in calls.get(state, ())]
            deepest[state] = max(inner, default=0)
        return deepest[state]

    return max((depth(state, ()) for state in calls), default=0) + consuming


# --- which rules are called ---------------------------------------------------------------------------


def called_rules(rules: Mapping[str, Expression]) -> tuple[set[str], frozenset[str]]:
    """The rules that are called, not read in their caller's place; and which of them call themselves."""
    component = components(rules)
    members: dict[str, list[str]] = {}
    for name in component:  # what is called comes before what calls it
        members.setdefault(component[name], []).append(name)
    inner_calls = {name: _inner_calls(body) for name, body in rules.items()}
    last_calls = {name: _last_calls(body) for name, body in rules.items()}
    called = {
        inner for name, calls in inner_calls.items() for inner in calls if component[name] == component[inner]
    }
    recursive = frozenset(called)
    called |= {name for name, body in rules.items() if holds_fresh(body)}
    sizes: dict[str, int] = {}
    for names in members.values():
        sizes.update((name, 1 if name in called else 0) for name in names)
        whole = min(_MANY, sum(_states(rules[name], sizes) for name in names))
        sizes.update((name, whole) for name in names if name not in called)
    # Each member of `places` is something else that comes after the rule: so often it would be there.
    places: dict[str, set[object]] = {name: set() for name in members}
    places[component[ROOT]].add(ROOT)
    for part, names in reversed(members.items()):
        for name in names:
            if len(names) == 1 and _worth_calling(rules[name], sizes[name], len(places[part])):
                called.add(name)
            here: set[object] = {name} if name in called else places[part]
            for inner in last_calls[name]:
                if component[inner] != part:
                    places[component[inner]] |= here
            for inner, count in inner_calls[name].items():
                if component[inner] != part:
                    times = min(_ENOUGH, count * len(here))
                    places[component[inner]].update((name, inner, i) for i in range(times))
    return called, recursive


_MANY = 1 << 20
_ENOUGH = 1 + CALLED_SAVING // CALLED_SIZE
"""Uses beyond which it makes no difference how many there are."""


def _worth_calling(body: Expression, states: int, times: int) -> bool:
    # A repetition is left in its place, so that the characters that go round in it are seen there.
    return states >= CALLED_SIZE and (times - 1) * states >= CALLED_SAVING and not isinstance(body, Repeat)


def _last_calls(expression: Expression) -> set[str]:
    """The rules called in the last place."""
    if expression.is_regular:
        return set()
    match expression:
        case Call(rule):
            return {rule}
        case Seq(parts) if parts:
            return _last_calls(parts[-1])
        case Alt(options):
            return {rule for option in options for rule in _last_calls(option)}
        case Repeat(item, _, 1):
            return _last_calls(item)
    return set()


def _inner_calls(expression: Expression, times: int = 1, last: bool = True) -> dict[str, int]:
    """How often each rule is called in other places, with repetitions written out."""
    if expression.is_regular:
        return {}
    found: dict[str, int] = {}
    match expression:
        case Call(rule):
            return {} if last else {rule: times}
        case Seq(parts):
            inner = [(part, last and i == len(parts) - 1, times) for i, part in enumerate(parts)]
        case Alt(options):
            inner = [(option, last, times) for option in options]
        case Repeat(item, low, high):
            inner = [(item, last and high == 1, min(_MANY, times * max(1, low, high or 0)))]
        case UniqueText(item):
            inner = [(item, False, times)]
        case _:
            return {}
    for part, is_last, count in inner:
        if not isinstance(part, Text | Chars):
            for rule, more in _inner_calls(part, count, is_last).items():
                found[rule] = min(_MANY, found.get(rule, 0) + more)
    return found


def _states(expression: Expression, sizes: Mapping[str, int]) -> int:
    """About how many states `expression` takes, where its calls take `sizes`."""
    match expression:
        case Call(rule):
            return sizes[rule]
        case Text(literal):
            return len(literal)
        case Seq(parts) | Alt(parts):
            return sum(_states(part, sizes) for part in parts)
        case Repeat(item, low, high):
            return min(_MANY, _states(item, sizes) * max(1, low, high or 0))
        case UniqueText(item):
            return _states(item, sizes)
    return 1
