"""XGrammar as an oracle: its own readings of EBNF and of structural tags."""

from __future__ import annotations

import json

import xgrammar

from ramify.grammar.engine.xgrammar import tokenizer
from tests.grammar.vocabularies import tiny, tokenise


class Oracle:
    """A grammar that decides whether a text is one of its sentences."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled

    def accepts(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return all(map(matcher.accept_token, tokenise(text, tiny()))) and matcher.is_completed()


def of_source(source: str) -> Oracle:
    return Oracle(_compiler().compile_grammar(source))


def of_structural_tag(tag: object) -> Oracle:
    return Oracle(_compiler().compile_structural_tag(json.dumps(tag)))


def _compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(tokenizer(tiny()), max_threads=1, cache_enabled=False)
