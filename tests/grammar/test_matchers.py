"""Promises of a matcher, on every engine."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import constraint
from ramify.grammar.matcher import Grammar, Matcher, mask_words, single_token
from tests.grammar.vocabularies import (
    CONTROL,
    STOP,
    accepts,
    compiled,
    mask_of,
    taken_back,
    takes,
    tiny,
    tokenise,
)

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "日本", 'q"']}, "maxItems": 3},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "age"],
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v"],
}
DIFFERENT: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
DIFFERENT_OR_ANY: dict[str, Any] = {
    "anyOf": [{"prefixItems": [DIFFERENT, {"const": 1}], "minItems": 2}, {"items": {}}]
}
GRAMMARS: dict[str, Grammar] = {
    "automaton": compiled(constraint.json_schema(PERSON)),
    "recursive": compiled(constraint.json_schema(TREE)),
    "regex": compiled(constraint.regex(r"([a-c]{1,3}é?-)*z")),
    "choices": compiled(constraint.choices(["ja", "jawohl", "nein", "日本", "日曜"])),
    "object": compiled(constraint.json_object()),
    "ebnf": compiled(constraint.ebnf('root ::= "(" root ")" | [0-9]+')),
    "ambiguous": compiled(constraint.ebnf('root ::= "a" root "a" | "b" root "b" | [a-c]{1,2}')),
    "different or any": compiled(constraint.json_schema(DIFFERENT_OR_ANY)),
    "different": compiled(constraint.json_schema(DIFFERENT)),
}
each_grammar = pytest.mark.parametrize("name", GRAMMARS)


def walk(matcher: Matcher, seed: int, steps: int) -> list[int]:
    """Random tokens that the mask allows; a stop token only where nothing else is allowed."""
    chooser = random.Random(seed)
    taken = []
    for _ in range(steps):
        allowed = np.flatnonzero(mask_of(matcher, tiny()))
        assert len(allowed), "a mask that allows nothing before the end"
        going_on = allowed[allowed != STOP]
        token = int(chooser.choice(going_on if len(going_on) else allowed))
        assert matcher.accept(token)
        taken.append(token)
        if matcher.finished:
            break
    return taken


@each_grammar
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_accept_and_mask_say_the_same(name: str, seed: int) -> None:
    matcher = GRAMMARS[name].matcher()
    walk(matcher, seed, seed % 20)
    if matcher.finished:
        return
    mask = mask_of(matcher, tiny())
    for token in range(tiny().size):
        twin = matcher.fork()
        assert twin.accept(token) == mask[token]
    assert not matcher.accept(-1)
    assert not matcher.accept(tiny().size)
    assert (mask_of(matcher, tiny()) == mask).all(), "a refused token changed the state"
    assert not mask[CONTROL]
    assert not mask[480:].any(), "padding"
    assert mask[STOP] == matcher.complete


@each_grammar
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_rollback_and_fork(name: str, seed: int) -> None:
    taken_back(GRAMMARS[name].matcher, random.Random(seed), steps=25)


@each_grammar
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_what_is_forced(name: str, seed: int) -> None:
    matcher = GRAMMARS[name].matcher()
    walk(matcher, seed, seed % 25)
    allowed = np.flatnonzero(mask_of(matcher, tiny()))
    forced = matcher.forced_bytes()
    for token in allowed:
        spelling = tiny().tokens[token]
        assert spelling.startswith(forced) or forced.startswith(spelling)
    if forced:
        assert not matcher.complete
        assert takes(matcher, tokenise(forced, tiny()), tiny())


@each_grammar
def test_after_the_end_nothing_is_allowed(name: str) -> None:
    matcher = GRAMMARS[name].matcher()
    seed = 0
    while not matcher.complete:
        matcher = GRAMMARS[name].matcher()
        walk(matcher, seed, seed % 40)
        seed += 1
    if not matcher.finished:
        assert matcher.accept(STOP)
    assert matcher.finished
    assert not mask_of(matcher, tiny()).any()
    assert not matcher.accept(STOP)
    assert matcher.forced_bytes() == b""
    matcher.rollback(1)
    assert not matcher.finished
    assert mask_of(matcher, tiny())[STOP]


def test_several_stop_tokens_are_allowed_together() -> None:
    vocabulary = type(tiny())(tiny().tokens, (STOP, 490))
    matcher = compiled(constraint.json_schema({"const": 1}), vocabulary).matcher()
    assert not mask_of(matcher, vocabulary)[[STOP, 490]].any()
    assert takes(matcher, tokenise("1", vocabulary), vocabulary)
    assert mask_of(matcher, vocabulary)[[STOP, 490]].all()
    assert matcher.accept(490)
    assert matcher.finished


def test_the_mask_is_written_into_a_row_of_a_shared_tensor() -> None:
    masks = np.full((3, mask_words(tiny().size)), -1, np.int32)
    for grammar in GRAMMARS.values():
        masks[:] = -1
        assert grammar.matcher().fill_mask(masks[1])
        assert (masks[[0, 2]] == -1).all()
        assert (masks[1] != -1).any()


def test_single_token() -> None:
    row = np.zeros(4, np.int32)
    assert single_token(row) is None
    for token in (0, 31, 32, 127):
        row[:] = 0
        row.view(np.uint32)[token // 32] = 1 << (token % 32)
        assert single_token(row) == token
    row[0] = 1
    assert single_token(row) is None


@pytest.mark.parametrize(
    "options", [["a"], ["", "a"], ["日本", "日曜", "é\n", "é\"'\\"], ["a", "aa", "aaa"], ["😀", "👍🏽"]]
)
def test_choices_are_exact(options: list[str]) -> None:
    grammar = compiled(constraint.choices(options))
    for option in options:
        assert accepts(grammar, option)
    for text in ("b", "日", "é", "aaaa", "😀😀"):
        assert not accepts(grammar, text)
    assert accepts(grammar, "") == ("" in options)


def test_thirty_thousand_choices() -> None:
    options = [f"option {i:x} of many" for i in range(30_000)]
    grammar = compiled(constraint.choices(options))
    assert accepts(grammar, options[13_337])
    assert not accepts(grammar, "option 7531 of many")


@pytest.mark.parametrize(
    "schema", [PERSON, TREE, {}, {"type": "array", "items": {"type": "number"}, "minItems": 2}]
)
def test_random_walks_end_in_valid_json(schema: dict[str, Any]) -> None:
    grammar = compiled(constraint.json_schema(schema))
    validator = jsonschema.Draft202012Validator(schema)
    ended = 0
    for seed in range(12):
        matcher = grammar.matcher()
        chooser = random.Random(seed)
        tokens: list[int] = []
        while not matcher.finished and len(tokens) < 150:
            allowed = np.flatnonzero(mask_of(matcher, tiny()))
            # A closing quote or bracket where there is one, every other time: random text seldom ends.
            closing = [t for t in allowed if tiny().tokens[t][:1] in (b'"', b"}", b"]") or t == STOP]
            tokens.append(int(chooser.choice(closing if closing and chooser.random() < 0.5 else allowed)))
            assert matcher.accept(tokens[-1])
        if matcher.finished:
            ended += 1
            text = b"".join(tiny().tokens[token] for token in tokens).decode()
            validator.validate(json.loads(text))
    assert ended >= 4
