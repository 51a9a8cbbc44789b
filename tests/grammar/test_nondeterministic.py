"""Nondeterministic automata: ambiguous grammars, and recursive rules that begin alike."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction import compiler
from ramify.grammar.engine.configurations import MOST_CONFIGURATIONS, NondeterministicMatcher
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.engine.remembering import RememberingMatcher
from ramify.grammar.matcher import mask_words, tokens_of
from ramify.grammar.rules.expression import (
    Alt,
    Call,
    Expression,
    Repeat,
    Seq,
    Text,
    alt,
    optional,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.gbnf import grammar_rules
from ramify.grammar.rules.left_recursion import without_left_recursion
from ramify.grammar.rules.rule_set import ROOT, productive
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.naive_grammar import NAMES, NaiveGrammar
from tests.grammar.test_pushdown import MANY, built, built_or_given_up
from tests.grammar.vocabularies import accept_some, accepts, compiled, completion_of, mask_of, tiny

pytestmark = pytest.mark.slow

OPEN_OR_TREE = {
    "type": "object",
    "anyOf": [
        {"properties": {"child": {"$ref": "#"}, "tree": {}}, "required": ["tree"]},
        {"properties": {"child": {}, "leaf": {"type": "integer"}}, "required": ["child", "leaf"]},
    ],
}


def test_a_schema_whose_options_are_read_beside_each_other() -> None:
    grammar = compiled(constraint.json_schema(OPEN_OR_TREE))
    assert isinstance(grammar.matcher(), NondeterministicMatcher)
    assert accepts(grammar, '{"child": [{"child": {}}], "leaf": 1}')
    assert accepts(grammar, '{"child": {"child": {"tree": 1}, "tree": {}}, "tree": []}')
    assert accepts(grammar, '{"child": {"child": {"child": 2}}, "leaf": 1}')
    assert accepts(grammar, '{"child": {"child": {"child": 2}, "leaf": 1}, "tree": 1}')
    assert not accepts(grammar, '{"child": {"child": {"child": 2}}, "tree": 1}')
    assert not accepts(grammar, '{"child": {"child": {"child": 2}, "leaf": ""}, "tree": 1}')
    assert not accepts(grammar, '{"child": [{"child": {}}], "leaf": null}')


UNIQUE_OR_ANY: dict[str, Any] = {
    "type": "object",
    "anyOf": [
        {
            "properties": {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
            "required": ["a"],
        },
        {
            "properties": {"tags": {"type": "array", "items": {"type": ["integer", "null"]}}},
            "required": ["b"],
        },
    ],
}


def test_texts_that_must_differ_in_one_of_the_ways() -> None:
    grammar = compiled(constraint.json_schema(UNIQUE_OR_ANY))
    assert isinstance(grammar, PushdownGrammar)
    assert grammar.automaton.nondeterministic
    assert isinstance(grammar.matcher(), RememberingMatcher)
    assert accepts(grammar, '{"tags": [1, 12, 2], "a": 1}')
    assert accepts(grammar, '{"tags": [1, 12, 1], "b": 1}')
    assert accepts(grammar, '{"tags": [1, 1], "b": 1, "a": 1}')
    assert not accepts(grammar, '{"tags": [1, 12, 1], "a": 1}')
    assert not accepts(grammar, '{"tags": [1, null], "a": 1}')
    assert not accepts(grammar, '{"tags": [""], "b": 1}')


def test_forced_text_beside_unique_items() -> None:
    grammar = compiled(constraint.json_schema(UNIQUE_OR_ANY))
    matcher = grammar.matcher()
    said = b'{"tags": [1, 12], "b": 1}'
    forced_somewhere = False
    for i in range(len(said)):
        for byte in matcher.forced_bytes():
            others = [other for other in range(256) if matcher.fork().accept_bytes(bytes([other]))]
            assert others == [byte], said[:i]
            assert not matcher.complete
            forced_somewhere = True
            break
        assert matcher.accept_bytes(said[i : i + 1])
    assert forced_somewhere


def test_budgets_of_texts_that_must_differ_in_one_of_the_ways() -> None:
    grammar = compiled(constraint.json_schema(UNIQUE_OR_ANY))
    validator = jsonschema.Draft202012Validator(UNIQUE_OR_ANY)
    least = grammar.matcher().completion_tokens
    assert least is not None
    for budget in range(least, least + 12):
        chooser = np.random.default_rng(budget)
        matcher = grammar.matcher()
        said = b""
        row = np.zeros(mask_words(tiny().size), np.int32)
        for left in range(budget, 0, -1):
            assert matcher.fill_mask(row, left)
            token = int(chooser.choice(tokens_of(row)))
            assert matcher.accept(token)
            said += tiny().tokens[token]
            if matcher.finished:
                break
        assert matcher.complete, (budget, said)
        validator.validate(json.loads(said))


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (
            'root ::= "a" root "a" | "b" root "b" | "a" | "b"',
            ["a", "aba", "abbba", "aabaa"],
            ["", "ab", "aab"],
        ),
        ('root ::= root root | "a" | "bc"', ["a", "abca", "aaaaaaaa", "bcbc"], ["", "b", "ac"]),
        ('root ::= root "+" root | root "*" root | [0-9]', ["1", "1+2*3", "1*2+3+4"], ["", "1+", "+1", "12"]),
        (
            'root ::= a\na ::= b "x" | "y"\nb ::= a "z" | c\nc ::= "w"',
            ["y", "wx", "yzx", "wxzx"],
            ["w", "x", "yz"],
        ),
        ('root ::= o root "a" | "b"\no ::= "x"?', ["b", "ba", "xba", "xxbaa"], ["", "x", "a", "xb", "xxba"]),
        ('root ::= ("a" | root "b")* "c"', ["c", "aac", "cbc", "acbcbc", "cbaac"], ["", "b", "cb", "acbbc"]),
        (
            'root ::= "if" root ("else" root)? | "x"',
            ["x", "ifx", "ififxelsex", "ifxelseifx"],
            ["if", "xelsex"],
        ),
        ("root ::= [a-z]+ | [a-z]+ root [0-9]", ["abc", "abc1", "abc12"], ["", "1", "ab12", "abc12345"]),
    ],
)
def test_ambiguous_and_left_recursive_grammars(grammar: str, inside: list[str], outside: list[str]) -> None:
    held = compiled(constraint.ebnf(grammar))
    for wanted, texts in ((True, inside), (False, outside)):
        for said in texts:
            assert accepts(held, said) == wanted, said
    rules = without_left_recursion(grammar_rules(grammar))
    naive = NaiveGrammar(rules)
    vocabulary = tiny()
    chooser = random.Random(0)
    matcher = held.matcher()
    said = b""
    for _ in range(12):
        mask = mask_of(matcher, vocabulary)
        for token in chooser.sample(range(vocabulary.size), 60):
            spelling = vocabulary.tokens[token]
            if spelling:
                assert mask[token] == naive.allows(said + spelling), (said, spelling)
        read = accept_some(matcher, mask, vocabulary, chooser)
        if not read:
            break
        said += read
        assert matcher.complete == naive.accepts(said)


def _bodies() -> st.SearchStrategy[Expression]:
    parts = st.sampled_from(
        [text("a"), text("b"), text(","), optional(text("(")), *(Call(name) for name in NAMES)]
    )
    sequences = st.lists(parts, min_size=1, max_size=3).map(lambda items: seq(*items))
    return st.lists(sequences, min_size=1, max_size=3).map(lambda options: alt(*options)) | sequences.map(
        lambda item: repeat(item, 0, 2)
    )


def _sentences(rules: dict[str, Expression], longest: int) -> set[str]:
    """All sentences of at most `longest` characters, by a fixed point, which left recursion does not
    disturb."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def texts(expression: Expression) -> set[str]:
        match expression:
            case Call(rule):
                return known[rule]
            case Text(literal):
                return {literal}
            case Alt(options):
                return {said for option in options for said in texts(option)}
            case Seq(parts):
                found = {""}
                for part in parts:
                    found = {
                        said + end for said in found for end in texts(part) if len(said + end) <= longest
                    }
                return found
            case Repeat(item, low, high):
                assert high is not None
                return {said for count in range(low, high + 1) for said in texts(seq(*[item] * count))}
        raise TypeError(expression)

    changed = True
    while changed:
        changed = False
        for name, body in rules.items():
            found = texts(body)
            changed |= len(found) > len(known[name])
            known[name] = found
    return known[ROOT]


IN_THE_LAST_ROUND: dict[str, Expression] = {
    ROOT: Repeat(Seq((Call("q"), Call("q"), Text("a"))), 0, 2),
    "q": Repeat(Call("p"), 0, 2),
    "p": Alt((Call(ROOT), Call("p"))),
}
"""The last round that is made removes the last left recursion."""


@MANY
@given(st.fixed_dictionaries({name: _bodies() for name in NAMES}))
@example(IN_THE_LAST_ROUND)
def test_all_short_texts_of_grammars_of_any_kind(rules: dict[str, Expression]) -> None:
    rules = productive(rules)
    assume(rules)
    vocabulary = Vocabulary((b"", b"a", b"b", b",", b"(", b"ab", b"aa", b",b", b"(a"), (0,))
    try:
        found = without_left_recursion(rules)
    except InvalidConstraint:
        assume(False)
        raise
    grammar = built_or_given_up(found, vocabulary, nondeterministic=True)
    wanted = _sentences(rules, 4)
    for length in range(5):
        for said in map("".join, itertools.product("ab,(", repeat=length)):
            matcher = grammar.matcher()
            taken = not said or matcher.accept_bytes(said.encode())
            assert (taken and matcher.complete) == (said in wanted), said


def test_more_ways_than_are_followed_leave_whole_texts() -> None:
    """Each nested rule is one of two that differ in their last character: 2 ** depth configurations."""
    rules = grammar_rules(
        'root ::= "(" p ")" \np ::= q | r\nq ::= "(" p ")" "x" | "."\nr ::= "(" p ")" "y" | "."'
    )
    grammar = built(rules, tiny(), nondeterministic=True)
    matcher = grammar.matcher()
    assert isinstance(matcher, NondeterministicMatcher)
    for _ in range(14):
        assert matcher.accept_bytes(b"(")
    assert len(matcher.configurations) <= MOST_CONFIGURATIONS
    completion = completion_of(matcher, tiny())
    assert completion
    assert all(map(matcher.accept, completion))
    assert matcher.complete


def test_what_takes_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_UNCALLED_STATES", 1000)
    monkeypatch.setattr(compiler, "SHORT", 5000)  # up to here repetitions are not counted by rules
    with pytest.raises(InvalidConstraint, match="more than 100000 states"):
        compiled(constraint.ebnf('root ::= ("a" | "b"){0,3000}'))
