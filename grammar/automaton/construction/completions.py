"""Completions of objects whose members come in any order (`automaton.members`), as a graph with costs.

A completion is the shortest text that ends the member being read and then has each member that the object
still requires. The graph contains rules for both parts: for each way (a member whose name can still be
completed) one state for each byte of the name, and for each object a chain of the members that a complete
object needs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction.byte_edges import Edges, edges_of
from ramify.grammar.automaton.construction.costs import UNREACHABLE, shortest
from ramify.grammar.automaton.members import END, NO_LIMIT, Members
from ramify.grammar.rules.expression import UNNAMED, MemberMark, ObjectEnd

_COMMA, _OPENING, _CLOSING = b",{}"


class _Object:
    """An object of the grammar. `begins`: pairs of a start state of the object's rule and the state after the
    opening brace. `after_comma`: the state after a comma between members. `fillers`: the marks of members
    that may fill the object up to its least number of members."""

    def __init__(self, end: ObjectEnd) -> None:
        self.end = end
        self.marks: dict[int, int] = {}
        self.begins: set[tuple[int, int]] = set()
        self.after_comma = -1
        self.chain: list[int] = []
        self.fillers: list[int] = []
        self.missing_fill = max(0, end.low - len(end.required))


class CompletionGraph:
    """A graph for the computation of costs, made from the automaton `edges`. `marks` has the marks by number.
    The attribute `edges` is the graph: the states of the automaton, followed by those of ways and of complete
    objects. `border`: (states,) bool, the states to which no token returns from a called rule."""

    def __init__(self, edges: Edges, marks: Mapping[int, MemberMark | ObjectEnd]) -> None:
        self._states = len(edges.final)
        found = list(marks.values())
        index = np.full(max(marks) + 1, -1, np.int32)
        index[list(marks)] = np.arange(len(found))
        self._mark = np.where(edges.mark >= 0, index[edges.mark], np.int32(-1)).astype(np.int32)
        ends = {mark.object: mark for mark in found if isinstance(mark, ObjectEnd)}
        self._numbers = {number: i for i, number in enumerate(ends)}
        self._objects = [_Object(end) for end in ends.values()]
        self._object_of = [self._numbers[mark.object] for mark in found]
        self._number = [END if isinstance(mark, ObjectEnd) else mark.member for mark in found]
        self._find_ways(edges)
        for mark in np.unique(self._mark[self._mark >= 0]).tolist():
            self._objects[self._object_of[mark]].marks[self._number[mark]] = mark
        self._build(edges)

    # --- ways -------------------------------------------------------------------------------------------

    def _find_ways(self, edges: Edges) -> None:
        source = np.repeat(np.arange(self._states, dtype=np.int32), np.diff(edges.offsets))
        into = np.where(edges.target >= 0, self._mark[edges.target], -1)
        is_end = np.array([number == END for number in self._number], np.bool_)
        self._closing_edge = (into >= 0) & is_end[into]
        self._naming_edge = (into >= 0) & ~is_end[into]
        self._closing = np.zeros(self._states, np.bool_)
        self._closing[source[self._closing_edge]] = True
        self._source = source
        closing = self._closing.tolist()
        starts = {0, *np.unique(~edges.target[edges.target < 0]).tolist()}
        following = np.where(edges.push >= 0, edges.push, edges.target)
        following[(into >= 0) | (following < 0)] = self._states
        order = np.argsort(following, kind="stable")
        begin = np.searchsorted(following[order], np.arange(self._states + 1)).tolist()
        order_list, source_list = order.tolist(), source.tolist()
        low = edges.low.tolist()
        inner: dict[int, list[tuple[int, int]]] = {}

        def sources(state: int, owner: _Object) -> list[tuple[int, int]]:
            """(state, edge) of each predecessor of `state` from which only names can be read; the edge leads
            to `state`."""
            known = inner.get(state)
            if known is None:
                known = inner[state] = []
                for edge in order_list[begin[state] : begin[state + 1]]:
                    before = source_list[edge]
                    if before in starts:
                        owner.begins.add((before, state))
                    elif not closing[before]:
                        known.append((before, edge))
                    elif low[edge] == _COMMA:
                        owner.after_comma = state
                    else:
                        sources(before, owner)  # the object may also be empty
            return known

        # A way is a state, a mark, the edge to take, and the state or way after the edge.
        ways: list[tuple[int, int, int, int]] = []
        number: dict[tuple[int, int], int] = {}
        for edge in np.flatnonzero(self._naming_edge).tolist():
            way = (source_list[edge], int(into[edge]))
            if way not in number:
                number[way] = len(ways)
                ways.append((*way, edge, int(edges.target[edge])))
        for i, (state, mark, _, _) in enumerate(ways):  # grows while it is read
            owner = self._objects[self._object_of[mark]]
            for before, edge in sources(state, owner):
                if (before, mark) not in number:
                    number[before, mark] = len(ways)
                    ways.append((before, mark, edge, self._states + i))
        self._way_number = number
        self._ways = np.array(ways, np.int32).reshape(-1, 4)

    def _way(self, state: int, mark: int) -> int:
        """The state in the graph of the way from `state` to `mark`; a dead state where there is no such
        way."""
        number = self._way_number.get((state, mark))
        return self._dead if number is None else self._states + number

    # --- the graph --------------------------------------------------------------------------------------

    def _build(self, edges: Edges) -> None:
        state, _, edge, after = self._ways.T
        push = edges.push[edge]
        self._dead = self._states + len(state)
        self._end = self._dead + 1
        more: list[tuple[int, int, int, int, int]] = []
        count = self._end + 1
        self._members: dict[int, int] = {}
        """States, by mark, from which a comma and then the member of that mark are read."""
        for each in self._objects:
            for number, mark in each.marks.items():
                if number != END:
                    self._members[mark] = count
                    more.append((count, _COMMA, _COMMA, self._way(each.after_comma, mark), -1))
                    count += 1
            each.fillers = self._fillers(edges, each)
            each.chain = [each.marks.get(i, -1) for i in sorted(each.end.required)]
            each.chain += (each.fillers * each.missing_fill if each.end.others else each.fillers)[
                : each.missing_fill
            ]
        self._brace = count
        more.append((count, _CLOSING, _CLOSING, self._end, -1))
        count += 1
        border = [self._brace]
        for each in self._objects:
            for start, opened in each.begins:
                more.append((start, _OPENING, _OPENING, count if each.chain else self._brace, -1))
                for i, mark in enumerate(each.chain):
                    member = self._members.get(mark, self._dead) if i else self._way(opened, mark)
                    last = i == len(each.chain) - 1
                    more.append((count, 0, 255, ~member, self._brace if last else count + 1))
                    count += 1
                    border.append(count)
        border.pop()
        begins = [start for each in self._objects for start, _ in each.begins]
        is_start = np.zeros(self._states, np.bool_)
        is_start[begins] = True
        kept = ~(self._closing_edge | self._naming_edge | is_start[self._source])
        from_way = np.arange(self._states, self._dead, dtype=np.int32)
        following = np.where(push >= 0, edges.target[edge], after)
        pushed = np.where(push >= 0, after, np.int32(-1))
        rows = [
            np.column_stack([self._source, edges.low, edges.high, edges.target, edges.push])[kept],
            np.column_stack([from_way, edges.low[edge], edges.high[edge], following, pushed]),
            np.array(more, np.int32).reshape(-1, 5),
        ]
        final = np.zeros(count, np.bool_)
        final[: self._states] = edges.final | self._closing
        final[self._end] = True
        after_item = np.zeros(count, np.bool_)
        after_item[: self._states] = edges.after_item
        self.border = after_item.copy()
        self.border[border] = True
        self.edges = edges_of(np.concatenate(rows), final)._replace(after_item=after_item)

    def _fillers(self, edges: Edges, each: _Object) -> list[int]:
        """The marks of the members that may fill an object. Those with the shortest texts come first, so that
        no such member needs another object of the same kind."""
        if not each.missing_fill:
            return []
        if each.end.others:
            return [each.marks[UNNAMED]] if UNNAMED in each.marks else []
        optional = [mark for i, mark in each.marks.items() if i >= 0 and i not in each.end.required]
        length, _ = shortest(edges)
        least = {mark: int(length[self._mark == mark].min()) for mark in optional}
        return sorted(optional, key=lambda mark: (least[mark], mark))

    def check(self, length: np.ndarray) -> None:
        """Raise `InvalidConstraint` if some object cannot be completed. `length` is that of
        `costs.shortest`."""
        for each in self._objects:
            if any(length[start] >= UNREACHABLE for start, _ in each.begins):
                raise InvalidConstraint(
                    "An object whose members may come in any order cannot be completed.",
                    remedy="Leave any_order out.",
                )

    # --- tables -----------------------------------------------------------------------------------------

    def members(self, cost: np.ndarray) -> Members:
        """Tables of the objects, from the `cost` of the states of the graph."""
        states, ways = self._states, self._ways
        tokens = [0] * len(self._number)
        for mark, state in self._members.items():
            tokens[mark] = int(cost[state])
        self._way_cost = cost[states : states + len(ways)]
        self._unnamed = np.array(self._number)[ways[:, 1]] == UNNAMED
        # Unnamed members come first: without a limit on members they are always left.
        order = np.lexsort((~self._unnamed, ways[:, 0]))
        begin = np.zeros(states + 1, np.int32)
        np.cumsum(np.bincount(ways[:, 0], minlength=states), out=begin[1:])
        endless = [each.end.high is None for each in self._objects]
        always = np.zeros(states, np.int32)
        always[ways[self._unnamed & np.array(endless)[np.array(self._object_of)[ways[:, 1]]], 0]] = 1
        start = np.full(states, -1, np.int32)
        fillers = [0]
        owed, filler_number, filler_tokens = [], [], []
        for i, each in enumerate(self._objects):
            for state, _ in each.begins:
                start[state] = i
            owed.append(int(cost[self._brace]) + sum(tokens[mark] for mark in each.chain if mark >= 0))
            filler_number += [self._number[mark] for mark in each.fillers]
            filler_tokens += [tokens[mark] for mark in each.fillers]
            fillers.append(len(filler_number))
        required = [
            number >= 0 and number in self._objects[owner].end.required
            for number, owner in zip(self._number, self._object_of, strict=True)
        ]
        ends = [each.end for each in self._objects]
        return Members(
            self._mark,
            start,
            begin,
            always,
            *(
                np.array(column, np.int32)
                for column in (
                    ways[order, 1],
                    self._way_cost[order],
                    self._object_of,
                    self._number,
                    required,
                    tokens,
                    [len(end.required) for end in ends],
                    [NO_LIMIT if end.high is None else end.high for end in ends],
                    [each.missing_fill for each in self._objects],
                    owed,
                    fillers,
                    filler_number,
                    filler_tokens,
                )
            ),
        )

    def cut(
        self, edges: Edges, cost: np.ndarray, before_item: np.ndarray
    ) -> tuple[Edges, np.ndarray, np.ndarray]:
        """Remove, from `edges`, `cost` and `before_item`, the states that the graph added. The cost of a
        state with ways becomes that of its most expensive way. A run of plain characters begins only at
        states from which members without a name can be read."""
        states, ways = self._states, self._ways
        cost = cost[:states].copy()
        np.maximum.at(cost, ways[:, 0], self._way_cost)
        self.in_names = np.zeros(states, np.bool_)
        self.in_names[ways[:, 0]] = True
        named_only = self.in_names.copy()
        named_only[ways[self._unnamed, 0]] = False
        plain = edges.plain & ~named_only
        plain[edges.plain_source[named_only[edges.plain_target]]] = False
        return edges._replace(plain=plain), cost, before_item[:states]
