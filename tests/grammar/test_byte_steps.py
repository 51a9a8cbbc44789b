"""Readers of bytes, which exist in Python and in compiled code, held together by one table of grammars.

The walks over the token trie (`masks.walk`, `masks.nondeterministic_walk`) step in compiled code, the three
matchers in Python. On each text of the table all of them see the same configurations: every matcher accepts
exactly the tokens of every walk's mask.
"""

from __future__ import annotations

import numpy as np
import pytest

from ramify.grammar.automaton.construction.compiler import compile_rules
from ramify.grammar.engine.configurations import NondeterministicMatcher
from ramify.grammar.engine.pushdown import PushdownGrammar, PushdownMatcher
from ramify.grammar.engine.remembering import RememberingMatcher
from ramify.grammar.rules.gbnf import grammar_rules
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.vocabularies import mask_of, tokenise

TABLE = {
    "pushes and pops": ('root ::= "[" (root ("," root)*)? "]" | "x"', "[[],[x,[]]]"),
    "tail call": ('root ::= "-" tail\ntail ::= "(" tail ")" | "x" tail | "y"', "-xx((xy))"),
    "empty rule": ('root ::= "[" root "]" | ""', "[[[]]]"),
    "returns over several rules": ('root ::= a | a ","\na ::= b "."?\nb ::= "(" a ")" | "x"', "((x.)).,"),
    "characters of several bytes": ('root ::= [é-ü]+ ("日" root "本" | "x")', "éü日ê日ëx本本"),
    "a repetition in a called rule": ('root ::= "(" w root w ")" | "x"\nw ::= [a-w]{0,3}', "(ab(abcxd)e)"),
}
SINGLES = {bytes([byte]) for _, said in TABLE.values() for byte in said.encode()}
PAIRS = {said.encode()[i : i + n] for _, said in TABLE.values() for i in range(12) for n in (2, 3)}
VOCABULARY = Vocabulary((b"", *sorted(SINGLES | PAIRS - {b""}), b"]]]", b"]]],", b"x))"), (0,))


@pytest.mark.parametrize(("grammar", "said"), TABLE.values(), ids=TABLE)
def test_all_readers_take_the_same_steps(grammar: str, said: str) -> None:
    rules = grammar_rules(grammar)
    one, several = (
        PushdownGrammar(
            compile_rules(rules, VOCABULARY, nondeterministic=nondeterministic).to_bytes(), VOCABULARY
        )
        for nondeterministic in (False, True)
    )
    matchers = [
        PushdownMatcher.at_beginning(one),
        NondeterministicMatcher.at_beginning(one),
        NondeterministicMatcher.at_beginning(several),
        RememberingMatcher.at_beginning(one),
        RememberingMatcher.at_beginning(several),
    ]
    for token in tokenise(said, VOCABULARY):
        mask = mask_of(matchers[0], VOCABULARY)
        forced, complete = matchers[0].forced_bytes(), matchers[0].complete
        assert mask[token]
        for matcher in matchers:
            np.testing.assert_array_equal(mask_of(matcher, VOCABULARY), mask)
            accepted = [matcher.fork().accept(other) for other in range(VOCABULARY.size)]
            assert accepted == mask.tolist()
            assert (matcher.forced_bytes(), matcher.complete) == (forced, complete)
            assert matcher.accept(token)
    assert all(matcher.complete for matcher in matchers)
