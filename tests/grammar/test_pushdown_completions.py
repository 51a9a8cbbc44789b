"""Shortest completions and budgets of the pushdown engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.grammar.rules.expression import Call, Chars, Expression, alt, chars, repeat, seq, text
from ramify.grammar.rules.rule_set import ROOT
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.naive_grammar import NaiveGrammar, grammars, vocabularies
from tests.grammar.test_pushdown import MANY, built, built_or_given_up, configurations
from tests.grammar.vocabularies import completion_of, mask_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("nondeterministic", [False, True])
@MANY
@given(grammars(), vocabularies(), st.integers(0, 1000))
def test_following_a_completion_works(
    nondeterministic: bool, rules: dict[str, Expression], vocabulary: Vocabulary, seed: int
) -> None:
    grammar = built_or_given_up(rules, vocabulary, nondeterministic)
    naive = NaiveGrammar(rules)
    for matcher, said, _ in configurations(grammar, seed):
        completion = completion_of(matcher, vocabulary)
        assert matcher.completion_tokens is not None
        assert len(completion) <= matcher.completion_tokens
        assert (matcher.completion_tokens == 0) == matcher.complete
        twin = matcher.fork()
        for token in completion:
            before = twin.completion_tokens
            assert twin.accept(token)
            assert before is not None
            assert twin.completion_tokens is not None
            assert twin.completion_tokens < before
        assert twin.complete
        assert naive.accepts(said + b"".join(vocabulary.tokens[token] for token in completion))


@pytest.mark.parametrize("nondeterministic", [False, True])
@MANY
@given(grammars(), vocabularies(), st.integers(0, 1000), st.integers(-1, 4))
def test_a_budget_allows_what_can_be_completed_within_it(
    nondeterministic: bool, rules: dict[str, Expression], vocabulary: Vocabulary, seed: int, spare: int
) -> None:
    grammar = built_or_given_up(rules, vocabulary, nondeterministic)
    for matcher, _, mask in configurations(grammar, seed):
        assert matcher.completion_tokens is not None
        budget = matcher.completion_tokens + spare
        allowed = mask_of(matcher, vocabulary, budget)
        for token in np.flatnonzero(mask):
            after = matcher.fork()
            assert after.accept(int(token))
            if not vocabulary.tokens[token]:
                assert allowed[token]
                continue
            assert after.completion_tokens is not None
            assert allowed[token] == (after.completion_tokens <= budget - 1)
        assert not (allowed & ~mask).any()
        assert allowed.any() or budget < matcher.completion_tokens


def test_with_a_budget_every_walk_ends_in_time() -> None:
    value = alt(
        seq(text("["), Call("value"), repeat(seq(text(", "), Call("value")), 0, None), text("]")),
        seq(text('"'), repeat(Chars(((0x20, 0x21), (0x23, 0x7E))), 0, None), text('"')),
    )
    vocabulary = Vocabulary(
        (b"", *(bytes([byte]) for byte in range(0x20, 0x7F)), b'"]', b", ", b"abcdef", b'["', b"]]]]"), (0,)
    )
    grammar = built({ROOT: Call("value"), "value": value}, vocabulary)
    least = grammar.matcher().completion_tokens
    assert least == 2
    for budget in range(least, 40):
        matcher = grammar.matcher()
        for left in range(budget, 0, -1):
            allowed = np.flatnonzero(mask_of(matcher, vocabulary, left))
            costs = {}
            for token in allowed:
                after = matcher.fork()
                assert after.accept(int(token))
                costs[int(token)] = -1 if after.finished else after.completion_tokens
            # The token that prolongs the text most.
            assert matcher.accept(max(costs, key=lambda token: costs[token] or 0))
            if matcher.finished:
                break
        assert matcher.complete, budget


def test_the_fewest_tokens_are_found_across_the_ends_of_rules() -> None:
    word = alt(*(text(letter * 9) for letter in "abc"), text("zz"))
    body = seq(text("<"), Call("w"), text("-"), Call("w"), text(">"), Call("w"), Call("w"))
    singles = tuple(bytes([byte]) for byte in b"<>-zabc")
    vocabulary = Vocabulary((b"", *singles, b"<zz-", b"zz>zzz"), (0,))
    matcher = built({ROOT: body, "w": word}, vocabulary).matcher()
    assert matcher.completion_tokens == 3
    assert completion_of(matcher, vocabulary) == [8, 9, 4]


def test_costs_in_counted_and_in_endless_repetitions() -> None:
    vocabulary = Vocabulary((b"", b"a", b"b", b"aaaa"), (0,))
    matcher = built({ROOT: seq(repeat(text("a"), 9, None), text("b"))}, vocabulary).matcher()
    assert matcher.completion_tokens == 4
    assert matcher.accept(3)
    assert matcher.completion_tokens == 3
    letters = chars(((0x61, 0x62),))
    assert built({ROOT: repeat(letters, 3, 2000)}, vocabulary, 5000).matcher().completion_tokens == 3
