"""The grammar of a schema under construction, to which the modules about single types add rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ramify.constraint import Strict, Whitespace
from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import NOTHING, Call, Expression, Text, alt, seq
from ramify.grammar.rules.rule_set import ROOT, Rules, productive
from ramify.grammar.schema.document.check import SchemaDocument
from ramify.grammar.schema.document.json_values import Value, type_of
from ramify.grammar.schema.document.unenforceable import NotCanonical, refuse
from ramify.grammar.schema.logic.assertions import NotInEnum
from ramify.grammar.schema.logic.disjunct import Disjunct
from ramify.grammar.schema.logic.formula import FALSE, TRUE, TYPES, And, Formula, Subschema
from ramify.grammar.schema.logic.keywords import SchemaFormulas
from ramify.grammar.schema.logic.normal_form import MAX_DISJUNCTS, MAX_MULTIPLIED, NormalForm
from ramify.grammar.schema.values import json_rules
from ramify.grammar.schema.values.arrays import arrays
from ramify.grammar.schema.values.json_rules import punctuation, value_text
from ramify.grammar.schema.values.objects import objects
from ramify.grammar.schema.values.scalars import numbers, strings

MAX_RULES = 20_000
"""Most rules of a grammar, which take about a second to make."""


class Options(NamedTuple):
    """Options for the spelling of values and for unenforced keywords (see `ramify.constraint`)."""

    whitespace: Whitespace = "natural"
    any_order: bool = False
    strict: Strict = True
    counted: bool = True
    """Whether the automaton can count long repetitions. If not, strings with a maxLength have at most
    `scalars.LONGEST` characters, and arrays with a maxItems at most `arrays.MAX_WRITTEN_OUT` items."""
    most_multiplied: int | None = None
    """Number of disjuncts above which choices become clauses (`NormalForm`); None for the default."""


class SchemaGrammar:
    """The grammar of one schema under construction. Formulas become rules, one rule for each formula.

    Keywords at the pointers `ignored` are left out.
    """

    def __init__(
        self, document: SchemaDocument, options: Options, ignored: frozenset[str] = frozenset()
    ) -> None:
        # Whether two options of a oneOf share values is decided with formulas that do not need this decision.
        # In these, oneOf is read as anyOf, which allows more; a negated oneOf excludes all pairs of options.
        as_any_of = SchemaFormulas(document, ignored)
        negated_ones = SchemaFormulas(document, ignored, shared=lambda a, b: frozenset(TYPES), refuted=True)
        check = NormalForm(as_any_of, negated_ones)
        formulas = SchemaFormulas(document, ignored, shared=check.shared_types)
        refuted = SchemaFormulas(document, ignored, shared=check.shared_types, refuted=True)
        # With any_order, the states of a clause would be multiplied by all orders of the properties.
        most = options.most_multiplied or (MAX_DISJUNCTS if options.any_order else MAX_MULTIPLIED)
        self.normal_form = NormalForm(formulas, refuted if ignored else None, check, most_multiplied=most)
        self.root = formulas.subschema("")
        self._document = document
        self.marks = punctuation(options.whitespace)
        self._fixed_marks = punctuation("compact" if options.whitespace == "compact" else "natural")
        self.any_order = options.any_order
        self.counted = options.counted
        self.rules = Rules()
        self.objects: dict[tuple[Any, ...], int] = {}
        """The number of each object whose members come in any order, by its members and their counts."""
        self.rules.bodies.update(json_rules.json_rules(options.whitespace))
        self.canonical = False
        """Whether each value must have exactly one text, so that equal values have equal texts."""
        self._expressions: dict[tuple[Formula, bool], Expression] = {}
        self._open: dict[tuple[Formula, bool], Call | None] = {}
        self._contradiction: tuple[str, str] | None = None

    def compiled(self) -> dict[str, Expression]:
        """All rules. Raises `InvalidConstraint` if no value satisfies the schema."""
        value = self.value(self.root)
        self.rules.set_body(Call(ROOT), seq(self.marks.around, value, self.marks.around))
        rules = productive(self.rules.bodies)
        if not rules:
            pointer, why = self._contradiction or ("", "it never ends, or nothing is left to choose")
            raise InvalidConstraint(
                f"No JSON value satisfies the schema: {why}.",
                pointer=pointer,
                remedy="Leave out one of the keywords that exclude each other.",
            )
        return rules

    def value(self, formula: Formula) -> Expression:
        """The values that satisfy `formula`; a formula that contains itself becomes a recursive rule."""
        if formula == FALSE:
            return NOTHING
        if formula == TRUE and not self.canonical:
            return json_rules.VALUE
        key = (formula, self.canonical)
        if key in self._expressions:
            return self._expressions[key]
        if key in self._open:
            call = self._open[key] = self._open[key] or self.rules.reserve()
            return call
        self._open[key] = None
        disjuncts = self.normal_form.disjuncts_of(formula)
        if not disjuncts:
            self.define(NOTHING, self._why_no_value(formula), formula)
        if self.canonical:
            _require_one_order(disjuncts)
        expression = alt(*(self._disjunct(disjunct, formula) for disjunct in disjuncts))
        reserved = self._open.pop(key)
        if reserved is not None:
            self.rules.set_body(reserved, expression)
            expression = reserved
        else:
            expression = self.rules.define(expression)
        self._expressions[key] = expression
        return expression

    def canonical_value(self, formula: Formula) -> Expression:
        """The values that satisfy `formula`, each with exactly one text: white space is fixed, and objects
        have only named properties.

        Raises `NotCanonical` if some values would have several texts.
        """
        options = (self.canonical, self.marks, self.any_order)
        self.canonical, self.marks, self.any_order = True, self._fixed_marks, False
        try:
            return self.value(formula)
        finally:
            self.canonical, self.marks, self.any_order = options

    def define(self, expression: Expression, why: str, formula: Formula | None = None) -> Expression:
        """Add a rule for `expression`, and return a call of it. If `expression` is `NOTHING` and the schema
        therefore has no instance, the error names `why` as the reason."""
        if expression == NOTHING and self._contradiction is None:
            innermost = next(reversed(self._open), (TRUE, False))[0]
            self._contradiction = (_pointer_of(formula or innermost), why)
        return self.rules.define(expression)

    @property
    def place(self) -> str:
        """The pointer of the innermost subschema that is being compiled."""
        pointers = (_pointer_of(formula) for formula, _ in reversed(self._open))
        return next((pointer for pointer in pointers if pointer), "")

    def _why_no_value(self, formula: Formula) -> str:
        """The reason why `formula` has no instance. Names type and enum if these exclude each other."""
        why = "its keywords leave no value"
        schema = self._document.at(formula.pointer) if isinstance(formula, Subschema) else True
        if not isinstance(schema, dict) or "type" not in schema or not {"enum", "const"} & schema.keys():
            return why
        keyword = "enum" if "enum" in schema else "const"
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        names = {"integer", "fraction", *types} if "number" in types else {*types}
        if any(type_of(value) in names for value in schema.get("enum", [schema.get("const")])):
            return why
        return f"{why}: no value of {keyword} has the type {' or '.join(types)}"

    def _disjunct(self, disjunct: Disjunct, formula: Formula) -> Expression:
        if len(self.rules.bodies) > MAX_RULES:
            refuse(
                self.place,
                f"The schema takes more than {MAX_RULES} rules",
                "Leave out optional properties or options of anyOf and oneOf, or lower minItems, maxItems, "
                "minProperties and maxProperties.",
            )
        if disjunct.values is not None:
            return self.rules.define(alt(*(value_text(value.value, self.marks) for value in disjunct.values)))
        if not disjunct.assertions and disjunct.types == frozenset(TYPES) and not self.canonical:
            return json_rules.VALUE
        return alt(*(build(self, disjunct) for kinds, build in _BUILDERS if disjunct.types & kinds))


def _pointer_of(formula: Formula) -> str:
    """The pointer of the first subschema in a conjunction; "" for none."""
    parts = formula.parts if isinstance(formula, And) else (formula,)
    return next((part.pointer for part in parts if isinstance(part, Subschema)), "")


def _require_one_order(disjuncts: list[Disjunct]) -> None:
    """Raise `NotCanonical` if an object may satisfy two disjuncts that order its properties differently."""
    orders: list[list[str]] = []
    for disjunct in disjuncts:
        if disjunct.values is not None:
            orders += [list(value.value) for value in disjunct.values if isinstance(value.value, dict)]
        elif "object" in disjunct.types:
            orders.append(list(disjunct.named_properties))
    for i, order in enumerate(orders):
        for other in orders[:i]:
            shared = set(order) & set(other)
            if [n for n in order if n in shared] != [n for n in other if n in shared]:
                raise NotCanonical(
                    "objects whose options name properties in different orders", "Name them in one order"
                )


def _null(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    return _literals(disjunct, null=None)


def _boolean(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    return _literals(disjunct, true=True, false=False)


def _literals(disjunct: Disjunct, **values: bool | None) -> Expression:
    """The names of `values` as texts, without the values that a negated enum excludes."""
    excluded = [value for assertion in disjunct.asserted(NotInEnum) for value in assertion.values]
    return alt(*(Text(name) for name, value in values.items() if Value(value) not in excluded))


_BUILDERS: list[tuple[frozenset[str], Callable[[SchemaGrammar, Disjunct], Expression]]] = [
    (frozenset(["object"]), objects),
    (frozenset(["array"]), arrays),
    (frozenset(["string"]), strings),
    (frozenset(["integer", "fraction"]), numbers),
    (frozenset(["boolean"]), _boolean),
    (frozenset(["null"]), _null),
]
"""Pairs of a set of types and a function that returns the expression of a disjunct's values of these
types."""
