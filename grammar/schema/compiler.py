"""JSON schemas as grammars whose sentences are the schema's instances, written in one documented way.

A keyword is either enforced exactly or refused with its JSON pointer. Two conventions narrow how an instance
is written, and none lets another value through:

- Values are spelled as in `json_text`.
- Properties come in the order of the schema: first the named ones, then others. Properties that the schema
  names unconditionally come before those that only an option of it names.
"""

from __future__ import annotations

from decimal import Context, localcontext
from typing import Any, NamedTuple

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import Expression, Text, alt
from ramify.grammar.schema.document.check import SchemaDocument, place
from ramify.grammar.schema.document.deep_recursion import deep_recursion
from ramify.grammar.schema.document.json_values import Value
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.logic.assertions import NotInEnum
from ramify.grammar.schema.logic.disjunct import Disjunct
from ramify.grammar.schema.logic.normal_form import MAX_DISJUNCTS
from ramify.grammar.schema.values.arrays import arrays
from ramify.grammar.schema.values.objects import objects
from ramify.grammar.schema.values.scalars import numbers, strings
from ramify.grammar.schema.values.schema_grammar import Builders, Options, SchemaGrammar
from ramify.messages import Unenforced

PRECISION = 1_000_000
"""Digits to which numbers are computed. No number that is read has as many (`json_values.MAX_DIGITS`), so
none is rounded. Decimal's default would round to 28."""

MAX_LEFT_OUT = 50
"""Most keywords left unenforced under ``strict="validate"``: for each, the schema is compiled once more."""


class CompiledSchema(NamedTuple):
    """A grammar's rules by name, and the keywords that they do not enforce."""

    rules: dict[str, Expression]
    unenforced: tuple[Unenforced, ...]


def schema_rules(schema: Any, options: Options | None = None) -> dict[str, Expression]:
    """The grammar of the instances of `schema`, as `json_values.parse_json` gave it: its rules by name.

    Raises `InvalidConstraint` with a JSON pointer for what is no schema, what cannot be enforced
    exactly (unless `options` say otherwise), and what no value satisfies.
    """
    return compile_schema(schema, options).rules


def compile_schema(
    schema: Any, options: Options | None = None, *, most_multiplied: int | None = None
) -> CompiledSchema:
    """The rules of `schema_rules`, with the keywords that they do not enforce: none where `options.strict` is
    True. Choices become clauses above `most_multiplied` disjuncts, by default as `NormalForm` says."""
    options = options or Options()
    left_out: dict[str, Unenforced] = {}
    with deep_recursion(), localcontext(Context(prec=PRECISION)):
        document = SchemaDocument(schema)
        while True:
            try:
                rules = _rules(document, options, frozenset(left_out), most_multiplied)
            except InvalidConstraint as error:
                pointer = error.pointer = None if error.pointer is None else place(error.pointer)
                if options.strict is True or pointer is None or not isinstance(error, Unenforceable):
                    raise
                if pointer in left_out or len(left_out) == MAX_LEFT_OUT:
                    raise
                left_out[pointer] = Unenforced(schema=pointer, message=str(error))
            else:
                unread = [
                    Unenforced(schema=where, message=f"The draft that $schema names has no {keyword}.")
                    for where, keyword in document.unread.items()
                ]
                return CompiledSchema(rules, (*left_out.values(), *unread))


def _rules(
    document: SchemaDocument, options: Options, ignored: frozenset[str], most_multiplied: int | None
) -> dict[str, Expression]:
    """The rules of a schema; where clauses are refused, the rules with up to `MAX_DISJUNCTS` disjuncts
    instead.

    Eight conditionals about one property have 256 disjuncts; as clauses one value may meet any set of them.
    """
    grammar = SchemaGrammar(document, BUILDERS, options, ignored, most_multiplied)
    try:
        return grammar.compiled()
    except Unenforceable:
        if options.any_order or not grammar.normal_form.has_clauses:
            raise
    return SchemaGrammar(document, BUILDERS, options, ignored, most_multiplied=MAX_DISJUNCTS).compiled()


def _null(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    return _literals(disjunct, null=None)


def _boolean(grammar: SchemaGrammar, disjunct: Disjunct) -> Expression:
    return _literals(disjunct, true=True, false=False)


def _literals(disjunct: Disjunct, **values: bool | None) -> Expression:
    """The names of the `values` that no negated enum excludes, as texts."""
    excluded = [value for assertion in disjunct.asserted(NotInEnum) for value in assertion.values]
    return alt(*(Text(name) for name, value in values.items() if Value(value) not in excluded))


BUILDERS: Builders = [
    (frozenset(["object"]), objects),
    (frozenset(["array"]), arrays),
    (frozenset(["string"]), strings),
    (frozenset(["integer", "fraction"]), numbers),
    (frozenset(["boolean"]), _boolean),
    (frozenset(["null"]), _null),
]
