"""Languages of expressions and automata: membership of a text, by running the pushdown engine on it."""

from __future__ import annotations

from typing import Any

from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction.compiler import compile_rules
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.rules.expression import CharAutomaton, Expression, accepted
from ramify.grammar.rules.rule_set import ROOT, Rules
from ramify.grammar.schema.compiler import compile_schema
from ramify.grammar.schema.values.schema_grammar import Options
from ramify.grammar.vocabulary import Vocabulary

BYTES = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (0,))


class Language:
    """The texts of `expression`, of which there may be none."""

    def __init__(self, expression: Expression, rules: Rules | None = None) -> None:
        bodies = {**(rules.bodies if rules else {}), ROOT: expression}
        try:
            compiled = compile_rules(bodies, BYTES)
        except InvalidConstraint:
            self._grammar = None
        else:
            self._grammar = PushdownGrammar(compiled.to_bytes(), BYTES)

    def accepts(self, data: bytes) -> bool:
        if self._grammar is None:
            return False
        matcher = self._grammar.matcher()
        return matcher.accept_bytes(data) and matcher.complete


def language_of(automaton: CharAutomaton) -> Language:
    return Language(accepted(automaton))


def schema_rules(schema: Any, options: Options | None = None) -> dict[str, Expression]:
    """The rules of the grammar of a schema."""
    return compile_schema(schema, options).rules
