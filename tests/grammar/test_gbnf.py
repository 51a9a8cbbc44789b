"""Grammars in GBNF: what they match, and the positions of errors."""

from __future__ import annotations

import pytest

from ramify import constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.rules.expression import ANY_CHAR, Call, Chars, Repeat, Text, alt, seq
from ramify.grammar.rules.gbnf import grammar_rules
from ramify.grammar.rules.rule_set import ROOT
from tests.grammar.vocabularies import accepts, compiled
from tests.grammar.xgrammar_oracle import of_source

LETTERS = Chars(((ord("a"), ord("z")),))


def test_the_notation() -> None:
    rules = grammar_rules(
        """
        # a comment
        root ::= "a\\n\\u00e9\\"" item* | item{2} (item | "x")+  # another
                 | item{2,} item{,3}
                 | .
        item ::= [a-z] | [^a-z\\]\\-"]{1,4}
        """
    )
    item = Call("item")
    others = Chars(tuple(r for r in grammar_rules('root ::= [^a-z"\\]\\-]')[ROOT].ranges))  # type: ignore[union-attr]
    assert rules == {
        "root": alt(
            seq(Text('a\né"'), Repeat(item, 0, None)),
            seq(Repeat(item, 2, 2), Repeat(alt(item, Text("x")), 1, None)),
            seq(Repeat(item, 2, None), Repeat(item, 0, 3)),
            ANY_CHAR,
        ),
        "item": alt(LETTERS, Repeat(others, 1, 4)),
    }
    assert others.ranges[0][0] == 0
    assert all(low > ord("z") or high < ord("a") for low, high in others.ranges)


def test_a_rule_goes_on_until_the_next() -> None:
    rules = grammar_rules('root ::= a\n  b\na ::=\n "x"\nb::="y"|\n"z"')
    assert rules[ROOT] == seq(Call("a"), Call("b"))
    assert rules["b"] == alt(Text("y"), Text("z"))


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        ('root ::= "(" root ")" | [0-9]+', ["1", "((12))"], ["(1", "()", "a"]),
        ('root ::= list\nlist ::= item | list "," item\nitem ::= [a-c]', ["a", "a,b,c"], ["", "a,", "d"]),
        ("root ::= [\\u65e5\\x41-C]{2}", ["日A", "CB"], ["A", "日日日", "本A"]),
        ('root ::= ("a" | "")  "b"?', ["", "a", "ab", "b"], ["ba"]),
        ('root ::= "a" [^"]* ', ["a", "a\nb"], ['a"']),
    ],
)
def test_what_is_read_is_what_xgrammar_reads(grammar: str, inside: list[str], outside: list[str]) -> None:
    ours, theirs = compiled(constraint.ebnf(grammar)), of_source(grammar)
    for wanted, texts in ((True, inside), (False, outside)):
        assert [theirs.accepts(text) for text in texts] == [wanted] * len(texts)
        assert [accepts(ours, text) for text in texts] == [wanted] * len(texts)


@pytest.mark.parametrize(
    ("grammar", "line", "column", "why"),
    [
        ('root ::= "a', 1, 10, "not closed"),
        ('root ::= "a"\n  | [a-', 2, 5, "not closed"),
        ('root ::= ("a"\n', 1, 10, "parenthesis"),
        ("root ::= a b\na ::= []", 2, 7, "empty"),
        ("root ::= a\nb ::= root", 1, 10, "'a' is not defined"),
        ('root ::= "a"\nroot ::= "b"', 2, 1, "twice"),
        ('root ::= "a"{3,2}', 1, 13, "less than"),
        ('root ::= "a"{}', 1, 13, "repetition"),
        ('root ::= "\\q"', 1, 11, "escape"),
        ('root ::= "\\u12"', 1, 11, "hexadecimal"),
        ('root ::= "\\ud800"', 1, 11, "no character"),
        ("root ::= [z-a]", 1, 11, "range"),
        ('root ::= (?="a") "a"', 1, 10, "lookaround"),
        ('root ::= "a" )', 1, 14, "')'"),
        ('root = "a"', 1, 1, "rule"),
        ("root ::= 'a'", 1, 10, "double quotes"),
        ("root ::= (\"b\" | 'a')", 1, 17, "double quotes"),
        ("::= x", 1, 1, "rule"),
    ],
)
def test_errors_name_line_and_column(grammar: str, line: int, column: int, why: str) -> None:
    with pytest.raises(InvalidConstraint) as error:
        grammar_rules(grammar)
    assert f"line {line}, column {column}:" in error.value.message
    assert why in error.value.message
    assert error.value.field == "ebnf"


def test_a_grammar_without_root_or_end() -> None:
    for grammar in ("", 'a ::= "x"'):
        with pytest.raises(InvalidConstraint, match="root"):
            grammar_rules(grammar)


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= root "a"', "root"),
        ('root ::= "a" b\nb ::= ("x" c)+\nc ::= b | "y" c', "b"),
        ('root ::= a{2}\na ::= b "x"\nb ::= a | b', "a"),
    ],
)
def test_a_grammar_that_never_ends_is_refused_by_its_rule(grammar: str, rule: str) -> None:
    with pytest.raises(InvalidConstraint, match=f"its rule '{rule}' never ends") as refused:
        grammar_rules(grammar)
    assert refused.value.remedy
