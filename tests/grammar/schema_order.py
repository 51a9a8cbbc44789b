"""JSON values written as the grammar of their schema writes them: with properties in the schema's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.schema.document.json_values import Value, as_decimals, type_of
from ramify.grammar.schema.logic.assertions import Contains
from ramify.grammar.schema.logic.disjunct import Disjunct
from ramify.grammar.schema.logic.formula import TRUE, Formula, conjunction
from ramify.grammar.schema.logic.normal_form import NormalForm
from ramify.grammar.schema.values.json_text import spelled
from ramify.grammar.schema.values.schema_grammar import Options, SchemaGrammar


def in_schema_order(schema: Any, value: Any, *, whitespace: str = "natural") -> str:
    """The text of `value` in the order of `schema`, with "natural" or "compact" white space.

    A value that is not valid is written in the order of the alternative of which it violates the fewest
    assertions. Raises `InvalidConstraint` if `schema` is no JSON Schema.
    """
    return writer(schema, whitespace=whitespace)(value)


def writer(
    schema: Any, *, whitespace: str = "natural", most_multiplied: int | None = None
) -> Callable[[Any], str]:
    """`in_schema_order` for many values of one schema."""
    document = SchemaDocument(as_decimals(schema))
    grammar = SchemaGrammar(document, Options(most_multiplied=most_multiplied))
    order = _Order(grammar.normal_form)

    def written(value: Any) -> str:
        ordered = order.ordered(grammar.root, as_decimals(value))
        return _compact(ordered) if whitespace == "compact" else spelled(ordered)

    return written


class _Order:
    def __init__(self, normal_form: NormalForm) -> None:
        self._normal_form = normal_form

    def ordered(self, formula: Formula, value: Any) -> Any:
        """`value` with the properties of all its objects in order."""
        if not isinstance(value, list | dict) or not value:
            return value
        found = self._normal_form.disjuncts_of(formula) if formula != TRUE else []
        if not found:
            return value
        disjunct = min(found, key=lambda disjunct: self._violations(disjunct, value))
        if disjunct.values is not None:
            return next((known.value for known in disjunct.values if known == Value(value)), value)
        if isinstance(value, list):
            return [self.ordered(self._item(disjunct, i, item), item) for i, item in enumerate(value)]
        named = disjunct.named_properties
        names = [name for name in named if name in value]
        names += [name for name in value if name not in named]
        test = self._normal_form.satisfies
        return {name: self.ordered(disjunct.property_formula(name, test), value[name]) for name in names}

    def _violations(self, disjunct: Disjunct, value: Any) -> int:
        """Number of assertions that `value` violates; 1000 if it is of another type or not among the
        values."""
        kind = type_of(value)
        if disjunct.values is not None:
            return 0 if Value(value) in disjunct.values else 1000
        if kind not in disjunct.types:
            return 1000
        test = self._normal_form.satisfies
        return sum(kind in each.kinds and not each.holds(value, test) for each in disjunct.assertions)

    def _item(self, disjunct: Disjunct, i: int, item: Any) -> Formula:
        contained = [c.item for c in disjunct.asserted(Contains) if self._normal_form.satisfies(c.item, item)]
        return conjunction(disjunct.item_formula(i), *contained)


def _compact(value: Any) -> str:
    """The text of a JSON value without white space outside strings."""
    match value:
        case dict():
            return "{" + ",".join(f"{spelled(name)}:{_compact(item)}" for name, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_compact, value)) + "]"
    return spelled(value)
