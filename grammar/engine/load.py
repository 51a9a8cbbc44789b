"""Loads a compiled grammar into its engine, without importing the compiler."""

from __future__ import annotations

from ramify.grammar.automaton.token_trie import token_trie
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.matcher import Grammar
from ramify.grammar.vocabulary import Vocabulary


def load_grammar(engine: str, payload: bytes, vocabulary: Vocabulary) -> Grammar:
    """The grammar that `compile_constraint` compiled for `vocabulary`. Raises `KeyError` for unknown
    engines."""
    if engine == "llguidance":
        from ramify.grammar.engine.lark import LarkGrammar

        return LarkGrammar(payload, vocabulary)
    return {"pushdown": PushdownGrammar}[engine](payload, vocabulary)


def prepare(vocabulary: Vocabulary) -> None:
    """Build the token trie ahead of the first automaton (0.1 s at 49k tokens)."""
    token_trie(vocabulary)


def prepare_lark(vocabulary: Vocabulary) -> None:
    """Make llguidance's tokenizer ahead of the first Lark grammar (0.1 s at 49k tokens)."""
    from ramify.grammar.engine import lark

    if vocabulary.stop_ids:
        lark.tokenizer(vocabulary)
