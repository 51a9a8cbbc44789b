"""Loads a compiled grammar into its engine, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from ramify.grammar.automaton.token_trie import token_trie
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.matcher import Grammar
from ramify.grammar.vocabulary import Vocabulary


def load_grammar(engine: str, payload: bytes, vocabulary: Vocabulary) -> Grammar:
    """The grammar that `compile_constraint` made for the same vocabulary."""
    return _LOADERS[engine](payload, vocabulary)


def prepare(vocabulary: Vocabulary) -> None:
    """Do now what the first automaton would otherwise wait for (0.1 s at 49k tokens)."""
    token_trie(vocabulary)


def prepare_lark(vocabulary: Vocabulary) -> None:
    """Do now what the first Lark grammar would otherwise wait for (0.1 s at 49k tokens)."""
    if vocabulary.stop_ids:
        _llguidance().tokenizer(vocabulary)


def _llguidance() -> ModuleType:
    from ramify.grammar.engine import lark

    return lark


_LOADERS: dict[str, Callable[[bytes, Vocabulary], Grammar]] = {
    "pushdown": PushdownGrammar,
    "llguidance": lambda payload, vocabulary: _llguidance().LarkGrammar(payload, vocabulary),
}
