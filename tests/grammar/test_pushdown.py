"""The pushdown engine against a naive reading of the same grammar, token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction.compiler import compile_rules
from ramify.grammar.automaton.construction.nodes import TooLarge
from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.matcher import Matcher
from ramify.grammar.rules.expression import Call, Expression, alt, repeat, seq, text
from ramify.grammar.rules.rule_set import ROOT, productive
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.naive_grammar import NaiveGrammar, grammars, vocabularies
from tests.grammar.vocabularies import accept_some, accepts, mask_of, tiny, tokenise

pytestmark = pytest.mark.slow

MANY = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


def built(
    rules: Mapping[str, Expression],
    vocabulary: Vocabulary,
    most_states: int = 300,
    nondeterministic: bool = False,
) -> PushdownGrammar:
    return PushdownGrammar(
        compile_rules(rules, vocabulary, most_states, nondeterministic=nondeterministic).to_bytes(),
        vocabulary,
    )


def built_or_given_up(
    rules: Mapping[str, Expression], vocabulary: Vocabulary, nondeterministic: bool = False
) -> PushdownGrammar:
    rules = productive(rules)
    assume(rules)
    try:
        return built(rules, vocabulary, nondeterministic=nondeterministic)
    except TooLarge:
        assume(False)
        raise


def configurations(
    grammar: PushdownGrammar, seed: int, steps: int = 12
) -> Iterator[tuple[Matcher, bytes, np.ndarray]]:
    """A random walk: the matcher, the text so far, and the mask there."""
    chooser = random.Random(seed)
    matcher = grammar.matcher()
    said = b""
    for _ in range(steps):
        mask = mask_of(matcher, grammar.vocabulary)
        yield matcher, said, mask
        read = accept_some(matcher, mask, grammar.vocabulary, chooser)
        if not read:
            return
        said += read


@pytest.mark.parametrize("nondeterministic", [False, True])
@MANY
@given(grammars(), vocabularies(), st.integers(0, 1000))
def test_masks_are_those_of_a_naive_reading(
    nondeterministic: bool, rules: dict[str, Expression], vocabulary: Vocabulary, seed: int
) -> None:
    grammar = built_or_given_up(rules, vocabulary, nondeterministic)
    naive = NaiveGrammar(rules)
    for matcher, said, mask in configurations(grammar, seed):
        assert matcher.complete == naive.accepts(said)
        for token, spelling in enumerate(vocabulary.tokens):
            wanted = naive.allows(said + spelling) if spelling else token == 0 and naive.accepts(said)
            assert mask[token] == wanted, (said, spelling)
            assert matcher.fork().accept(token) == wanted


@pytest.mark.parametrize("nondeterministic", [False, True])
@MANY
@given(grammars(), vocabularies(), st.integers(0, 1000))
def test_what_is_forced_is_all_that_may_come(
    nondeterministic: bool, rules: dict[str, Expression], vocabulary: Vocabulary, seed: int
) -> None:
    grammar = built_or_given_up(rules, vocabulary, nondeterministic)
    naive = NaiveGrammar(rules)
    for matcher, said, _ in configurations(grammar, seed):
        forced = matcher.forced_bytes()
        for i in range(min(len(forced), 40) + 1):
            here = said + forced[:i]
            following = [byte for byte in range(256) if naive.allows(here + bytes([byte]))]
            if i == len(forced):
                assert len(following) != 1 or naive.accepts(here)
            else:
                assert following == [forced[i]]
                assert not naive.accepts(here)


def test_a_recursive_grammar_of_any_depth() -> None:
    rules = {ROOT: alt(seq(text("("), Call(ROOT), text(")")), text("x"))}
    grammar = built(rules, tiny())
    assert grammar.automaton.states < 10
    for depth in (0, 1, 5, 300):
        assert accepts(grammar, "(" * depth + "x" + ")" * depth)
    assert not accepts(grammar, "((x)")
    assert not accepts(grammar, "(x))")


def test_a_token_may_close_more_than_a_walk_is_shown_at_first() -> None:
    closing = b")" * 40
    vocabulary = Vocabulary((b"", b"(", b")", b"x", closing), (0,))
    rules = {ROOT: alt(seq(text("("), Call(ROOT), text(")")), text("x"))}
    grammar = built(rules, vocabulary)
    for depth, wanted in ((39, False), (40, True), (41, True)):
        matcher = grammar.matcher()
        assert matcher.accept_bytes(b"(" * depth + b"x")
        assert mask_of(matcher, vocabulary)[4] == wanted
        assert matcher.accept(4) == wanted
        assert matcher.complete == (depth == 40)


def test_rules_that_are_used_often_are_there_once() -> None:
    word = seq(*(alt(text(a), text(b)) for a, b in zip("abcdefgh", "ABCDEFGH", strict=True)))
    once = built({ROOT: seq(text("-"), Call("w")), "w": word}, tiny()).automaton.states
    often = seq(*(seq(text("-"), Call("w")) for _ in range(50)))
    assert built({ROOT: often, "w": word}, tiny(), 5000).automaton.states < once + 150


def test_what_has_no_deterministic_automaton_is_given_up() -> None:
    palindromes = alt(seq(text("a"), Call(ROOT), text("a")), seq(text("b"), Call(ROOT), text("b")), text("a"))
    with pytest.raises(TooLarge):
        compile_rules({ROOT: palindromes}, tiny(), 2000)


@pytest.mark.parametrize("body", [seq(Call(ROOT), text("a")), alt(seq(Call(ROOT), text("a")), text("b"))])
def test_a_rule_that_begins_with_itself_is_given_up(body: Expression) -> None:
    with pytest.raises((TooLarge, InvalidConstraint)):
        compile_rules({ROOT: body}, tiny(), 2000)


def test_the_packed_form_survives_its_bytes() -> None:
    automaton = compile_rules({ROOT: repeat(alt(text("aé"), text("b")), 0, 7)}, tiny())
    again = PushdownAutomaton.from_bytes(automaton.to_bytes())
    for read, packed in zip(again.arrays, automaton.arrays, strict=True):
        assert (read == packed).all()
    assert again.to_bytes() == automaton.to_bytes()


def test_bytes_that_no_token_has_are_no_way_out() -> None:
    vocabulary = Vocabulary((b"", b"a", b"b", b"ab"), (0,))
    grammar = built(
        {ROOT: alt(text("ab"), text("ac"), seq(text("b"), alt(text("c"), text("a"))))}, vocabulary
    )
    assert mask_of(grammar.matcher(), vocabulary).tolist() == [False, True, True, True]
    matcher = grammar.matcher()
    assert matcher.accept_bytes(b"b")
    assert matcher.forced_bytes() == b"a"
    with pytest.raises(InvalidConstraint, match="can spell"):
        built({ROOT: text("c")}, vocabulary)


def test_text_and_tokens_are_taken_back_alike() -> None:
    grammar = built({ROOT: repeat(alt(text("ab"), text("c")), 0, None)}, tiny())
    matcher = grammar.matcher()
    assert matcher.accept_bytes(b"abca")
    assert not matcher.accept_bytes(b"bx")
    assert matcher.forced_bytes() == b"b"
    assert matcher.accept_bytes(b"b")
    matcher.rollback(1)
    assert not matcher.complete
    assert all(matcher.accept(token) for token in tokenise("bc", tiny()))
    assert matcher.complete
    matcher.rollback(2 + len(tokenise("bc", tiny())) - 1)
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(1)
