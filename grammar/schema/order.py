"""A JSON value written as the grammar of its schema writes it: with the properties in the schema's order."""

from __future__ import annotations

from typing import Any

from ramify.grammar.schema.check import SchemaDocument
from ramify.grammar.schema.compiler import SchemaGrammar
from ramify.grammar.schema.instance import as_decimals
from ramify.grammar.schema.json_values import Value, type_of
from ramify.grammar.schema.logic.assertions import Contains, Items, Properties
from ramify.grammar.schema.logic.formula import TRUE, Formula, conjunction
from ramify.grammar.schema.logic.normal_form import Disjunct, NormalForm
from ramify.grammar.schema.values.json_text import spelled


def in_schema_order(schema: Any, value: Any, *, whitespace: str = "natural") -> str:
    """The text of `value` in the order of `schema`, in "natural" or "compact" white space.

    A value that is not valid is written as if it were of the option that it comes closest to.
    """
    document = SchemaDocument(as_decimals(schema))
    grammar = SchemaGrammar(document)
    ordered = _Order(grammar.normal_form).of(grammar.root, as_decimals(value))
    return _compact(ordered) if whitespace == "compact" else spelled(ordered)


class _Order:
    def __init__(self, disjuncts: NormalForm) -> None:
        self._normal_form = disjuncts

    def of(self, formula: Formula, value: Any) -> Any:
        """`value` with the properties of all its objects in order."""
        if not isinstance(value, list | dict) or not value:
            return value
        found = self._normal_form.of(formula) if formula != TRUE else []
        if not found:
            return value
        disjunct = min(found, key=lambda disjunct: self._missed(disjunct, value))
        if disjunct.values is not None:
            return next((known.value for known in disjunct.values if known == Value(value)), value)
        if isinstance(value, list):
            return [self.of(self._item(disjunct, i, item), item) for i, item in enumerate(value)]
        named = {
            name: None for assertion in disjunct.of(Properties) for name, _ in assertion.named
        } | disjunct.required
        names = [name for name in named if name in value]
        names += [name for name in value if name not in named]
        return {name: self.of(self._property(disjunct, name), value[name]) for name in names}

    def _missed(self, disjunct: Disjunct, value: Any) -> int:
        """How many facts of the branch `value` does not satisfy."""
        if disjunct.values is not None:
            return 0 if Value(value) in disjunct.values else 1000
        kind = type_of(value)
        if kind not in disjunct.types:
            return 1000
        assertions = [assertion for assertion in disjunct.assertions if kind in assertion.kinds]
        return sum(not assertion.holds(value, self._normal_form.satisfies) for assertion in assertions)

    def _item(self, disjunct: Disjunct, i: int, item: Any) -> Formula:
        formulas = [assertion.at(i) for assertion in disjunct.of(Items)]
        formulas += [
            assertion.item
            for assertion in disjunct.of(Contains)
            if self._normal_form.satisfies(assertion.item, item)
        ]
        return conjunction(*formulas)

    def _property(self, disjunct: Disjunct, name: str) -> Formula:
        return conjunction(
            *(assertion.of(name, self._normal_form.satisfies) for assertion in disjunct.of(Properties))
        )


def _compact(value: Any) -> str:
    """Without white space between values."""
    match value:
        case dict():
            return "{" + ",".join(f"{spelled(name)}:{_compact(item)}" for name, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_compact, value)) + "]"
    return spelled(value)
