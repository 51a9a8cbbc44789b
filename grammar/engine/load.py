"""Loading of compiled grammars into their engines, without importing the compiler."""

from __future__ import annotations

from ramify.grammar.automaton.masks.token_trie import token_trie
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.matcher import Grammar
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Enforcement


def load_grammar(engine: str, payload: bytes, enforcement: Enforcement, vocabulary: Vocabulary) -> Grammar:
    """Load a grammar that `compile_constraint` compiled for `vocabulary`. Raises `KeyError` for an unknown
    engine."""
    if engine == "llguidance":
        from ramify.grammar.engine.llguidance import LLGuidanceGrammar

        return LLGuidanceGrammar(payload, vocabulary, enforcement)
    if engine == "xgrammar":
        from ramify.grammar.engine.xgrammar import XGrammarGrammar

        return XGrammarGrammar(payload, vocabulary, enforcement)
    return {"pushdown": PushdownGrammar}[engine](payload, vocabulary, enforcement)


def prepare(vocabulary: Vocabulary) -> None:
    """Build the token trie before the first automaton needs it (0.1 s at 49k tokens)."""
    token_trie(vocabulary)


def prepare_library(backend: str, vocabulary: Vocabulary) -> None:
    """Import a backend's library and make its tokenizer, before its first grammar needs them.

    At 49k tokens this takes 0.1 s for llguidance, which "auto" uses as well, and 2 s and 300 MB for XGrammar.
    """
    if not vocabulary.stop_ids:
        return
    if backend in ("auto", "llguidance"):
        from ramify.grammar.engine import llguidance

        llguidance.tokenizer(vocabulary)
    elif backend == "xgrammar":
        from ramify.grammar.engine import xgrammar

        xgrammar.tokenizer(vocabulary)
