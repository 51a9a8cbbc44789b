"""Arrays of unique items against the list of all their texts."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ramify.constraint import json_schema
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction.compiler import compile_grammar, compile_rules
from ramify.grammar.automaton.construction.nodes import TooLarge
from ramify.grammar.matcher import Matcher
from ramify.grammar.rules.expression import (
    Call,
    Chars,
    Expression,
    UniqueItem,
    alt,
    optional,
    repeat,
    seq,
    text,
)
from ramify.grammar.rules.rule_set import ROOT
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.test_pushdown import MANY, built
from tests.grammar.vocabularies import accept_some, compiled, completion_of, mask_of, tiny

pytestmark = pytest.mark.slow

WORDS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5, unique=True)
BYTES = (b"[", b"]", b",", b"a", b"b", b'"', b"(", b")")


def array(item: Expression, low: int, high: int | None) -> Expression:
    """Arrays of `low` to `high` unique items."""
    after_item = UniqueItem(item)
    more = repeat(seq(text(","), after_item), max(0, low - 1), None if high is None else high - 1)
    inside = seq(after_item, more)
    return seq(text("["), inside if low else optional(inside), text("]"))


def sentences(words: list[str], low: int, high: int) -> list[str]:
    return [
        "[" + ",".join(chosen) + "]"
        for count in range(low, min(high, len(words)) + 1)
        for chosen in itertools.permutations(words, count)
    ]


def check(matcher: Matcher, vocabulary: Vocabulary, texts: list[bytes], seed: int) -> None:
    """On a random walk, masks, ends and budgets are those that follow from the list of all `texts`."""
    chooser = random.Random(seed)
    said = b""
    for _ in range(9):
        mask = mask_of(matcher, vocabulary)
        assert matcher.complete == (said in texts)
        for token, spelling in enumerate(vocabulary.tokens):
            wanted = any(t.startswith(said + spelling) for t in texts) if spelling else said in texts
            assert mask[token] == wanted, (said, spelling)
            assert matcher.fork().accept(token) == wanted
        check_costs(matcher, vocabulary, mask, texts, said)
        read = accept_some(matcher, mask, vocabulary, chooser)
        if not read:
            break
        said += read


def check_begun(
    matcher: Matcher,
    vocabulary: Vocabulary,
    seed: int,
    may_begin: Callable[[bytes], bool],
    steps: int,
    *,
    closing: bytes,
    often: float,
) -> None:
    """On a random walk, masks and budgets are those that follow from the texts that `may_begin` a sentence.

    Tokens that end in one of `closing` come with the probability `often`: used items are there only where
    items end.
    """
    chooser = random.Random(seed)
    said = b""
    for _ in range(steps):
        mask = mask_of(matcher, vocabulary)
        for token, spelling in enumerate(vocabulary.tokens):
            if spelling:
                assert mask[token] == may_begin(said + spelling), (said, spelling)
        check_costs(matcher, vocabulary, mask, None, said)
        going_on = [int(token) for token in np.flatnonzero(mask) if vocabulary.tokens[token]]
        ending = [token for token in going_on if vocabulary.tokens[token][-1:] in closing]
        going_on = ending if ending and chooser.random() < often else going_on
        if not going_on:
            break
        token = chooser.choice(going_on)
        assert matcher.accept(token)
        said += vocabulary.tokens[token]


def check_costs(
    matcher: Matcher, vocabulary: Vocabulary, mask: np.ndarray, texts: list[bytes] | None, said: bytes
) -> None:
    completion, needed = completion_of(matcher, vocabulary), matcher.completion_tokens
    assert needed is not None
    assert len(completion) <= needed
    rest = b"".join(vocabulary.tokens[token] for token in completion)
    assert texts is None or said + rest in texts
    for budget in (needed, needed + 1, needed + 4):
        allowed = mask_of(matcher, vocabulary, budget)
        for token in range(vocabulary.size):
            after = matcher.fork()
            in_time = after.accept(token) and (after.finished or (after.completion_tokens or 0) < budget)
            assert allowed[token] == in_time, (said, vocabulary.tokens[token], budget)
        assert allowed.any()
    assert not (allowed & ~mask).any()


@MANY
@given(WORDS, st.integers(0, 3), st.integers(0, 4), st.data(), st.integers(0, 1000), st.booleans())
def test_few_words(
    words: list[str], low: int, more: int, data: st.DataObject, seed: int, called: bool
) -> None:
    high = max(1, low + more)
    assume(low <= len(words))
    pieces = st.text("ab,[]", min_size=2, max_size=4).map(str.encode)
    vocabulary = Vocabulary((b"", *BYTES, *data.draw(st.lists(pieces, max_size=20))), (0,))
    item = alt(*map(text, words))
    body = array(item, low, high)
    rules = {ROOT: seq(text("("), Call("array"), text(")")), "array": body} if called else {ROOT: body}
    matcher = built(rules, vocabulary).matcher()
    texts = [f"({said})" if called else said for said in sentences(words, low, high)]
    check(matcher, vocabulary, [said.encode() for said in texts], seed)


@MANY
@given(st.integers(0, 4), st.data(), st.integers(0, 1000))
def test_endless_words(low: int, data: st.DataObject, seed: int) -> None:
    string = seq(text('"'), repeat(Chars(((0x61, 0x62),)), 0, None), text('"'))
    nested = alt(string, seq(text("("), Call("value"), text(")")))
    pieces = st.text('ab,[]"()', min_size=2, max_size=5).map(str.encode)
    vocabulary = Vocabulary((b"", *BYTES, *data.draw(st.lists(pieces, max_size=25))), (0,))
    rules = {ROOT: array(Call("value"), low, None), "value": nested}
    matcher = built(rules, vocabulary).matcher()
    check_begun(matcher, vocabulary, seed, lambda said: may_begin(said, low), 14, closing=b'",)', often=0.7)


def may_begin(data: bytes, low: int) -> bool:
    """Whether some array of at least `low` different values begins with `data`."""
    if not b"[".startswith(data[:1]):
        return False
    used: set[bytes] = set()
    rest = data[1:]
    while rest:
        if rest[:1] == b"]" and not used:
            return rest == b"]" and low == 0
        found = re.match(rb'(\(*)(?:("[ab]*)(?:(")(\)*))?)?', rest)
        assert found is not None
        opened, _, closed, closing = found.groups()
        if closed is None:
            return found.end() == len(rest)
        missing = len(opened) - len(closing)
        value = rest[: found.end()] + b")" * missing
        if missing < 0 or value in used:
            return False
        rest = rest[found.end() :]
        if missing:
            return not rest
        used.add(value)
        if rest[:1] == b"]":
            return rest == b"]" and len(used) >= low
        if rest and rest[:1] != b",":
            return False
        rest = rest[1:]
        if rest[:1] == b"]":
            return False
    return True


def test_the_same_item_in_another_array_is_allowed() -> None:
    vocabulary = Vocabulary((b"", *BYTES), (0,))
    word = alt(text("a"), text("b"))
    rules = {
        ROOT: seq(text("("), Call("array"), text(","), Call("array"), text(")")),
        "array": array(word, 2, 2),
    }
    grammar = built(rules, vocabulary)
    for said, wanted in ((b"([a,b],[a,b])", True), (b"([a,b],[b,b])", False), (b"([a,a],[a,b])", False)):
        matcher = grammar.matcher()
        assert (matcher.accept_bytes(said) and matcher.complete) == wanted
    matcher = grammar.matcher(b"ab")
    assert matcher.forced_bytes() == b"ab(["
    assert matcher.accept_bytes(b"ab([a,b]")
    assert not matcher.accept_bytes(b",[a,a]")
    assert matcher.accept_bytes(b",[a,b])")
    matcher.rollback(1)
    assert matcher.forced_bytes() == b",["


def test_what_cannot_be_told_is_refused() -> None:
    vocabulary = Vocabulary((b"", *BYTES), (0,))
    words = alt(text("a"), text("b"))
    with pytest.raises(InvalidConstraint, match="fewer different items"):
        compile_rules({ROOT: array(words, 3, None)}, vocabulary)
    inner = array(words, 0, 2)
    with pytest.raises(TooLarge):
        compile_rules({ROOT: array(Call("inner"), 0, None), "inner": inner}, vocabulary)
    with pytest.raises(TooLarge):
        compile_rules({ROOT: seq(UniqueItem(words), UniqueItem(text("b")))}, vocabulary)
    with pytest.raises(TooLarge):
        compile_rules({ROOT: alt(UniqueItem(words), text("ab"))}, vocabulary)
    with pytest.raises(TooLarge):
        compile_rules({ROOT: UniqueItem(optional(words))}, vocabulary)
    with pytest.raises(InvalidConstraint, match="must differ"):
        compile_grammar({ROOT: UniqueItem(optional(words))}, vocabulary)


@pytest.mark.parametrize("any_order", [False, True])
def test_the_least_budget_counts_items_behind_a_tail_call(any_order: bool) -> None:
    """The items of a called rule cost more than the shortest ones, also where the call is all of its
    caller."""
    unique = {"type": "array", "uniqueItems": True, "items": {"type": "string"}, "minItems": 4}
    node = {
        "type": "object",
        "properties": {"u": unique, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "required": ["u"],
        "additionalProperties": False,
    }
    both = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"$ref": "#/$defs/n"}}}
    for schema in ({"$ref": "#/$defs/n"}, {**both, "required": ["x", "y"], "additionalProperties": False}):
        wanted = json_schema({**schema, "$defs": {"n": node}}, any_order=any_order)
        chooser = random.Random(0)
        for spare in range(8):
            matcher = compiled(wanted).matcher()
            least = matcher.completion_tokens
            assert least is not None
            budget = least + spare
            while not matcher.complete:
                allowed = np.flatnonzero(mask_of(matcher, tiny(), budget)).tolist()
                assert allowed, (spare, budget, matcher.completion_tokens)
                assert matcher.accept(chooser.choice(allowed))
                budget -= 1


@MANY
@given(st.integers(0, 2), st.integers(0, 1), st.data(), st.integers(0, 1000))
def test_arrays_within_items(low: int, inner_low: int, data: st.DataObject, seed: int) -> None:
    string = seq(text('"'), repeat(Chars(((0x61, 0x62),)), 0, None), text('"'))
    inner = array(string, inner_low, None)
    pieces = st.text('ab,[]"', min_size=2, max_size=5).map(str.encode)
    vocabulary = Vocabulary((b"", *BYTES, *data.draw(st.lists(pieces, max_size=25))), (0,))
    rules = {ROOT: array(seq(text("("), Call("inner"), text(")")), low, None), "inner": inner}
    matcher = built(rules, vocabulary).matcher()
    check_begun(
        matcher,
        vocabulary,
        seed,
        lambda said: nested_may_begin(said, low, inner_low),
        16,
        closing=b'",)]',
        often=0.8,
    )


def nested_may_begin(data: bytes, low: int, inner_low: int) -> bool:
    """Whether some array of different arrays, in parentheses, of different strings begins with `data`."""
    outer: list[bytes] = []
    inner: list[bytes] = []
    place = "start"
    began = string = 0
    for at, char in enumerate(data.decode()):
        here = data[at : at + 1]
        if place == "start" and char == "[":
            place = "outer begin"
        elif place in ("outer begin", "outer next") and char == "(":
            place, began = "paren", at
        elif place == "outer begin" and char == "]":
            if low:
                return False
            place = "end"
        elif place == "paren" and char == "[":
            place, inner = "inner begin", []
        elif place in ("inner begin", "inner next") and char == '"':
            place, string = "string", at
        elif place == "string" and here in b"ab":
            pass
        elif place == "string" and char == '"':
            inner.append(data[string : at + 1])
            place = "after string"
        elif place == "after string" and char in ",]":
            if len(set(inner)) < len(inner):
                return False
            place = "inner next" if char == "," else "inner end"
        elif place == "inner begin" and char == "]":
            if inner_low:
                return False
            place = "inner end"
        elif place == "inner end" and char == ")":
            outer.append(data[began : at + 1])
            place = "after paren"
        elif place == "after paren" and char in ",]":
            if len(set(outer)) < len(outer) or (char == "]" and len(outer) < low):
                return False
            place = "outer next" if char == "," else "end"
        else:
            return False
    # A value that has just ended is whole: nothing can make it different.
    if place == "after string":
        return len(set(inner)) == len(inner)
    if place == "inner end":
        return data[began:] + b")" not in outer
    return place != "after paren" or len(set(outer)) == len(outer)
