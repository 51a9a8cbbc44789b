"""Masks made of whole groups of tokens, against every token on its own."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify import constraint
from ramify.grammar.automaton.characters import kind_lengths
from ramify.grammar.automaton.masks import token_trie
from ramify.grammar.automaton.pushdown import ENDLESS
from ramify.grammar.engine.pushdown import PushdownGrammar, PushdownMatcher
from ramify.grammar.rules.expression import Call, Chars, Expression, repeat, seq, text
from ramify.grammar.rules.rule_set import ROOT
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.test_pushdown import MANY, built_or_given_up
from tests.grammar.vocabularies import accept_some, compiled, mask_of, tokenise

pytestmark = pytest.mark.slow

LOWER = Chars(((0x61, 0x7A),))
ALPHANUMERIC = Chars(((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)))
PLAIN = Chars(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)))
DOT = Chars(((0x00, 0x09), (0x0B, 0x0C), (0x0E, 0x2027), (0x202A, 0xD7FF), (0xE000, 0x10FFFF)))
NO_SLASH = Chars(((0x20, 0x21), (0x23, 0x2E), (0x30, 0x5B), (0x5D, 0x7FF)))
SETS = st.sampled_from(
    [LOWER, ALPHANUMERIC, PLAIN, DOT, NO_SLASH, Chars(((0x20, 0x7E),)), Chars(((0x61, 0x66),))]
)
COUNTS = st.sampled_from([(0, None), (1, None), (0, 3), (2, 9), (0, 40)])
LETTERS = [*"abcz", "A", "Z", "0", " ", "-", '"', "\\", "\n", "é", "日", "😀", "\u2028", "\x7f"]


def one_by_one(matcher: PushdownMatcher, vocabulary: Vocabulary) -> np.ndarray:
    return np.array([matcher.fork().accept(token) for token in range(vocabulary.size)])


@MANY
@given(
    st.lists(st.tuples(SETS, COUNTS), min_size=1, max_size=2),
    st.sampled_from(["", '"', "ab", "-", "é", "Z"]),
    st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=9), max_size=40),
    st.integers(0, 1000),
    st.integers(0, 6),
)
def test_groups_of_tokens_are_exact(
    parts: list[tuple[Chars, tuple[int, int | None]]],
    between: str,
    tokens: list[str],
    seed: int,
    spare: int,
) -> None:
    singles = {bytes([byte]) for byte in "".join(LETTERS).encode()}
    long = [b"a" * 33, b"b" * 40, "é".encode() * 35, b"Z0" * 20]
    vocabulary = Vocabulary((b"", *sorted(singles), *(token.encode() for token in tokens), *long), (0,))
    body: Expression = seq(*(seq(repeat(chars, *count), text(between)) for chars, count in parts))
    # In a rule that is called from two places, so that tokens reach beyond its end.
    rules = {ROOT: seq(text("-"), Call("w"), text("\n"), Call("w")), "w": body}
    grammar = built_or_given_up(rules, vocabulary)
    matcher = grammar.matcher()
    chooser = random.Random(seed)
    for _ in range(8):
        mask = mask_of(matcher, vocabulary)
        assert (mask == one_by_one(matcher, vocabulary)).all()
        assert matcher.completion_tokens is not None
        allowed = mask_of(matcher, vocabulary, matcher.completion_tokens + spare)
        for token in np.flatnonzero(mask):
            after = matcher.fork()
            assert after.accept(int(token))
            in_time = after.finished or (after.completion_tokens or 0) < matcher.completion_tokens + spare
            assert allowed[token] == in_time
        if not accept_some(matcher, mask, vocabulary, chooser):
            break


LOOPS_OF = {
    "negated class": ("^[^/]*$", ["a", "-é日b"], [b'c"', b"/", b"d/", b"d\\\\", "日".encode()[:2]]),
    "first character": ("^[a-z][-a-z0-9]*$", ["a", "b-9"], [b'c"', b"-", b"A", b"dA"]),
    "same characters in both": ("^(a|[a-z][a-z]*/)$", ["a", "bc"], [b'c"', b"d/", b'd/"', b"/"]),
}


@pytest.mark.parametrize(("pattern", "begin", "more"), LOOPS_OF.values(), ids=LOOPS_OF)
def test_loops_are_exact_and_used(
    pattern: str, begin: list[str], more: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = [bytes([byte]) for byte in range(0x20, 0x7F)] + [bytes([byte]) for byte in range(0x80, 0xF5)]
    pairs = [a + b for a in letters[:95] for b in (b"x", b"-", b"7", "é".encode())]
    known = {*letters, *pairs}
    vocabulary = Vocabulary((b"", *letters, *pairs, *(each for each in more if each not in known)), (0,))
    grammar = compiled(constraint.json_schema({"type": "string", "pattern": pattern}), vocabulary)
    assert isinstance(grammar, PushdownGrammar)
    monkeypatch.setattr(token_trie, "MOST_RESTS", 1)
    matcher = grammar.matcher()
    assert isinstance(matcher, PushdownMatcher)
    for piece in ('"', *begin):
        assert matcher.accept_bytes(piece.encode())
        assert (mask_of(matcher, vocabulary) == one_by_one(matcher, vocabulary)).all()
        left = matcher.completion_tokens
        assert left is not None
        allowed = mask_of(matcher, vocabulary, left)
        assert not (allowed & ~mask_of(matcher, vocabulary)).any()
    found = grammar.trie.loops.values()
    assert any(loop is not None and loop.row.any() for loop in found)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "free": {"type": "string"},
        "short": {"type": "string", "maxLength": 9},
        "id": {"type": "string", "pattern": "^[a-z][A-Za-z0-9]{2,50}$"},
        "number": {"type": "number"},
        "any": True,
    },
    "required": ["free", "short", "id", "number", "any"],
}
TEXT = (
    '{"free": "Some \\"text\\" é日", "short": "12345678", "id": "aB9c", "number": -1.5, '
    '"any": [{"x": ["deep \\u00e9"]}, null], "more": {}}'
)


def test_masks_on_a_real_vocabulary(smollm2: Vocabulary) -> None:
    grammar = compiled(constraint.json_schema(SCHEMA), smollm2)
    assert isinstance(grammar, PushdownGrammar)
    json.loads(TEXT)
    matcher = grammar.matcher()
    assert isinstance(matcher, PushdownMatcher)
    chooser = random.Random(1)
    runs = set()
    for token in tokenise(TEXT, smollm2):
        ((state, _),) = matcher.configurations
        runs.add((grammar.automaton.arrays.run[state], grammar.automaton.arrays.run_kind[state]))
        mask = mask_of(matcher, smollm2)
        tried = [*chooser.sample(range(smollm2.size), 3000), *smollm2.stop_ids]
        tried += [t for t, spelling in enumerate(smollm2.tokens) if b'"' in spelling or b"}" in spelling]
        for other in tried:
            assert matcher.fork().accept(other) == mask[other], smollm2.tokens[other]
        assert matcher.accept(token)
    assert matcher.complete
    assert (ENDLESS, 0) in runs
    assert any(0 < length < 10 and kind == 0 for length, kind in runs)
    assert any(kind == 1 for _, kind in runs)


@pytest.mark.parametrize(
    ("spelling", "lengths"),
    [
        (b"abc", (3, 3, 3)),
        (b"aB1", (3, 3, 255)),
        (b" a", (2, 255, 255)),
        ("日é".encode(), (2, 255, 255)),
        (b'a"', (255, 255, 255)),
        (b"\\", (255, 255, 255)),
        (b"a\n", (255, 255, 255)),
        ("a\u2028".encode(), (255, 255, 255)),
        (b"\x7f", (1, 255, 255)),
        ("é".encode()[:1], (255, 255, 255)),
        (b"a" * 300, (255, 255, 255)),
    ],
)
def test_kinds_of_tokens(spelling: bytes, lengths: tuple[int, int, int]) -> None:
    assert kind_lengths(spelling) == lengths
