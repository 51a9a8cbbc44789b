"""Grammars in Lark's notation: what is accepted, what a matcher does, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.engine import lark_rules
from ramify.grammar.engine.llguidance import LLGuidanceGrammar, compile_constraint
from ramify.grammar.rules import rule_set
from ramify.grammar.rules.expression import Alt, Call, Expression, Repeat, Seq
from ramify.grammar.rules.rule_set import ROOT
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.naive_grammar import grammars
from tests.grammar.vocabularies import STOP, accepts, mask_of, takes, tiny, tokenise

SUM = r"""
start: sum
sum: product (("+" | "-") product)*
product: NUMBER ("*" NUMBER)*
NUMBER: /[0-9]{1,3}/
%ignore " "
"""
NESTED = 'start: "(" start ")" | "x" | ""'


def compile_lark(source: str, vocabulary: Vocabulary) -> bytes:
    return compile_constraint(Constraint(kind="lark", source=source), vocabulary)


def grammar(source: str) -> LLGuidanceGrammar:
    return LLGuidanceGrammar(compile_lark(source, tiny()), tiny())


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        (SUM, ["1", "1+22*333", "1 + 2 - 3*4"], ["", "1+", "1111", "a"]),
        (NESTED, ["", "x", "((x))", "()"], ["(", "(x", "y"]),
        ('start: "日本" /[é-ü]/?', ["日本", "日本ö"], ["z", "日本z"]),
        ('start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
         ['{"a": 1}'], ['{"a": "b"}', "{}"]),
    ],
)  # fmt: skip
def test_what_is_accepted(source: str, inside: list[str], outside: list[str]) -> None:
    compiled = grammar(source)
    assert all(accepts(compiled, text) for text in inside)
    assert not any(accepts(compiled, text) for text in outside)


def test_bytes_count_as_one_token() -> None:
    matcher = grammar(SUM).matcher()
    assert matcher.accept_bytes(b"12+")
    assert not matcher.accept_bytes(b"3a")
    assert matcher.accept_bytes(b"3")
    assert matcher.complete
    assert matcher.accept(STOP)
    assert matcher.finished
    assert not matcher.accept_bytes(b"4")
    matcher.rollback(2)
    assert not matcher.complete
    matcher.rollback(1)
    assert takes(matcher, tokenise("7", tiny()), tiny())


def test_what_is_forced() -> None:
    matcher = grammar('start: "abc" ("d" | "e")').matcher()
    assert matcher.forced_bytes() == b"abc"
    assert takes(matcher, tokenise("abc", tiny()), tiny())
    assert matcher.forced_bytes() == b""
    assert takes(matcher, tokenise("d", tiny()), tiny())
    assert np.flatnonzero(mask_of(matcher, tiny())).tolist() == [STOP]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('start: "a', "line 1, column 10"),
        ('start: "a"\n  | b', 'line 1, column 8: unknown name: "b"'),
        ('foo: "a"', "start: … in Lark's notation, or root ::= …"),
        ('root = "a"', "start: … in Lark's notation, or root ::= …"),
        ("start: /(?=a)b/", "line 1, column 8"),
        ("start: /(a)\\1/", "line 1, column 8"),
        ('start: %json {"type": "strin"}', "Invalid type"),
        ("start: <[5]>", "tokens"),
        ("start: <|control|>", "tokens"),
        ('start: a\na[temperature=0.5]: "b"', "line 2: sampling attributes"),
        ('start: a\na[max_tokens=3]: "b"', "sampling attributes"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("start: /[^\\x00-\\x{10FFFF}]/", "line 1: 'start' matches no text"),
        ("@@", "line 1"),
        ("\x00", "The grammar"),
    ],
)
def test_what_is_refused_says_why(source: str, why: str) -> None:
    with pytest.raises(InvalidConstraint) as error:
        compile_lark(source, tiny())
    assert why in str(error.value)
    assert len(error.value.message) < 400
    assert error.value.field == "lark"


ALL = "/[^\\x00-\\x{10FFFF}]/"
PERMUTATION = """
start: perm::0x0
perm::_: "" %if is_ones([0:2])
  | "a" perm::set_bit(0) %if bit_clear(0)
  | "b" perm::set_bit(1) %if bit_clear(1)
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('start: start "a"', "line 1: 'start' never ends"),
        ('start: "x" start', "line 1: 'start' never ends"),
        ('start: x\nx: "0" x "1"', "line 2: 'x' never ends"),
        ('start: "q" a\na: "x" b\n\nb: "y" a\n | b', "line 2: 'a' never ends"),
        ('start: "x" | "y" b  // ends\nb: "z" b', "line 2: 'b' never ends"),
        ('start: "x" | ("y" b)+ | b*\n?b: b -> c', "line 2: 'b' never ends"),
        ('start: "a" ("b" c)*\nc: "d" c', "line 2: 'c' never ends"),
        ('start: "a" c{,3}\nc: "d" c', "line 2: 'c' never ends"),
        ('start: ("a" start)+', "line 1: 'start' never ends"),
        ('start: "a" (start | "b" start)', "line 1: 'start' never ends"),
        ('start: b{2,}\nb: "c" start', "line 1: 'start' never ends"),
        ('start: b ~ 2..3\nb: "c" start', "line 1: 'start' never ends"),
        ('start: "a" %json {\n"type": "null"\n} c\nc: c', "line 4: 'c' never ends"),
        ("start: A\nA: /[a-z]/ & /[0-9]/", "line 2: 'A' matches no text"),
        ('start: "a" | "b" B\nB: C & /b/\nC: "a" | "c"', "line 2: 'B' matches no text"),
        ('start: "a" b\n%import common.INT\nb: A INT\nA: INT & ~/[0-9]+/', "line 4: 'A' matches no text"),
        (f'start: "a" | b\nb: "b" {ALL}', "line 2: 'b' matches no text"),
        (PERMUTATION.replace('""', "perm::_"), "line 3: 'perm' never ends"),
    ],
)
def test_a_rule_that_no_text_satisfies_is_named(source: str, why: str) -> None:
    with pytest.raises(InvalidConstraint) as error:
        compile_lark(source, tiny())
    assert why in error.value.message
    assert error.value.remedy


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (PERMUTATION, "ba"),
        ('start: "a" start | [start] "b"', "aab"),
        ('start: "a" start?', "aa"),
        ('start: "a" start{,3}\nunused: unused', "aaa"),
        ('start: "a" start~0..2 -> x', "aa"),
        ('start: A\nA: /[ab]+/ & ~"b"', "ab"),
        ('%import common.INT\nstart: INT start_ /[^a]/\nstart_: "(" ")" | "|" ":"', "12|:b"),
        ('start: "a".."c" b\n  b: %regex {"substring_chars": ") & ("}\n  | "x"', "b& "),
        (f'start: "a" {ALL}*', "a"),
    ],
)
def test_rules_that_end_are_left_alone(source: str, text: str) -> None:
    assert accepts(grammar(source), text)


def written(expression: Expression) -> str:
    """A grammar in Lark's notation, with each character written as the letter a."""
    match expression:
        case Call(rule):
            return {ROOT: "start"}.get(rule, rule)
        case Alt(options):
            return f"({' | '.join(map(written, options))})" if options else ALL
        case Seq(parts):
            return f"({' '.join(map(written, parts))})" if parts else '""'
        case Repeat(item, low, high):
            return f"({written(item)}{{{low},{'' if high is None else high}}})"
    return '"a"'


@settings(max_examples=500, deadline=None)
@given(rules=grammars())
def test_rules_that_never_end_are_those_of_our_own_grammars(rules: dict[str, Expression]) -> None:
    source = "\n".join(f"{written(Call(name))}: {written(body)}" for name, body in rules.items())
    found = lark_rules.endless_rule(source, lambda part: ALL in part)
    named = rule_set.endless_rule(rules)
    assert (found and (found.rule, found.recursive)) == (named and (written(Call(named[0])), named[1]))


def test_signs_in_quotes_are_text() -> None:
    matcher = grammar('start: "<[5]>" /x\\[temperature\\]/ // <|x|>').matcher()
    assert matcher.accept_bytes(b"<[5]>x[temperature]")
    assert matcher.complete


def listed(count: int, form: str = '"word{}"') -> str:
    return " | ".join(form.format(number) for number in range(count))


ALTERNATIVES = {
    "texts": lambda count: f"start: {listed(count)}",
    "rules": lambda count: "\n".join(
        [f"start: {listed(count, 'r{}')}", *(f'r{number}: "w{number}"' for number in range(count))]
    ),
    "after a word": lambda count: f"start: WORD ({listed(count)})\nWORD: /[a-b]/",
    "a terminal": lambda count: f"start: WORD\nWORD: {listed(count)}",
}


@pytest.mark.parametrize("form", ALTERNATIVES)
def test_many_alternatives_are_taken_or_refused_at_once(form: str) -> None:
    make = ALTERNATIVES[form]
    compile_lark(make(490), tiny())
    if form == "a terminal":
        compile_lark(make(2100), tiny())
        return
    with pytest.raises(InvalidConstraint, match="max is 500") as error:
        compile_lark(make(510), tiny())
    assert error.value.field == "lark"
    assert "as one terminal" in (error.value.remedy or "")


def test_a_grammar_that_grows_too_ambiguous_ends_with_its_reason() -> None:
    matcher = grammar('start: start start start | start start | "a" | ""').matcher()

    def go_on() -> None:
        for _ in range(3000):
            mask_of(matcher, tiny())
            assert matcher.accept_bytes(b"a")

    with pytest.raises(InvalidConstraint, match="max is 500"):
        go_on()


def test_a_grammar_that_is_too_large_is_refused() -> None:
    rules = "\n".join(f'r{i}: "a" r{(i * 7) % 12_000} | "x{i}"' for i in range(12_000))
    start = " | ".join(f"r{i}" for i in range(12_000))
    with pytest.raises(InvalidConstraint, match=r"too complex|max is 500"):
        compile_lark(f"start: {start}\n{rules}", tiny())
