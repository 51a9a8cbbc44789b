"""A JSON value written as the grammar of its schema writes it: with the properties in the schema's order."""

from __future__ import annotations

from typing import Any

from ramify.grammar.schema.check import SchemaDocument
from ramify.grammar.schema.compiler import SchemaGrammar
from ramify.grammar.schema.instance import as_decimals
from ramify.grammar.schema.json_values import type_of, value_of
from ramify.grammar.schema.logic.assertions import Contains, Items, Members
from ramify.grammar.schema.logic.formula import TRUE, Formula, both
from ramify.grammar.schema.logic.normal_form import Branch, Branches
from ramify.grammar.schema.values.json_text import spelled


def in_schema_order(schema: Any, value: Any, *, whitespace: str = "natural") -> str:
    """The text of `value` in the order of `schema`, in "natural" or "compact" white space.

    A value that is not valid is written as if it were of the option that it comes closest to.
    """
    document = SchemaDocument(as_decimals(schema))
    grammar = SchemaGrammar(document)
    ordered = _Order(grammar.branches).of(grammar.root, as_decimals(value))
    return _compact(ordered) if whitespace == "compact" else spelled(ordered)


class _Order:
    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    def of(self, goal: Formula, value: Any) -> Any:
        """`value` with the properties of all its objects in order."""
        if not isinstance(value, list | dict) or not value:
            return value
        found = self._branches.of(goal) if goal != TRUE else []
        if not found:
            return value
        branch = min(found, key=lambda branch: self._missed(branch, value))
        if branch.values is not None:
            return next((known.value for known in branch.values if known == value_of(value)), value)
        if isinstance(value, list):
            return [self.of(self._item(branch, i, item), item) for i, item in enumerate(value)]
        named = {name: None for fact in branch.of(Members) for name, _ in fact.named} | branch.required
        names = [name for name in named if name in value]
        names += [name for name in value if name not in named]
        return {name: self.of(self._property(branch, name), value[name]) for name in names}

    def _missed(self, branch: Branch, value: Any) -> int:
        """How many facts of the branch `value` does not satisfy."""
        if branch.values is not None:
            return 0 if value_of(value) in branch.values else 1000
        kind = type_of(value)
        if kind not in branch.types:
            return 1000
        facts = [fact for fact in branch.facts if kind in fact.kinds]
        return sum(not fact.holds(value, self._branches.test) for fact in facts)

    def _item(self, branch: Branch, i: int, item: Any) -> Formula:
        goals = [fact.at(i) for fact in branch.of(Items)]
        goals += [fact.item for fact in branch.of(Contains) if self._branches.test(fact.item, item)]
        return both(*goals)

    def _property(self, branch: Branch, name: str) -> Formula:
        return both(*(fact.of(name, self._branches.test) for fact in branch.of(Members)))


def _compact(value: Any) -> str:
    """Without white space between values."""
    match value:
        case dict():
            return "{" + ",".join(f"{spelled(name)}:{_compact(item)}" for name, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_compact, value)) + "]"
    return spelled(value)
