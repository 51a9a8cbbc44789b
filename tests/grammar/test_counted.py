"""Long repetitions as rules that count with the stack, against the same grammars written out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction import counted
from ramify.grammar.automaton.construction.compiler import compile_grammar, compile_rules
from ramify.grammar.automaton.construction.nodes import TooLarge
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.engine.pushdown import PushdownGrammar
from ramify.grammar.matcher import mask_words, tokens_of
from ramify.grammar.rules.expression import EMPTY, Call, Expression, alt, chars, repeat, seq, text
from ramify.grammar.rules.rule_set import ROOT
from tests.grammar.languages import BYTES, schema_rules
from tests.grammar.vocabularies import accepts, compiled, tiny


def expression(chooser: random.Random, depth: int) -> Expression:
    match chooser.randrange(6 if depth else 2):
        case 0:
            return text("".join(chooser.choice("abé") for _ in range(chooser.randrange(1, 3))))
        case 1:
            return chars((ord(char), ord(char)) for char in chooser.sample("abcéê", 2))
        case 2:
            return seq(expression(chooser, depth - 1), expression(chooser, depth - 1))
        case 3:
            return alt(expression(chooser, depth - 1), expression(chooser, depth - 1))
        case 4:
            return alt(EMPTY, expression(chooser, depth - 1))
    low = chooser.randrange(9)
    return repeat(expression(chooser, depth - 1), low, chooser.choice([None, low + chooser.randrange(1, 12)]))


def grammar(chooser: random.Random) -> dict[str, Expression]:
    """A long repetition between other texts, of characters or of items that call a recursive rule."""
    item = expression(chooser, 1)
    low = chooser.randrange(10)
    high = chooser.choice([low + chooser.randrange(1, 40), None])
    before = expression(chooser, 1) if chooser.random() < 0.4 else EMPTY
    if chooser.random() < 0.5:
        after = expression(chooser, 2) if chooser.random() < 0.6 else text(".")
        return {ROOT: seq(before, repeat(item, low, high), after)}
    nested = seq(text("["), repeat(Call("x"), 0, 1), text("]"))
    return {
        ROOT: seq(before, repeat(seq(text(","), Call("x")), low, high), text(".")),
        "x": alt(item, nested),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_counted_repetition_has_the_masks_of_the_repetition(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BLOCK": 3, "ITEMS": 2, "BLOCKS": 2}.items():
        monkeypatch.setattr(counted, name, value)
    chooser = random.Random(seed)
    smaller = 0
    for _ in range(60):
        rules = grammar(chooser)
        try:
            counting = compile_rules(rules, BYTES, 2000, counting=True)
            plain = compile_rules(rules, BYTES, 2000)
        except (TooLarge, InvalidConstraint):
            continue
        smaller += counting.states < plain.states
        twins = [PushdownGrammar(each.to_bytes(), BYTES) for each in (counting, plain)]
        for _ in range(6):
            left, right = (twin.matcher() for twin in twins)
            for _ in range(60):
                rows = np.zeros((2, mask_words(BYTES.size)), np.int32)
                left.fill_mask(rows[0])
                right.fill_mask(rows[1])
                assert np.array_equal(*rows), rules
                assert (left.complete, left.completion_tokens) == (right.complete, right.completion_tokens)
                tokens = [token for token in tokens_of(rows[0]) if token not in BYTES.stop_ids]
                if not tokens:
                    break
                token = chooser.choice(tokens)
                assert left.accept(token)
                assert right.accept(token)
    assert smaller > 10


@pytest.mark.parametrize("most", [513, 1000, 4096, 5000, 70_000])
def test_long_strings_and_arrays_have_their_lengths_to_the_item(most: int) -> None:
    cases: list[tuple[Any, Any]] = [
        ({"maxLength": most}, "aé"),
        ({"minLength": most - 2, "maxLength": most}, 'é"'),
        ({"minLength": most}, "aa"),
        ({"minItems": 3, "maxItems": most}, [12]),
    ]
    lengths = {0, 1, 2, 3, 64, 65, 66, 256, 257, *(most + n for n in (-3, -2, -1, 0, 1, 2, 256, 3000))}
    for keywords, unit in cases:
        matchers = compiled(constraint.json_schema(keywords | {"type": _type_of(unit)}))
        for length in sorted(lengths):
            value = (unit * length)[:length]
            written = _written(value)
            matcher = matchers.matcher()
            accepted = matcher.accept_bytes(written.encode()) and matcher.complete
            low, high = _bounds(keywords)
            assert accepted == (low <= length <= high), (keywords, length)


def _type_of(unit: Any) -> str:
    return "string" if isinstance(unit, str) else "array"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    return "[" + ", ".join(map(str, value)) + "]"


def _bounds(keywords: dict[str, int]) -> tuple[int, float]:
    low = keywords.get("minLength", keywords.get("minItems", 0))
    return low, keywords.get("maxLength", keywords.get("maxItems", float("inf")))


@pytest.mark.parametrize("schema", [{"maxLength": 1_000_000}, {"maxLength": 2**63, "minLength": 1000}])
def test_a_very_long_string_takes_few_states(schema: Any) -> None:
    automaton = compile_grammar(schema_rules({"type": "string"} | schema), tiny())
    assert automaton.states < 1200
    assert compile_grammar(schema_rules({"type": "array", "maxItems": 10**9}), tiny()).states < 600


def test_where_long_strings_begin_alike_they_are_shorter() -> None:
    """Two strings are read at the same time, and one stack cannot count both."""
    grammar = compiled(
        constraint.json_schema({"anyOf": [{"type": "string", "maxLength": 5000}, {"maxLength": 9000}]})
    )
    assert accepts(grammar, '"' + "a" * 4096 + '"')
    assert not accepts(grammar, '"' + "a" * 9001 + '"')
    alike = {"anyOf": [{"type": "string", "minLength": 5000}, {"type": "string", "maxLength": 9000}]}
    with pytest.raises(InvalidConstraint, match="minLength above 4096"):
        compile_constraint(constraint.json_schema(alike), tiny(), "ramify")


def test_the_words_of_unique_items_are_not_counted_by_rules() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "maxLength": 9000}}
    grammar = compiled(constraint.json_schema(schema))
    assert accepts(grammar, '["a", "b"]')
    assert not accepts(grammar, '["a", "a"]')
    assert not accepts(grammar, '["' + "a" * 9001 + '"]')
