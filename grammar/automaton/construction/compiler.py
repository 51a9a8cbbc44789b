"""Compiling rules to a pushdown automaton: which rules are called, and the steps in order.

A rule that calls itself in any place but the last must be called with a stack. A large rule that is used
several times is called as well, so that its states exist once. All other rules are inlined: their states
become states of the caller. Inlining costs nothing at run time and never makes the automaton
nondeterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction import byte_edges, costs, pruning
from ramify.grammar.automaton.construction.completions import CompletionGraph
from ramify.grammar.automaton.construction.counted import SHORT, longest_repetition
from ramify.grammar.automaton.construction.nodes import (
    Mark,
    NotCounted,
    TooLarge,
    ends_object,
    flatten,
    remembers,
)
from ramify.grammar.automaton.construction.runs import runs
from ramify.grammar.automaton.construction.subset_construction import construct
from ramify.grammar.automaton.construction.unique_items import unique_item_tables
from ramify.grammar.automaton.masks.token_trie import token_trie
from ramify.grammar.automaton.pushdown import Arrays, PushdownAutomaton, packed_arrays
from ramify.grammar.rules.expression import (
    Accepted,
    Alt,
    Call,
    Expression,
    Repeat,
    Seq,
    Text,
    UniqueItem,
    parts_of,
)
from ramify.grammar.rules.rule_set import ROOT, components
from ramify.grammar.vocabulary import Vocabulary

MAX_STATES = 100_000
"""Most states over characters. An automaton with that many states takes a few seconds to build, and 10 MB. A
string of at most n characters takes n states."""

MAX_UNCALLED_STATES = 250_000
"""Most states of a grammar without recursion, unique items and objects whose members come in any order. A
grammar with more states is refused, because it has no nondeterministic automaton to fall back on."""

LONGEST_UNCOUNTED = 4096
"""Most repetitions that are written out, with one state each, in a grammar whose repetitions cannot be
counted by rules."""

MOST_POSITIONS = 4_000_000
POSITIONS_PER_STATE = 3
"""Limit of the positions in all states together: MOST_POSITIONS, plus POSITIONS_PER_STATE for each state that
is allowed. States have few positions on average. Alternatives that are read side by side for long can make
the number of positions grow without end."""

CALLED_SIZE = 8
CALLED_SAVING = 24
"""Thresholds for calling a rule: a rule of at least CALLED_SIZE states is called if that saves at least
CALLED_SAVING states."""


Called = tuple[set[str], frozenset[str]]
"""The rules that are called, and those of them that are recursive."""


def compile_rules(
    rules: Mapping[str, Expression],
    vocabulary: Vocabulary,
    most_states: int = MAX_STATES,
    *,
    nondeterministic: bool = False,
    counting: bool = False,
    called: Called | None = None,
) -> PushdownAutomaton:
    """The automaton of the rule ``root`` over the bytes that `vocabulary` can spell.

    `called` is the result of `called_rules`; None computes it. With `counting`, long repetitions become rules
    (`counted`); the automaton must then be deterministic and have no unique items.

    The automaton is deterministic unless `nondeterministic` is True. Raises `TooLarge` if it takes more than
    `most_states` states over characters, `NotCounted` if a repetition cannot be counted by rules, and
    `InvalidConstraint` if `vocabulary` can spell no text of the grammar.
    """
    nodes, atoms, marks = flatten(rules, *(called or called_rules(rules)), counting=counting)
    most_positions = MOST_POSITIONS + POSITIONS_PER_STATE * most_states
    states = construct(nodes, most_states, most_positions, nondeterministic=nondeterministic)
    edges = byte_edges.to_bytes(states, atoms, nodes.rules["body"], vocabulary.spelled_bytes)
    return compile_edges(edges, vocabulary, marks, nondeterministic=nondeterministic)


def compile_edges(
    edges: byte_edges.Edges,
    vocabulary: Vocabulary,
    marks: Mapping[int, Mark] = MappingProxyType({}),
    *,
    nondeterministic: bool = False,
) -> PushdownAutomaton:
    """The automaton with these edges. `marks` gives the mark for each number in `edges.mark`. Raises
    `TooLarge` and `InvalidConstraint` as `compile_rules` does."""
    length, _ = costs.shortest(edges)
    if length[0] >= costs.UNREACHABLE:
        raise InvalidConstraint("No text that this model's tokenizer can spell satisfies the constraint.")
    return _finished(pruning.pruned(edges, length), marks, vocabulary, nondeterministic)


def compile_grammar(
    rules: Mapping[str, Expression], vocabulary: Vocabulary, *, counting: bool = True
) -> PushdownAutomaton:
    """The automaton of `rules`: nondeterministic if there is no deterministic one, or if members of objects
    come in any order.

    With `counting`, raises `NotCounted` if a repetition of more than `LONGEST_UNCOUNTED` cannot be counted by
    rules. The caller may then lower the maximum length of strings. Raises also what `compile_rules` raises,
    and `InvalidConstraint` if unique items cannot be told from other text that may come in their place.
    """
    called = called_rules(rules)
    recursive = called[1]
    unique = any(body.has_unique_items for body in rules.values())
    in_any_order = any(map(ends_object, rules.values()))
    may_be_nondeterministic = bool(recursive) or unique or in_any_order
    most_states = MAX_STATES if may_be_nondeterministic else MAX_UNCALLED_STATES
    longest = max(map(longest_repetition, rules.values()))
    if counting and longest > SHORT:
        try:
            if not unique and not in_any_order:
                return compile_rules(rules, vocabulary, most_states, counting=True, called=called)
        except TooLarge:
            pass
        if longest > LONGEST_UNCOUNTED:
            raise NotCounted
    if longest > most_states:
        raise TooLarge
    if not in_any_order:  # with registers, the matcher always follows several configurations
        try:
            return compile_rules(rules, vocabulary, most_states, called=called)
        except TooLarge:
            if not may_be_nondeterministic:
                raise
    try:
        return compile_rules(rules, vocabulary, nondeterministic=True, called=called)
    except TooLarge:
        if not unique:
            raise
    raise InvalidConstraint(
        "Texts that must differ cannot be told from what else may come there.",
        remedy="Leave uniqueItems out, or make the options that hold it begin differently.",
    )


def _finished(
    edges: byte_edges.Edges, marks: Mapping[int, Mark], vocabulary: Vocabulary, nondeterministic: bool
) -> PushdownAutomaton:
    graph = CompletionGraph(edges, marks) if marks else None
    whole = edges if graph is None else graph.edges
    length, best = costs.shortest(whole)
    if graph is not None:
        graph.check(length)
    border = whole.after_item if graph is None else graph.border
    order = np.argsort(length, kind="stable").astype(np.int32)
    order = order[length[order] < costs.UNREACHABLE]
    trie = token_trie(vocabulary)
    cost = costs.token_costs(trie.whole, trie.first_node, whole, best, order, length, border)
    before_item = np.zeros(len(cost), np.bool_)
    items = None
    if edges.after_item.any():
        tables = unique_item_tables(whole, length, best)
        if tables.words_missing:
            raise InvalidConstraint(
                "There are fewer different items, as they are written, than minItems asks for beside "
                "uniqueItems, or names than minProperties.",
                remedy="Lower minItems or minProperties, or name more properties of the items: objects in "
                "arrays of unique items have their named properties only.",
            )
        before_item, items = tables.before, tables.items.of_first(len(edges.final))
        cost += tables.extra
    members = None
    if graph is not None:
        members = graph.members(cost)
        edges, cost, before_item = graph.cut(edges, cost, before_item)
    run, run_kind, run_cost = runs(edges, cost)
    run[before_item] = 0
    if graph is not None:
        run[graph.in_names & (run_kind > 0)] = 0
    arrays = Arrays(*edges[:6], run, run_kind, run_cost, cost, edges.after_item, before_item)
    return PushdownAutomaton(packed_arrays(arrays), _most_pushed(edges), items, members, nondeterministic)


def _most_pushed(edges: byte_edges.Edges) -> int:
    """Most states that are pushed before one byte is read. Raises `TooLarge` if a rule begins with a call of
    itself."""
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
    """The rules that are called instead of inlined, and those of them that are recursive."""
    component = components(rules)
    members: dict[str, list[str]] = {}
    for name in component:  # a rule comes after the rules that it calls
        members.setdefault(component[name], []).append(name)
    inner_calls: dict[str, Counter[str]] = {name: Counter() for name in rules}
    last_calls: dict[str, set[str]] = {name: set() for name in rules}
    for name, body in rules.items():
        _count_calls(body, 1, True, inner_calls[name], last_calls[name])
    called = {
        inner for name, calls in inner_calls.items() for inner in calls if component[name] == component[inner]
    }
    recursive = frozenset(called)
    called |= {name for name, body in rules.items() if remembers(body)}
    sizes: dict[str, int] = {}
    for names in members.values():
        sizes.update((name, 1 if name in called else 0) for name in names)
        whole = min(_MANY, sum(_states(rules[name], sizes) for name in names))
        sizes.update((name, whole) for name in names if name not in called)
    # `places`: by component, the distinct continuations of its rules. It would be inlined once for each.
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
"""Number of uses at which every rule of at least CALLED_SIZE states is called."""


def _worth_calling(body: Expression, states: int, times: int) -> bool:
    # A repetition is inlined, so that `runs` finds the characters that repeat.
    return states >= CALLED_SIZE and (times - 1) * states >= CALLED_SAVING and not isinstance(body, Repeat)


def _count_calls(
    expression: Expression, times: int, last: bool, inner_calls: Counter[str], last_calls: set[str]
) -> None:
    """Add the rules that `expression` calls at its end to `last_calls` if `last` is True. Add the number of
    all other calls, `times` each with repetitions written out, to `inner_calls`."""
    if expression.is_regular:
        return
    kind = type(expression)
    if kind is Call:
        if last:
            last_calls.add(expression.rule)  # type: ignore[union-attr]
        else:
            inner_calls[expression.rule] += times  # type: ignore[union-attr]
    elif kind is Seq:
        *parts, end = expression.parts  # type: ignore[union-attr]
        for part in parts:
            _count_calls(part, times, False, inner_calls, last_calls)
        _count_calls(end, times, last, inner_calls, last_calls)
    elif kind is Alt:
        for option in expression.options:  # type: ignore[union-attr]
            _count_calls(option, times, last, inner_calls, last_calls)
    elif kind is UniqueItem:
        _count_calls(expression.item, times, False, inner_calls, last_calls)  # type: ignore[union-attr]
    elif isinstance(expression, Repeat):
        times = min(_MANY, times * max(1, expression.low, expression.high or 0))
        _count_calls(expression.item, times, last and expression.high == 1, inner_calls, last_calls)


def _states(expression: Expression, sizes: Mapping[str, int]) -> int:
    """Approximate number of states of `expression`; `sizes` has the number of states of each rule."""
    kind = type(expression)
    if kind is Call:
        return sizes[expression.rule]  # type: ignore[union-attr]
    if kind is Text:
        return len(expression.text)  # type: ignore[union-attr]
    if kind is Seq or kind is Alt:
        found = 0
        for part in parts_of(expression):
            found += _states(part, sizes)
        return found
    match expression:
        case Repeat(item, low, high):
            return min(_MANY, _states(item, sizes) * max(1, low, high or 0))
        case Accepted(automaton):
            return len(automaton.edges)
        case UniqueItem(item):
            return _states(item, sizes)
    return 1
