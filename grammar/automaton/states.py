"""The states of a pushdown automaton over characters, by subset construction with calls.

A state is a set of positions. Where the first bytes of a called rule are distinct from those of everything
else in the state, there is a call: the rule is read from its own start state, and then the state after the
call. Elsewhere the rule is inlined by one level of calls. A rule ends at a character that it cannot go on
with; where that character could also follow the rule, the rule is inlined as well. So one state and one stack
suffice: the automaton is deterministic. With `nondeterministic`, recursive rules and rules with unique items
are always called instead.

With ``root ::= "x" | list`` and ``list ::= "[" list "]" | "y"``, state 0 reads "x" and calls `list` on "["
and "y". With ``root ::= "[x" | list`` both begin with "[": `list` is inlined in state 0, and "[" leads to a
state that reads "x" or calls `list`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ramify.grammar.automaton.char_sets import first_byte
from ramify.grammar.automaton.positions import END, MARK, Position, Positions, TooLarge
from ramify.grammar.rules.expression import Ranges, normal_ranges

MOST_INLINED = 100
"""Most levels of calls that are inlined in one state: a rule that needs more begins with a call of itself."""

MOST_POSITIONS = 150_000
POSITIONS_PER_STATE = 3
"""Most positions in all states together, plus POSITIONS_PER_STATE for each state allowed. States have few
positions on average, but alternatives that are read side by side for long let their number grow without
end."""


class CharEdge(NamedTuple):
    """Leads to `target` on a character in the mask `ascii` (128 bits) or in the ranges `high`."""

    ascii: int
    high: Ranges
    target: int


class CallEdge(NamedTuple):
    """On a first byte in the mask `first` (256 bits), push `after` and read the byte from `start`."""

    first: int
    start: int
    after: int
    rule: str


class States:
    """All states that are reachable from the start of the rule `root`, which is state 0.

    `edges[s]`, `calls[s]` and `final[s]` belong to state s; `after_item[s]` says that a unique item has just
    ended. Raises `TooLarge` beyond `most_states`.
    """

    def __init__(
        self, positions: Positions, root: str, most_states: int, nondeterministic: bool = False
    ) -> None:
        self._positions = positions
        self._nondeterministic = nondeterministic
        self._most_states = most_states
        self._positions_left = MOST_POSITIONS + POSITIONS_PER_STATE * most_states
        self._number: dict[frozenset[int], int] = {}
        self._keys: list[frozenset[int]] = []
        self._inline: dict[int, set[str]] = {}
        self._expanded: set[int] = set()
        self.edges: list[list[CharEdge]] = []
        self.calls: list[list[CallEdge]] = []
        self.final: list[bool] = []
        self.after_item: list[bool] = []
        self._state(positions.start(root))
        self._expand_from(0)
        while conflicts := self._conflicts():
            before = len(self._keys)
            for state, rule in conflicts:
                self._inline.setdefault(state, set()).add(rule)
            for state in {state for state, _ in conflicts}:
                self._expand(state)
            self._expand_from(before)

    def _state(self, key: frozenset[int]) -> int:
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._keys)
            if number >= self._most_states:
                raise TooLarge
            self._keys.append(key)
            self.final.append(END in key)
            self.after_item.append(MARK in key)
            self.edges.append([])
            self.calls.append([])
        return number

    def _expand_from(self, state: int) -> None:
        while state < len(self._keys):
            if state not in self._expanded:
                self._expand(state)
            state += 1

    # --- edges ------------------------------------------------------------------------------------

    def _expand(self, state: int) -> None:
        self._expanded.add(state)
        key = self._keys[state]
        table = self._positions.table
        if len(key) == 1:
            (number,) = key
            position = table[number]
            if position.text:
                self.edges[state] = [self._text_edge(number, position)]
                return
        parts, calls, linked = self._without_conflicts(state, key)
        self.calls[state] = [
            CallEdge(
                self._positions.first(rule),
                self._state(self._positions.start(rule)),
                self._state(self._after_call(rule, afters)),
                rule,
            )
            for rule, afters in calls.items()
        ]
        self.edges[state] = self._char_edges(parts, linked)

    def _linked_state(self, key: frozenset[int]) -> int | None:
        """The state of `key`, or None if it calls rules."""
        state = self._state(key)
        if state not in self._expanded:
            self._expand(state)
        return None if self.calls[state] else state

    def _after_call(self, rule: str, afters: list[int]) -> frozenset[int]:
        after = self._positions.union([self._positions.closure(after) for after in afters])
        return after | {MARK} if rule in self._positions.item_rules else after

    def _text_edge(self, number: int, position: Position) -> CharEdge:
        char = ord(position.text[position.at])
        target = self._state(self._positions.after_char(number))
        return CharEdge(1 << char, (), target) if char < 0x80 else CharEdge(0, ((char, char),), target)

    def _without_conflicts(
        self, state: int, key: frozenset[int]
    ) -> tuple[list[int], dict[str, list[int]], dict[int, None]]:
        """The contents of `key` with calls inlined until first bytes tell the rest apart.

        Returns the positions of characters; the continuations of the calls that remain, by rule; and the
        states of linked positions, whose edges are to be joined with those of the positions.
        """
        table = self._positions.table
        always = self._inline.get(state, ())
        parts: dict[int, None] = {}
        calls: dict[str, list[int]] = {}
        linked: dict[int, None] = {}
        first = 0
        pending = list(key)
        for _ in range(MOST_INLINED):
            self._positions_left -= len(pending)
            if self._positions_left < 0:
                break
            for number in pending:  # grows while it is read
                position = table[number]
                if position.linked is not None:
                    beside = self._linked_state(position.linked)
                    if beside is None:
                        pending += position.linked
                    elif beside not in linked:
                        linked[beside] = None
                        first |= self._first(beside)
                elif position.rule:
                    known = calls.setdefault(position.rule, [])
                    if position.after not in known:
                        known.append(position.after)
                elif number not in parts and number > MARK:
                    parts[number] = None
                    first |= _first_of(position)
            if not calls:
                return list(parts), calls, linked
            once, twice = first, 0
            for rule in calls:
                mask = self._positions.first(rule)
                twice |= once & mask
                once |= mask
            doubtful = [
                rule
                for rule in calls
                if not self._is_always_called(rule)
                and (rule in always or twice & self._positions.first(rule))
            ]
            if not doubtful:
                return list(parts), calls, linked
            pending = [
                number
                for rule in doubtful
                for after in calls.pop(rule)
                for number in self._positions.inlined(rule, after)
            ]
        raise TooLarge

    def _is_always_called(self, rule: str) -> bool:
        """`rule` is called whatever else may be read there."""
        return self._nondeterministic and self._positions.is_called_always(rule)

    def _char_edges(self, parts: list[int], linked: Collection[int]) -> list[CharEdge]:
        """The edges for the positions `parts`, none of them a call, and for the edges of the states
        `linked`."""
        positions = self._positions
        ascii_parts: list[tuple[int, frozenset[int]]] = []
        high_parts: list[tuple[Ranges, frozenset[int]]] = []
        letters: dict[int, list[frozenset[int]]] = {}
        for number in parts:
            position = positions.table[number]
            after = positions.after_char(number)
            if position.chars is None:
                letters.setdefault(ord(position.text[position.at]), []).append(after)
                continue
            if position.chars.ascii:
                ascii_parts.append((position.chars.ascii, after))
            if position.chars.high:
                high_parts.append((position.chars.high, after))
        high_parts += [
            (((char, char),), positions.union(afters)) for char, afters in letters.items() if char >= 0x80
        ]
        ascii_classes = [(1 << char, afters) for char, afters in letters.items() if char < 0x80]
        if linked:
            ascii_parts += [(mask, positions.union(afters)) for mask, afters in ascii_classes]
            edges = [[(edge, positions.linked(self._keys[edge.target])) for edge in self.edges[beside]]
                     for beside in linked]  # fmt: skip
            # The edges of a linked state, often many, are disjoint already.
            ascii_classes = [(edge.ascii, [after]) for edge, after in edges[0] if edge.ascii]
            ascii_parts += [(edge.ascii, after) for row in edges[1:] for edge, after in row if edge.ascii]
            high_parts += [(edge.high, after) for row in edges for edge, after in row if edge.high]
        return self._joined_edges(_refined(ascii_classes, ascii_parts), _swept(high_parts))

    def _joined_edges(
        self,
        ascii_classes: list[tuple[int, list[frozenset[int]]]],
        high_classes: list[tuple[Ranges, list[frozenset[int]]]],
    ) -> list[CharEdge]:
        masks: dict[frozenset[int], int] = {}
        for mask, sets in ascii_classes:
            after = self._positions.union(sets)
            masks[after] = masks.get(after, 0) | mask
        highs: dict[frozenset[int], list[Ranges]] = {}
        for ranges, sets in high_classes:
            highs.setdefault(self._positions.union(sets), []).append(ranges)
        return [
            CharEdge(masks.get(after, 0), _joined(highs.get(after, ())), self._state(after))
            for after in dict.fromkeys((*masks, *highs))
        ]

    # --- ends -------------------------------------------------------------------------------------

    def _conflicts(self) -> list[tuple[int, str]]:
        """(state, rule) of each call that a next byte could both continue and follow."""
        going_on = self._going_on()
        if not going_on:
            return []
        return [
            (state, call.rule)
            for state, calls in enumerate(self.calls)
            for call in calls
            if not self._is_always_called(call.rule) and self._goes_on(call, going_on.get(call.start, 0))
        ]

    def _goes_on(self, call: CallEdge, going_on: int) -> bool:
        """Some of the bytes `going_on`, with which the called rule can go on, can also follow it."""
        following = going_on & self._first(call.after)
        counting = self._positions.counting
        if not following or call.rule not in counting.greedy:
            return bool(following)
        return not counting.allows(
            call.rule, following, {other.rule: other.first for other in self.calls[call.after]}
        )

    def _going_on(self) -> dict[int, int]:
        """By state from which a final state that can read on is reachable, the mask of bytes that it can
        read."""
        found = {
            state: self._first(state)
            for state, ends in enumerate(self.final)
            if ends and (self.edges[state] or self.calls[state])
        }
        if not found:
            return {}
        sources: list[list[int]] = [[] for _ in self._keys]
        for state, (edges, calls) in enumerate(zip(self.edges, self.calls, strict=True)):
            for edge in edges:
                sources[edge.target].append(state)
            for call in calls:
                sources[call.after].append(state)
                if self.final[call.after]:
                    sources[call.start].append(state)
        queue = list(found)
        while queue:
            state = queue.pop()
            for source in sources[state]:
                joined = found.get(source, 0) | found[state]
                if joined != found.get(source, 0):
                    found[source] = joined
                    queue.append(source)
        return found

    def _first(self, state: int) -> int:
        mask = 0
        for edge in self.edges[state]:
            mask |= edge.ascii
            for low, high in edge.high:
                mask |= _lead_bytes(low, high)
        for call in self.calls[state]:
            mask |= call.first
        return mask


def _joined(pieces: Sequence[Ranges]) -> Ranges:
    if len(pieces) > 1:
        return normal_ranges(span for ranges in pieces for span in ranges)
    return pieces[0] if pieces else ()


def _first_of(position: Position) -> int:
    return position.chars.first if position.chars else 1 << first_byte(position.text[position.at])


def _lead_bytes(low: int, high: int) -> int:
    first, last = first_byte(chr(low)), first_byte(chr(high))
    return (1 << (last + 1)) - (1 << first)


def _refined(
    disjoint: list[tuple[int, list[frozenset[int]]]], parts: list[tuple[int, frozenset[int]]]
) -> list[tuple[int, list[frozenset[int]]]]:
    """Disjoint masks, each with all that follows it, from `disjoint`, already disjoint masks, and `parts`."""
    classes = disjoint
    for mask, after in parts:
        split: list[tuple[int, list[frozenset[int]]]] = []
        for known, sets in classes:
            both = known & mask
            if not both:
                split.append((known, sets))
                continue
            split.append((both, [*sets, after]))
            if known != both:
                split.append((known & ~both, sets))
            mask &= ~both
        if mask:
            split.append((mask, [after]))
        classes = split
    return classes


def _swept(parts: list[tuple[Ranges, frozenset[int]]]) -> list[tuple[Ranges, list[frozenset[int]]]]:
    """Disjoint ranges, each with all that follows it, by a sweep over the ends of the ranges in `parts`."""
    if len(parts) < 2:
        return [(ranges, [after]) for ranges, after in parts]
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for i, (ranges, _) in enumerate(parts):
        for low, high in ranges:
            opening.setdefault(low, []).append(i)
            closing.setdefault(high + 1, []).append(i)
    found: list[tuple[Ranges, list[frozenset[int]]]] = []
    live: dict[int, None] = {}
    for begin, end in itertools.pairwise(sorted(opening.keys() | closing.keys())):
        for i in closing.get(begin, ()):
            del live[i]
        live.update(dict.fromkeys(opening.get(begin, ())))
        if live:
            found.append((((begin, end - 1),), [parts[i][1] for i in live]))
    return found
