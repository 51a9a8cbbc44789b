"""Objects of one branch of a schema, as expressions."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from ramify.grammar.rules.expression import NOTHING, Expression, UniqueText, seq, text
from ramify.grammar.schema.json_values import Value
from ramify.grammar.schema.logic.assertions import (
    STRING,
    HasProperty,
    Matches,
    NotInEnum,
    Properties,
    PropertyCount,
    PropertyNames,
    Required,
    Types,
)
from ramify.grammar.schema.logic.formula import FALSE, TRUE, And, Formula, conjunction, negation
from ramify.grammar.schema.logic.normal_form import Disjunct, counts
from ramify.grammar.schema.unenforceable import NotCanonical, refuse
from ramify.grammar.schema.values import json_rules
from ramify.grammar.schema.values.json_rules import enclosed
from ramify.grammar.schema.values.json_text import spelled
from ramify.grammar.schema.values.object_members import Member, MemberSequence
from ramify.grammar.schema.values.scalars import keys
from ramify.grammar.schema.values.string_language import combinations
from ramify.grammar.schema.values.string_patterns import search_pattern

if TYPE_CHECKING:
    from ramify.grammar.schema.compiler import SchemaGrammar

MAX_MEMBER_COUNTS = 20_000
MAX_COUNTED = 1000
"""Most properties that are counted; an object whose maxProperties is above it has at most so many."""
MAX_WANTED = 3


class _Other(NamedTuple):
    """Properties that are not named: their names, and what their values satisfy."""

    key: Formula
    value: Formula


def objects(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    """The objects of `branch`."""
    low, high = counts(disjunct, PropertyCount)
    if high is not None and high < low:
        return grammar.define(NOTHING, "minProperties exceeds maxProperties")
    said = any(
        isinstance(assertion, Properties | PropertyNames | Required | PropertyCount | HasProperty)
        for assertion in disjunct.assertions
    )
    if not said and not grammar.canonical:
        return json_rules.OBJECT
    if high is not None:
        high = min(high, MAX_COUNTED)
    return _Object(grammar, disjunct).expression(low, high)


class _Object:
    def __init__(self, grammar: SchemaGrammar, disjunct: Disjunct) -> None:
        self._grammar = grammar
        self._test = grammar.normal_form.satisfies
        self._members: list[Properties] = disjunct.of(Properties)
        self._by_name = [dict(assertion.named) for assertion in self._members]
        self._keys = conjunction(*(assertion.key for assertion in disjunct.of(PropertyNames)))
        self._wanted: list[HasProperty] = disjunct.of(HasProperty)
        self._required = disjunct.required
        self._pointer = next(
            (
                assertion.pointer
                for assertion in disjunct.assertions
                if isinstance(assertion, PropertyCount | PropertyNames | HasProperty)
            ),
            "",
        )
        named = {name: None for known in self._by_name for name in known} | self._required
        self._names = list(named)

    def expression(self, low: int, high: int | None) -> Expression:
        if len(self._wanted) > MAX_WANTED:
            refuse(self._pointer, "So many conditions on unnamed properties are not enforced", "Use fewer.")
        members = []
        for name in self._names:
            member = self._member(name)
            if member is not None:
                members.append(member)
            elif name in self._required:
                return self._grammar.define(
                    NOTHING, f"the property {name!r} is required and cannot have a value"
                )
        if low > MAX_COUNTED or max(low, high or 0) * len(members) > MAX_MEMBER_COUNTS:
            refuse(self._pointer, "minProperties and maxProperties are too large here", "Leave them out.")
        # Where members are counted, none is to be written twice. That can be seen where all are alike.
        self._names_differ = (
            low > 1 and not members and not self._wanted and len(self._kinds_of_others()) == 1
        )
        others = self._others() if not self._grammar.canonical else self._no_others()
        braces = MemberSequence(self._grammar, members, others, len(self._wanted), low, high, self._pointer)
        filled, empty = braces.content()
        if filled == NOTHING and not empty:
            return self._grammar.define(NOTHING, "the object can have no more properties")
        return self._grammar.rules.define(enclosed("{", filled, "}", self._grammar.marks, empty=empty))

    def _member(self, name: str) -> Member | None:
        """The member called `name`; None where it cannot have a value."""
        if self._keys != TRUE and not self._test(self._keys, name):
            return None
        formula = self._goal(name)
        value = self._grammar.value(formula)
        if value == NOTHING:
            return None
        start = seq(text(spelled(name)), self._grammar.marks.colon)
        meeting = [i for i, wanted in enumerate(self._wanted) if self._test(wanted.key, name)]
        meets = self._meets(meeting, formula, start)
        return Member(seq(start, value), name in self._required, tuple(meets))

    def _meets(
        self, meeting: list[int], formula: Formula, start: Expression
    ) -> list[tuple[frozenset[int], Expression]]:
        """For each choice of wanted properties that this may be: which they are, and its text."""
        found = []
        for size in range(1, len(meeting) + 1):
            for chosen in itertools.combinations(meeting, size):
                value = self._grammar.value(conjunction(formula, *(self._wanted[i].value for i in chosen)))
                if value != NOTHING:
                    found.append((frozenset(chosen), seq(start, value)))
        return found

    def _goal(self, name: str) -> Formula:
        formulas: list[Formula] = []
        for assertion, known in zip(self._members, self._by_name, strict=True):
            own = [known[name]] if name in known else []
            own += [value for key, value in assertion.keyed if self._test(key, name)]
            formulas += own or [assertion.others]
        return conjunction(*formulas)

    # --- others -----------------------------------------------------------------------------------

    def _others(self) -> list[Member]:
        """Members that are not named."""
        unnamed = (
            conjunction(Types(STRING), NotInEnum(tuple(map(Value, self._names)))) if self._names else TRUE
        )
        found = []
        for other in self._kinds_of_others():
            value = self._grammar.value(other.value)
            if value == NOTHING:
                continue
            key = self._key(conjunction(unnamed, other.key, self._keys))
            if key == NOTHING:
                continue
            start = seq(UniqueText(key) if self._names_differ else key, self._grammar.marks.colon)
            text_of_member = seq(start, value)
            if (key, value) == (json_rules.STRING, json_rules.VALUE):
                text_of_member = json_rules.MEMBER
            meets = []
            for i, wanted in enumerate(self._wanted):
                meeting = self._key(conjunction(unnamed, other.key, self._keys, wanted.key))
                if meeting != NOTHING:
                    meets += self._meets([i], other.value, seq(meeting, self._grammar.marks.colon))
            found.append(Member(text_of_member, False, tuple(meets)))
        return found

    def _no_others(self) -> list[Member]:
        """Where each object is to have one text its properties come in one order, so there are no others."""
        if self._wanted or any(other != _Other(TRUE, TRUE) for other in self._kinds_of_others()):
            raise NotCanonical("objects with properties that are not named")
        return []

    def _kinds_of_others(self) -> list[_Other]:
        """The unnamed properties by what their values must satisfy."""
        patterns = list(dict.fromkeys(key for assertion in self._members for key, _ in assertion.keyed))
        kinds: list[_Other] = []
        for matching in self._combinations(patterns):
            formulas: list[Formula] = []
            for assertion in self._members:
                own = [value for key, value in assertion.keyed if key in matching]
                formulas += own or [assertion.others]
            formula = conjunction(*formulas)
            if formula == FALSE:
                continue
            key = conjunction(*(key if key in matching else negation(key) for key in patterns))
            kinds.append(_Other(key, formula))
        return kinds

    def _combinations(self, patterns: list[Formula]) -> list[list[Formula]]:
        """The sets of `patterns` that some name satisfies, and none of the others."""
        if not patterns:
            return [[]]
        expressions = [_pattern(key) for key in patterns]
        if all(expressions):
            found = combinations([expression for expression in expressions if expression], 5000)
            if found is not None:
                return [[patterns[i] for i in sorted(chosen)] for chosen in sorted(found, key=sorted)]
        if len(patterns) > 4:
            refuse(
                self._pointer,
                f"{len(patterns)} patterns for names that overlap are not enforced",
                "Use fewer.",
            )
        sizes = range(len(patterns) + 1)
        return [list(chosen) for size in sizes for chosen in itertools.combinations(patterns, size)]

    def _key(self, formula: Formula) -> Expression:
        if formula == TRUE and not self._names_differ:
            return json_rules.STRING
        disjuncts = self._grammar.normal_form.of(conjunction(Types(STRING), formula))
        return keys(self._grammar, disjuncts, canonical=self._names_differ)


def _pattern(key: Formula) -> Expression | None:
    """The expression of a key that is one pattern."""
    parts = key.parts if isinstance(key, And) else (key,)
    assertions = [part for part in parts if not isinstance(part, Types)]
    if len(assertions) == 1 and isinstance(assertions[0], Matches) and assertions[0].positive:
        return search_pattern(assertions[0].pointer, assertions[0].pattern).expression
    return None
