"""Regular expressions: what they match, against Python's `re`, and what is refused."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.automaton.construction import byte_edges
from ramify.grammar.rules import regex_syntax
from ramify.grammar.rules.char_classes import character_property
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.languages import Language
from tests.grammar.vocabularies import accepts, compiled, tiny

MATCHES = [
    (r"[0-9]{4}-[0-9]{2}", ["2024-12"], ["2024-1", "2024-123", ""]),
    (r"\d{3}( ext\. \d+)?", ["123", "123 ext. 45"], ["123 ", "123 ext. "]),
    (r"a|bc|", ["", "a", "bc"], ["b", "abc"]),
    (r"(?:ab)*c+?", ["c", "ababcc"], ["ab", "abac"]),
    (r"^(yes|no)$", ["yes", "no"], ["yesno", "y"]),
    (r"(^a)|(b$)", ["a", "b"], ["ab"]),
    (r"(?i)straße", ["STRAßE", "straße"], ["strasse"]),
    (r"(?i)[a-c]x", ["Ax", "bX"], ["dx"]),
    (r".", ["a", "é", "日", "😀", "\t"], ["", "\n", "\r", "ab"]),
    (r"(?s).", ["\n", "a"], ["", "ab"]),
    (r"[^a-z]", ["A", "é", "\n", "😀"], ["a", ""]),
    (r"[\w.-]+", ["a-b.c_9"], ["é", "a b"]),
    (r"\W\S\D", ["é!x"], ["a!x", "é x"]),
    (r"日本語+", ["日本語", "日本語語"], ["日本"]),
    (r"\u00e9\x41\t\u{1F600}\cJ\0", ["éA\t😀\n\0"], ["éA"]),
    (r"\ud83d\ude00", ["😀"], ["😁"]),
    (r"\p{Lu}\P{L}", ["É1", "AΩ"[:1] + "-"], ["é1", "AB"]),
    (r"\p{Letter}\p{Uppercase_Letter}\P{gc=Nd}", ["éΩx"], ["éωx", "éΩ٣", "1Ωx"]),
    (r"\p{Script=Greek}+\p{sc=Grek}\p{scx=Cyrl}", ["αβж"], ["aβж", "αβg"]),
    (r"[\p{Alphabetic}\p{White_Space}]+", ["aé\u2003ⓐ日"], ["1", "-"]),
    (r"\p{ASCII}\P{ASCII}\p{Emoji}", ["aé😀", "~é1"], ["éa😀", "aéx"]),
    (r"\p{General_Category=Decimal_Number}\p{Lowercase}", ["٣ª"], ["aa"]),
    (r"[\]\\^-]+", ["]^-\\"], ["[", ""]),
    (r"a{2}b{1,}c{,2}", ["aab", "aabbcc"], ["ab", "aabccc"]),
    (r"a{x}{2}", ["a{x}}"], ["a", "a{x}"]),
    (r"(?P<year>\d)(?<month>\d)", ["12"], ["1"]),
    (r"\.\*\+\?\/\-", [".*+?/-"], [""]),
    (r"x*", ["", "xxxx"], ["y"]),
    (r"(a*)*b", ["b", "aab"], ["a"]),
    (r"((a|b){2}){2}", ["abba"], ["aba"]),
]


@pytest.mark.parametrize(("pattern", "matching", "other"), MATCHES)
def test_matches(pattern: str, matching: list[str], other: list[str]) -> None:
    language = Language(regex_syntax.full_match(pattern))
    for text in matching:
        assert language.accepts(text.encode()), text
    for text in other:
        assert not language.accepts(text.encode()), text


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r"a(?=b)", "lookahead"),
        (r"a(?!b)", "negative lookahead"),
        (r"(?<=a)b", "lookbehind"),
        (r"(?<!a)b", "negative lookbehind"),
        (r"(a)\1", "backreference"),
        (r"(?P<x>a)(?P=x)", "backreference"),
        (r"(?<x>a)\k<x>", "backreference"),
        (r"\bword\b", "word boundary"),
        (r"(?>a+)b", "atomic group"),
        (r"a++", "possessive"),
        (r"(a)?(?(1)b|c)", "conditional"),
        (r"(?x)a b", "(?x)"),
        (r"[[:alpha:]]", "POSIX"),
        (r"\p{Script=Geek}", "Script=Geek"),
        (r"\p{L&}", "L&"),
        (r"\p{^L}", "L"),
        (r"(^a)*", "anchor"),
    ],
)
def test_what_no_automaton_has_is_refused_by_name(pattern: str, name: str) -> None:
    with pytest.raises(InvalidConstraint, match=re.escape(name)):
        compiled(constraint.regex(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        *["(", ")", "(a", "a)", "[a", "[]", "[b-a]", "*a", "a**", "a{3,2}", "\\", r"\xZZ", r"\u12", r"\q"],
        *[r"\u{110000}", r"\ud800", "(?P<1>a)", "^*", r"\p{", "(?", "a{2}{3}"],
    ],
)
def test_bad_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidConstraint, match=r"position|group"):
        compiled(constraint.regex(pattern))


@pytest.mark.parametrize(
    "pattern", ["(" * 500 + ")" * 500, "(a{100}){1000}", "a{1000000}", "((a{9}){99}){999}"]
)
def test_excess_is_refused_before_it_costs_anything(pattern: str) -> None:
    with pytest.raises(InvalidConstraint, match=r"deeper|repetitions"):
        compiled(constraint.regex(pattern))


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a^b", r"\u0004"])
def test_a_pattern_without_texts_is_refused(pattern: str) -> None:
    tokens = tuple(b"" if token == b"\x04" else token for token in tiny().tokens)
    vocabulary = Vocabulary(tokens, tiny().stop_ids)
    with pytest.raises(InvalidConstraint, match="No text"):
        compiled(constraint.regex(pattern), vocabulary)


LITERALS = st.sampled_from([*"abc", "é", "日", r"\.", r"\d", r"\w", ".", "[ab]", "[^a]", r"[^\d]", r"\s"])
PATTERNS = st.recursive(
    LITERALS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = st.text(st.sampled_from("abcé日.1 _-"), max_size=6)


@settings(max_examples=150, deadline=None)
@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=8))
def test_full_match_agrees_with_python(pattern: str, texts: list[str]) -> None:
    language = Language(regex_syntax.full_match(pattern))
    wanted = re.compile(pattern, re.ASCII)
    for text in texts:
        assert language.accepts(text.encode()) == (wanted.fullmatch(text) is not None)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["{}", "^{}", "{}$", "^{}$", "(^{}|b$)"]), PATTERNS, TEXTS)
def test_search_agrees_with_python(frame: str, inner: str, text: str) -> None:
    pattern = frame.format(f"(?:{inner})")
    language = Language(regex_syntax.search(pattern))
    assert language.accepts(text.encode()) == (re.search(pattern, text, re.ASCII) is not None)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_utf8_spans_cover_a_range_exactly(a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    if high >= 0xD800 and low < 0xE000:
        low, high = (low, 0xD7FF) if low < 0xD800 else (0xE000, max(high, 0xE000))
    spans = list(byte_edges.utf8_spans(low, high))

    def size(span: byte_edges.Spans) -> int:
        count = 1
        for first, last in span:
            count *= last - first + 1
        return count

    assert sum(map(size, spans)) == high - low + 1
    for point in {low, high, (low + high) // 2}:
        data = chr(point).encode()
        assert any(
            len(span) == len(data) and all(x <= byte <= y for byte, (x, y) in zip(data, span, strict=True))
            for span in spans
        )


def test_a_text_that_is_whole_may_go_on() -> None:
    grammar = compiled(constraint.regex("a( b)?"))
    assert accepts(grammar, "a")
    assert accepts(grammar, "a b")


def test_character_properties_are_those_of_unicode() -> None:
    """Against Python's own tables, where both have assigned the character."""
    points = [chr(point) for point in range(0x3000)]
    for name, holds in {
        "Lu": lambda char: unicodedata.category(char) == "Lu",
        "Uppercase_Letter": lambda char: unicodedata.category(char) == "Lu",
        "Punctuation": lambda char: unicodedata.category(char).startswith("P"),
        "gc=Nd": str.isdecimal,
        "White_Space": lambda char: char.isspace() and char not in "\x1c\x1d\x1e\x1f",
        "ASCII": str.isascii,
    }.items():
        ranges = character_property(name)
        for char in points:
            if unicodedata.category(char) != "Cn":
                assert any(low <= ord(char) <= high for low, high in ranges) == holds(char), (name, char)
