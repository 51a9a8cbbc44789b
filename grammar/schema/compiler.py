"""JSON schemas as grammars. The texts of a grammar are the schema's instances, written in one documented way.

A keyword is either enforced exactly or refused with its JSON pointer. Two conventions restrict how an
instance is written; neither allows a value that is no instance:

- Values are spelled as `json_text` says.
- Properties come in the order of the schema: first the named ones, then others. Properties that the schema
  names unconditionally come before those that it names only in an option, say of anyOf.
"""

from __future__ import annotations

from decimal import Context, localcontext
from typing import Any, NamedTuple

from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import Expression
from ramify.grammar.schema.document.check import SchemaDocument, place
from ramify.grammar.schema.document.json_values import deep_recursion
from ramify.grammar.schema.document.unenforceable import Unenforceable
from ramify.grammar.schema.logic.normal_form import MAX_DISJUNCTS
from ramify.grammar.schema.values.schema_grammar import Options, SchemaGrammar
from ramify.messages import Unenforced

PRECISION = 1_000_000
"""Precision of computations with `Decimal`, in digits. Numbers that are read have fewer digits
(`json_values.MAX_DIGITS`), so that no result is rounded. Decimal's default precision is 28 digits."""

MAX_LEFT_OUT = 50
"""Most keywords left unenforced under ``strict="validate"``. The schema is compiled once more for each of
them."""


class CompiledSchema(NamedTuple):
    """A grammar's rules by name, and the keywords that the rules do not enforce."""

    rules: dict[str, Expression]
    unenforced: tuple[Unenforced, ...]


def compile_schema(schema: Any, options: Options | None = None) -> CompiledSchema:
    """The grammar of the instances of `schema`, which is as `json_values.parse_json` returns it.

    If `options.strict` is True, the rules leave no keywords unenforced except those newer than the draft that
    ``$schema`` names. Raises `InvalidConstraint` with a JSON pointer if `schema` is not a valid schema, if a
    keyword cannot be enforced exactly (unless `options` allow that), or if no value satisfies the schema.
    """
    options = options or Options()
    left_out: dict[str, Unenforced] = {}
    with deep_recursion(), localcontext(Context(prec=PRECISION)):
        document = SchemaDocument(schema)
        while True:
            try:
                rules = _rules(document, options, frozenset(left_out))
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


def _rules(document: SchemaDocument, options: Options, ignored: frozenset[str]) -> dict[str, Expression]:
    """The rules of a schema. If clauses make it unenforceable, compile it again without clauses, with up to
    `MAX_DISJUNCTS` disjuncts. An example for the second attempt: eight conditionals about one property have
    only 256 disjuncts, but as clauses one value may meet any set of the eight."""
    grammar = SchemaGrammar(document, options, ignored)
    try:
        return grammar.compiled()
    except Unenforceable:
        if options.any_order or not grammar.normal_form.has_clauses:
            raise
    options = options._replace(most_multiplied=MAX_DISJUNCTS)
    return SchemaGrammar(document, options, ignored).compiled()
