"""Expressions for the objects of one disjunct.

``{"properties": {"a": A}, "required": ["a"], "additionalProperties": B}`` becomes

    "{" "\"a\": " A (", " key ": " B)* "}"        where key is any string but "a"

`object_members` makes the expression between the braces.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ramify.grammar.rules.expression import NOTHING, Expression, UniqueItem, seq, text
from ramify.grammar.schema.document.json_values import Value
from ramify.grammar.schema.document.string_patterns import search_pattern
from ramify.grammar.schema.document.unenforceable import NotCanonical, refuse
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
from ramify.grammar.schema.logic.clauses import AnyProperty
from ramify.grammar.schema.logic.disjunct import Disjunct, counts
from ramify.grammar.schema.logic.formula import FALSE, TRUE, And, Formula, conjunction, negation
from ramify.grammar.schema.values import json_rules
from ramify.grammar.schema.values.json_rules import enclosed
from ramify.grammar.schema.values.json_text import spelled
from ramify.grammar.schema.values.object_members import Conditions, Member, MemberSequence, Way
from ramify.grammar.schema.values.scalars import keys
from ramify.grammar.schema.values.string_language import combinations

if TYPE_CHECKING:
    from ramify.grammar.schema.values.schema_grammar import SchemaGrammar

MAX_COUNTED = 1000
"""Most properties that are counted. A greater maxProperties is lowered to this number, and a greater
minProperties is refused."""
MAX_WAYS = 64
"""Most different sets of conditions that one property can meet."""
CONDITIONS_REMEDY = (
    "Such conditions come of additionalProperties, patternProperties or propertyNames below not, if or "
    "oneOf: write anyOf for oneOf where options may overlap, or tell them apart by a required property."
)
CHOICES_REMEDY = (
    "Use fewer anyOf, oneOf, not, if and dependentSchemas about one property, or tell their options apart by "
    "a required property with a const of its own."
)
NAME_THEM = (
    "Their order is free, so equal objects have different texts: name all properties of the items, or set "
    "their additionalProperties to false"
)
MAX_PATTERN_STATES = 5000
MAX_PATTERN_SETS = 4
"""Most patterns for names whose automaton has too many states. For such patterns every set of them is
tried."""


class _Unnamed(NamedTuple):
    """A kind of properties that the schema does not name: the formula for their names, and that for their
    values."""

    key: Formula
    value: Formula


def objects(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    """The objects of `disjunct`."""
    low, high = counts(disjunct, PropertyCount)
    if high is not None and high < low:
        return grammar.define(NOTHING, "minProperties exceeds maxProperties")
    about_objects = Properties | PropertyNames | Required | PropertyCount | HasProperty | AnyProperty
    if not any(isinstance(each, about_objects) for each in disjunct.assertions) and not grammar.canonical:
        return json_rules.OBJECT
    if high is not None:
        high = min(high, MAX_COUNTED)
    return _Object(grammar, disjunct).expression(low, high)


class _Object:
    def __init__(self, grammar: SchemaGrammar, disjunct: Disjunct) -> None:
        self._grammar = grammar
        self._disjunct = disjunct
        self._test = grammar.normal_form.satisfies
        self._keys = conjunction(*(names.key for names in disjunct.asserted(PropertyNames)))
        self._conditions = [AnyProperty((), has) for has in disjunct.asserted(HasProperty)]
        self._conditions += disjunct.asserted(AnyProperty)
        self._pointer = next(
            (
                each.pointer
                for each in disjunct.assertions
                if isinstance(each, PropertyCount | PropertyNames | HasProperty) and each.pointer
            ),
            grammar.place,
        )

    def expression(self, low: int, high: int | None) -> Expression:
        members = []
        conditions = frozenset(range(len(self._conditions)))
        for name in self._disjunct.named_properties:
            member = self._member(name)
            if member is not None:
                members.append(member)
            elif name in self._disjunct.required:
                return self._grammar.define(
                    NOTHING, f"the property {name!r} is required and cannot have a value"
                )
            else:
                conditions -= self._met_by_absence(name)
        if low > MAX_COUNTED:
            refuse(
                self._pointer,
                f"A minProperties above {MAX_COUNTED} is not enforced",
                f"Lower it to {MAX_COUNTED}.",
            )
        # A repeated name would be counted twice, so names must differ. Their texts can be compared only if
        # all properties are of one kind.
        self._unique_names = (
            low > 1 and not members and not self._conditions and len(self._kinds_of_unnamed()) == 1
        )
        others = self._no_others() if self._grammar.canonical else self._others()
        sequence = MemberSequence(self._grammar, members, others, conditions, low, high, self._pointer)
        filled, empty, end = sequence.content()
        if filled == NOTHING and not empty:
            return self._grammar.define(NOTHING, "the object can have no more properties")
        body = enclosed("{", filled, "}", self._grammar.marks, empty=empty)
        return self._grammar.rules.define(seq(body, end))

    def _member(self, name: str) -> Member | None:
        """The named property `name`; None if it cannot have a value."""
        if self._keys != TRUE and not self._test(self._keys, name):
            return None
        formula = self._disjunct.property_formula(name, self._test)
        value = self._grammar.value(formula)
        if value == NOTHING:
            return None
        spelling, colon = text(spelled(name)), self._grammar.marks.colon
        start = seq(spelling, colon)
        if self._conditions:
            wanted = [condition.by(name, self._test) for condition in self._conditions]
            ways = self._ways(formula, wanted, lambda met: start)
        else:
            ways = (Way(frozenset(), seq(start, value)),)
        required = name in self._disjunct.required
        return Member(required, spelling, seq(colon, value), ways, self._met_by_absence(name))

    def _met_by_absence(self, name: str) -> Conditions:
        return frozenset(i for i, each in enumerate(self._conditions) if each.by_absence(name))

    def _ways(
        self, formula: Formula, wanted: list[Formula], start: Callable[[Conditions], Expression]
    ) -> tuple[Way, ...]:
        """The ways to write a property whose value satisfies `formula`: one for each set of conditions that
        the property can meet together.

        To meet condition i, the value must satisfy ``wanted[i]``. `start` returns the texts of the name and
        the colon for a set of conditions to be met. Of several sets with equal texts, only the largest is
        returned.
        """

        def texts(met: Conditions) -> Expression:
            name = start(met)
            value = conjunction(formula, *(wanted[i] for i in sorted(met)))
            return NOTHING if name == NOTHING else seq(name, self._grammar.value(value))

        everything = texts(frozenset())
        possible = {i: texts(frozenset([i])) for i, each in enumerate(wanted) if each != FALSE}
        always = frozenset(i for i, text in possible.items() if text == everything)
        found = {frozenset[int](): everything}
        for i in possible.keys() - always:
            found |= {met | {i}: text for met in found if (text := texts(met | {i})) != NOTHING}
            if len(found) > MAX_WAYS:
                refuse(
                    self._conditions[i].pointer or self._pointer,
                    f"More than {MAX_WAYS} sets of conditions that one property may meet are not enforced",
                    CONDITIONS_REMEDY if any(each.other for each in self._conditions) else CHOICES_REMEDY,
                )
        greatest = {text: met | always for met, text in sorted(found.items(), key=lambda item: len(item[0]))}
        return tuple(sorted((Way(met, text) for text, met in greatest.items()), key=lambda way: len(way.met)))

    # --- unnamed properties -----------------------------------------------------------------------

    def _others(self) -> list[Member]:
        """The properties that are not named, one member for each kind."""
        named = tuple(map(Value, self._disjunct.named_properties))
        not_named = conjunction(Types(STRING), NotInEnum(named)) if named else TRUE
        found = []
        for kind in self._kinds_of_unnamed():
            value = self._grammar.value(kind.value)
            if value == NOTHING:
                continue
            key = self._key(conjunction(not_named, kind.key, self._keys))
            if key == NOTHING:
                continue
            colon = self._grammar.marks.colon
            start = seq(UniqueItem(key) if self._unique_names else key, colon)
            if (key, value) == (json_rules.STRING, json_rules.VALUE) and not self._conditions:
                ways: tuple[Way, ...] = (Way(frozenset(), json_rules.MEMBER),)
            else:
                starts = functools.partial(self._start_of_unnamed, conjunction(not_named, kind.key), start)
                wanted = [FALSE if each.other is None else each.other.value for each in self._conditions]
                ways = self._ways(kind.value, wanted, starts)
            found.append(Member(False, key, seq(colon, value), ways))
        return found

    def _start_of_unnamed(self, key: Formula, start: Expression, met: Conditions) -> Expression:
        """The names that satisfy `key` and can meet the conditions `met`, each with the colon; `start` if
        `met` is empty."""
        if not met:
            return start
        others = (self._conditions[i].other for i in sorted(met))
        name = self._key(conjunction(key, self._keys, *(other.key for other in others if other is not None)))
        return NOTHING if name == NOTHING else seq(name, self._grammar.marks.colon)

    def _no_others(self) -> list[Member]:
        """An empty list, as an object in canonical form has no unnamed properties: their order would be free.
        Raises `NotCanonical` if the schema requires unnamed properties, has schemas for them, or names no
        properties although objects may have some."""
        if self._disjunct.asserted(HasProperty) or any(
            kind != _Unnamed(TRUE, TRUE) for kind in self._kinds_of_unnamed()
        ):
            raise NotCanonical("objects with properties that are not named", NAME_THEM)
        least, most = counts(self._disjunct, PropertyCount)
        if self._kinds_of_unnamed() and most != 0 and max(least, 1) > len(self._disjunct.named_properties):
            raise NotCanonical("objects with properties that are not named", NAME_THEM)
        return []

    def _kinds_of_unnamed(self) -> list[_Unnamed]:
        """The unnamed properties, divided by the set of patterns of patternProperties that their names
        match."""
        properties = self._disjunct.asserted(Properties)
        patterns = list(dict.fromkeys(key for each in properties for key, _ in each.keyed))
        kinds: list[_Unnamed] = []
        for matching in self._matching_sets(patterns):
            formulas: list[Formula] = []
            for each in properties:
                own = [value for key, value in each.keyed if key in matching]
                formulas += own or [each.others]
            value = conjunction(*formulas)
            if value != FALSE:
                key = conjunction(*(key if key in matching else negation(key) for key in patterns))
                kinds.append(_Unnamed(key, value))
        return kinds

    def _matching_sets(self, patterns: list[Formula]) -> list[list[Formula]]:
        """The sets of `patterns` for which some name satisfies exactly the patterns of the set. A few more
        sets may be among them."""
        if not patterns:
            return [[]]
        expressions = [_pattern(key) for key in patterns]
        if all(expressions):
            found = combinations([each for each in expressions if each], MAX_PATTERN_STATES)
            if found is not None:
                return [[patterns[i] for i in sorted(chosen)] for chosen in sorted(found, key=sorted)]
        if len(patterns) > MAX_PATTERN_SETS:
            refuse(
                self._pointer,
                f"{len(patterns)} patterns for names are not enforced where telling them apart takes more "
                f"than {MAX_PATTERN_STATES} states",
                f"Join patterns of equal schemas with |, use smaller repetitions, or write at most "
                f"{MAX_PATTERN_SETS} patterns.",
            )
        sizes = range(len(patterns) + 1)
        return [list(chosen) for size in sizes for chosen in itertools.combinations(patterns, size)]

    def _key(self, formula: Formula) -> Expression:
        if formula == TRUE and not self._unique_names:
            return json_rules.STRING
        disjuncts = self._grammar.normal_form.disjuncts_of(conjunction(Types(STRING), formula))
        return keys(self._grammar, disjuncts, canonical=self._unique_names)


def _pattern(key: Formula) -> Expression | None:
    """The expression of a key that consists of one pattern; else None."""
    parts = key.parts if isinstance(key, And) else (key,)
    match [part for part in parts if not isinstance(part, Types)]:
        case [Matches(pattern, True, pointer)]:
            return search_pattern(pointer, pattern).expression
    return None
