"""Formulas as branches: alternatives in which nothing is left to choose.

A value satisfies a formula if and only if it satisfies one of its branches. Branches that no value
satisfies are dropped as soon as that is seen, so that the alternatives of several options do not multiply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from ramify.errors import InvalidConstraint
from ramify.grammar.schema.json_values import Value, type_of
from ramify.grammar.schema.logic.assertions import (
    NUMBERS,
    Above,
    Below,
    Count,
    Items,
    Length,
    Listed,
    Members,
    Required,
    Size,
    Types,
)
from ramify.grammar.schema.logic.formula import (
    FALSE,
    TRUE,
    TYPES,
    And,
    Fact,
    Formula,
    Or,
    Sub,
    both,
    negated,
)
from ramify.grammar.schema.logic.keywords import Keywords
from ramify.grammar.schema.logic.simplify import simplified
from ramify.grammar.schema.unenforceable import Unenforceable, refuse

MAX_BRANCHES = 300
MAX_TAGS = 8
MAX_DEPTH = 4
"""How deep inside a value it is looked for what makes a branch impossible."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """One alternative: the values of `types` for which all `facts` hold, or exactly those in `values`.

    `facts` are in the order in which the schema has them, without those about other types.
    """

    types: frozenset[str] = frozenset(TYPES)
    facts: tuple[Fact, ...] = ()
    values: tuple[Value, ...] | None = None

    def of(self, kind: type) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    @property
    def required(self) -> dict[str, None]:
        return {fact.name: None for fact in self.of(Required)}


class _Outline(NamedTuple):
    """What can be read off a formula without expanding it: the types of its values, the values themselves
    where they are listed, and the listed values of properties that all its objects have."""

    types: frozenset[str]
    values: frozenset[Value] | None
    tags: dict[str, frozenset[Value]]


class Branches:
    """Formulas of the schemas that `keywords` knows, expanded.

    `refuted` has the formulas for subschemas that are not to hold, where they are other ones.
    `check` finds the branches that no value satisfies; without it only what is seen at once counts.
    """

    def __init__(
        self, keywords: Keywords, refuted: Keywords | None = None, check: Branches | None = None
    ) -> None:
        self._keywords = keywords
        self._refuted = refuted or keywords
        self._check = check or self
        self._of: dict[Formula, list[Branch]] = {}
        self._simpler: dict[Or, Formula] = {}
        self._outlines: dict[Formula, _Outline] = {}
        self._possible: dict[tuple[Formula, int], bool] = {}

    def of(self, formula: Formula) -> list[Branch]:
        """The branches of `formula`, in the order written.

        Raises `InvalidConstraint` for references that lead back to themselves, and beyond `MAX_BRANCHES`.
        """
        found = self._of.get(formula)
        if found is None:
            found = self._of[formula] = self._expand([Branch()], formula, ())
        return found

    def test(self, formula: Formula, value: Any) -> bool:
        """Does `value` satisfy `formula`?"""
        match formula:
            case And(parts):
                return all(self.test(part, value) for part in parts)
            case Or(options):
                return any(self.test(option, value) for option in options)
            case Sub(pointer, wanted):
                keywords = self._keywords if wanted else self._refuted
                return self.test(keywords.formula(pointer), value) == wanted
        return type_of(value) not in formula.kinds or formula.holds(value, self.test)

    def distinct(self, a: Formula, b: Formula) -> bool:
        """No value satisfies both. False where that is not seen."""
        left, right = self._outline(a), self._outline(b)
        types = left.types & right.types
        if not types:
            return True
        if left.values is not None and right.values is not None:
            return left.values.isdisjoint(right.values)
        if types == {"object"} and any(
            left.tags[name].isdisjoint(right.tags[name]) for name in left.tags.keys() & right.tags.keys()
        ):
            return True
        return not self.possible(both(a, b), MAX_DEPTH)

    def _outline(self, formula: Formula) -> _Outline:
        found = self._outlines.get(formula)
        if found is None:
            found = self._outlines[formula] = self._new_outline(formula)
        return found

    def _new_outline(self, formula: Formula) -> _Outline:
        try:
            branches = self.of(formula)
        except Unenforceable:
            return _Outline(frozenset(TYPES), None, {})
        types = frozenset(kind for branch in branches for kind in _types(branch))
        if all(branch.values is not None for branch in branches):
            return _Outline(types, frozenset(v for branch in branches for v in branch.values or ()), {})
        tags: dict[str, frozenset[Value]] = {}
        if len(branches) == 1:
            members = branches[0].of(Members)
            for name in list(branches[0].required)[:MAX_TAGS]:
                goal = both(*(fact.of(name, self.test) for fact in members))
                values = self._values(goal)
                if values is not None:
                    tags[name] = values
        return _Outline(types, None, tags)

    def _values(self, formula: Formula) -> frozenset[Value] | None:
        """The values of `formula`, where they are listed."""
        if formula == TRUE:
            return None
        try:
            branches = self.of(formula)
        except Unenforceable:
            return None
        if any(branch.values is None for branch in branches):
            return None
        return frozenset(value for branch in branches for value in branch.values or ())

    def possible(self, formula: Formula, depth: int) -> bool:
        """Some value may satisfy `formula`. Looks `depth` levels deep."""
        if formula in (TRUE, FALSE):
            return formula == TRUE
        if depth == 0:
            return True
        key = (formula, depth)
        if key not in self._possible:
            self._possible[key] = True  # the answer while it is being looked for
            try:
                branches = self.of(formula)
            except Unenforceable:
                branches = [Branch()]
            self._possible[key] = any(self._is_possible(branch, depth) for branch in branches)
        return self._possible[key]

    # --- expansion --------------------------------------------------------------------------------

    def _expand(self, branches: list[Branch], formula: Formula, path: tuple[Sub, ...]) -> list[Branch]:
        facts: dict[Fact, None] = {}
        choices: dict[Or, tuple[Sub, ...]] = {}
        self._collect(formula, path, facts, choices)
        for fact in facts:
            branches = [joined for branch in branches if (joined := self.joined(branch, fact)) is not None]
        for choice, inner in sorted(choices.items(), key=lambda item: len(item[0].options)):
            branches = self._choose(branches, choice, inner)
        return branches

    def _collect(
        self, formula: Formula, path: tuple[Sub, ...], facts: dict[Fact, None], choices: dict[Or, Any]
    ) -> None:
        """What `formula` says without choice, and the choices that it leaves."""
        match formula:
            case And(parts):
                for part in parts:
                    self._collect(part, path, facts, choices)
            case Or():
                simpler = self._simplified(formula)
                if isinstance(simpler, Or):
                    choices.setdefault(simpler, path)
                else:
                    self._collect(simpler, path, facts, choices)
            case Sub(pointer, wanted):
                if formula in path:
                    raise InvalidConstraint("This $ref leads back to itself.", pointer=f"{pointer}/$ref")
                keywords = self._keywords if wanted else self._refuted
                inner = keywords.formula(pointer)
                self._collect(inner if wanted else negated(inner), (*path, formula), facts, choices)
            case Fact():
                facts[formula] = None

    def _choose(self, branches: list[Branch], choice: Or, path: tuple[Sub, ...]) -> list[Branch]:
        found: dict[Branch, None] = {}
        for branch in branches:
            options: dict[Branch, None] = {}
            for option in choice.options:
                options |= dict.fromkeys(self._expand([branch], option, path))
            if branch in options:
                options = {branch: None}  # it says nothing more than what is known
            found = _with_values_joined(found | options)
            if len(found) > MAX_BRANCHES:
                found = dict.fromkeys(self._only_possible(found))
            if len(found) > MAX_BRANCHES:
                where = next((part.pointer for part in reversed(path)), "")
                refuse(
                    where,
                    f"The alternatives here multiply to more than {MAX_BRANCHES}",
                    "Use fewer anyOf, oneOf and not within one another.",
                )
        return list(found) if len(found) <= len(branches) else self._only_possible(found)

    def _only_possible(self, branches: Iterable[Branch]) -> list[Branch]:
        return [branch for branch in branches if self._check._is_possible(branch, MAX_DEPTH)]

    def joined(self, branch: Branch, fact: Fact) -> Branch | None:
        """The branch with one fact more; None where no value is left."""
        if branch.values is not None:
            values = tuple(
                value
                for value in branch.values
                if type_of(value.value) not in fact.kinds or fact.holds(value.value, self.test)
            )
            return dataclasses.replace(branch, values=values) if values else None
        match fact:
            case Types(types):
                left = branch.types & types
                if left == branch.types:
                    return branch
                facts = tuple(known for known in branch.facts if known.kinds & left)
                return Branch(left, facts) if left else None
            case Listed(values):
                joined: Branch | None = Branch(
                    values=tuple(value for value in values if type_of(value.value) in branch.types)
                )
                for known in branch.facts:
                    joined = self.joined(joined, known) if joined is not None else None
                return joined if joined is not None and joined.values else None
        if not fact.kinds & branch.types or fact in branch.facts:
            return branch
        return Branch(branch.types, (*branch.facts, fact))

    def _simplified(self, choice: Or) -> Formula:
        found = self._simpler.get(choice)
        if found is None:
            found = self._simpler[choice] = simplified(choice)
        return found

    # --- possibility ------------------------------------------------------------------------------

    def _is_possible(self, branch: Branch, depth: int) -> bool:
        if branch.values is not None or branch.types & {"null", "boolean"}:
            return True
        if branch.types & NUMBERS and _numbers_possible(branch):
            return True
        if "string" in branch.types and _counts_possible(branch, Length):
            return True
        if "array" in branch.types and self._array_possible(branch, depth):
            return True
        return "object" in branch.types and self._object_possible(branch, depth)

    def _array_possible(self, branch: Branch, depth: int) -> bool:
        if not _counts_possible(branch, Count):
            return False
        low = max((fact.low for fact in branch.of(Count)), default=0)
        items = branch.of(Items)
        known = max((len(fact.prefix) for fact in items), default=0)
        return all(
            self.possible(both(*(fact.at(i) for fact in items)), depth - 1)
            for i in range(min(low, known + 1))
        )

    def _object_possible(self, branch: Branch, depth: int) -> bool:
        if not _counts_possible(branch, Size):
            return False
        members = branch.of(Members)
        return all(
            self.possible(both(*(fact.of(name, self.test) for fact in members)), depth - 1)
            for name in branch.required
        )


def _types(branch: Branch) -> frozenset[str]:
    if branch.values is None:
        return branch.types
    return frozenset(type_of(value.value) for value in branch.values)


def _with_values_joined(branches: dict[Branch, None]) -> dict[Branch, None]:
    """All branches of listed values as one."""
    listed = [branch for branch in branches if branch.values is not None]
    if len(listed) < 2:
        return branches
    values = dict.fromkeys(value for branch in listed for value in branch.values or ())
    joined = Branch(values=tuple(values))
    found: dict[Branch, None] = {}
    for branch in branches:
        found[branch if branch.values is None else joined] = None
    return found


def _numbers_possible(branch: Branch) -> bool:
    low, high = bounds(branch)
    if low is None or high is None or low.value < high.value:
        return True
    return low.value == high.value and low.inclusive and high.inclusive


def bounds(branch: Branch) -> tuple[Above | None, Below | None]:
    """The strictest bounds on numbers."""
    low = max(branch.of(Above), key=lambda fact: (fact.value, not fact.inclusive), default=None)
    high = min(branch.of(Below), key=lambda fact: (fact.value, fact.inclusive), default=None)
    return low, high


def counts(branch: Branch, kind: type[Length | Count | Size]) -> tuple[int, int | None]:
    """The least and the most characters, items or properties."""
    facts = branch.of(kind)
    low = max((fact.low for fact in facts), default=0)
    return low, min((fact.high for fact in facts if fact.high is not None), default=None)


def _counts_possible(branch: Branch, kind: type[Length | Count | Size]) -> bool:
    low, high = counts(branch, kind)
    return high is None or low <= high
