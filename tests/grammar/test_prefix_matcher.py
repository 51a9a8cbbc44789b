"""Matchers whose first tokens must spell a prefix, on every engine."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify import constraint
from ramify.grammar.engine.thinking import FreeGrammar
from ramify.grammar.rules.expression import Expression
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.naive_grammar import LETTERS, NaiveGrammar, grammars, vocabularies
from tests.grammar.test_pushdown import MANY, built_or_given_up
from tests.grammar.vocabularies import accept_some, compiled, completion_of, mask_of, tiny


@MANY
@given(grammars(), vocabularies(), st.text(LETTERS, min_size=1, max_size=5), st.integers(0, 1000))
def test_masks_are_those_of_a_naive_reading(
    rules: dict[str, Expression], vocabulary: Vocabulary, prefix: str, seed: int
) -> None:
    grammar = built_or_given_up(rules, vocabulary)
    naive = NaiveGrammar(rules)
    lead = prefix.encode()

    def accepts(data: bytes) -> bool:
        return data.startswith(lead) and naive.accepts(data[len(lead) :])

    def allows(data: bytes) -> bool:
        return lead.startswith(data) or (data.startswith(lead) and naive.allows(data[len(lead) :]))

    matcher = grammar.matcher(lead)
    chooser = random.Random(seed)
    said = b""
    for _ in range(6):
        mask = mask_of(matcher, vocabulary)
        assert matcher.complete == accepts(said)
        for token, spelling in enumerate(vocabulary.tokens):
            wanted = allows(said + spelling) if spelling else token == 0 and accepts(said)
            assert mask[token] == wanted, (said, spelling)
            assert matcher.fork().accept(token) == wanted
        completion = completion_of(matcher, vocabulary)
        assert matcher.completion_tokens is not None
        assert len(completion) <= matcher.completion_tokens
        allowed = mask_of(matcher, vocabulary, matcher.completion_tokens)
        assert not (allowed & ~mask).any()
        assert allowed[completion[0] if completion else 0]
        twin = matcher.fork()
        assert all(map(twin.accept, completion))
        assert twin.complete
        read = accept_some(matcher, mask, vocabulary, chooser)
        if not read:
            break
        said += read


@pytest.mark.parametrize("nondeterministic", [False, True])
def test_a_prefix_on_either_engine(nondeterministic: bool) -> None:
    schema = {"type": "object", "properties": {"name": {"const": "é"}}, "required": ["name"]}
    schema["additionalProperties"] = False
    grammar = compiled(constraint.json_schema(schema))
    if nondeterministic:
        grammar = compiled(
            constraint.ebnf(
                'root ::= "{\\"name\\": \\"é\\"}" | "{\\"name\\": \\"" p\np ::= "x" p "x" | "x" p "y"'
            )
        )
    matcher = grammar.matcher(b"the ")
    assert matcher.forced_bytes().startswith(b'the {"name": "')
    mask = mask_of(matcher, tiny())
    prefix = b'the {"name": "\xc3\xa9"}'
    assert [prefix.startswith(spelling) and spelling != b"" for spelling in tiny().tokens] == mask.tolist()
    assert matcher.accept_bytes(b"th")
    assert not matcher.complete
    assert not matcher.accept_bytes(b"e_")
    assert matcher.accept_bytes(b'e {"na')
    assert matcher.forced_bytes().startswith(b'me": "')
    matcher.rollback(1)
    assert matcher.forced_bytes().startswith(b'e {"name": "')
    with pytest.raises(ValueError, match="take back"):
        matcher.rollback(2)


def test_free_text_after_a_prefix() -> None:
    matcher = FreeGrammar(tiny()).matcher(b'"na')
    mask = mask_of(matcher, tiny())
    assert [
        bool(spelling) and (spelling.startswith(b'"na') or b'"na'.startswith(spelling))
        for spelling in tiny().tokens
    ] == mask.tolist()
    assert matcher.accept_bytes(b'"n')
    assert not matcher.accept_bytes(b"b")
    assert matcher.accept_bytes(b"abc")
    assert not matcher.fill_mask(np.zeros(16, np.int32))
    matcher.rollback(1)
    assert matcher.fill_mask(np.zeros(16, np.int32))
