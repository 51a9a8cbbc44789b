"""Grammars in Lark's notation as rules of our own engine: the same texts as llguidance reads, or refused."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest

from ramify.constraint import Constraint, structural_tag
from ramify.errors import InvalidConstraint
from ramify.grammar.engine.llguidance import LLGuidanceGrammar, compile_constraint
from ramify.grammar.matcher import Grammar
from ramify.grammar.rules.expression import text as exactly
from ramify.grammar.rules.lark import lark_rules
from tests.grammar.sampling import walk
from tests.grammar.vocabularies import STOP, accepts, compiled, mask_of, tiny
from tests.tool_calls.patches import PATCH

SUM = """
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor: INT | "(" expr ")"
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
QUERY = r"""
// a comment
start: "SELECT" SP columns SP "FROM" SP NAME (SP "WHERE" SP filter)? ";"
columns: NAME ("," SP NAME)* | "*"
filter: NAME SP (">" | "=") SP (NUMBER | DATE | ESCAPED_STRING)
NAME: LETTER (LETTER | DIGIT | "_")*
DATE: /'[0-9]{4}-[0-9]{2}'/
SP: " "
%import common (LETTER, DIGIT, NUMBER, ESCAPED_STRING)
"""
VALUE = r"""
?start: value
value: object | array | STRING | SIGNED_NUMBER -> number
     | "true" | "false" | "null"i
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
%import common.ESCAPED_STRING -> STRING
%import common.SIGNED_NUMBER
%import common.WS
%ignore WS
"""
OTHERS = [
    'start: "a".."c" root ~ 1..3\nroot: "x"i~2 | ("y" | /[^\\W\\d_a-z]/){0,2} "\\x21\\n"',
    'start: "a" start? "b" | ""\n%ignore /[ \\t]/',
    'start: a a? a*\na: "x" | "y" "z"\n%ignore " "',
    'start: start "," item | item\nitem: /\\d\\.\\s/ | /(?i)ab?/ | /é.ö/s',
    'start: (A ";")+ "\\"\\\\"?\nA: B | C+\nB: "b" C~2\nC: "c"',
]
GRAMMARS = [PATCH, SUM, QUERY, VALUE, *OTHERS]
each_grammar = pytest.mark.parametrize("source", GRAMMARS, ids=range(len(GRAMMARS)))


DOUBLED = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + "\nA30: /[ab]/"


def linked(form: str, count: int) -> str:
    """Rules of which each calls the next."""
    return "\n".join(f"r{i}: {form.format(i, i + 1)}" for i in range(count)) + f'\nr{count}: "end"'


def ours(source: str) -> Grammar:
    return compiled(structural_tag({"type": "structural_tag", "format": {"type": "lark", "grammar": source}}))


def theirs(source: str) -> Grammar:
    return LLGuidanceGrammar(compile_constraint(Constraint(kind="lark", source=source), tiny()), tiny())


@each_grammar
def test_our_texts_are_llguidances(source: str) -> None:
    own, oracle = ours(source), theirs(source)
    chooser = Random(1)
    texts = {walk(own, tiny(), chooser, chooser.randint(1, 90)) for _ in range(60)}
    assert len(texts) > 5
    for text in texts:
        assert accepts(oracle, text), text


PATCHES = [
    '*** Begin Patch\n*** Add File: a b.py\n+x = "1\\n"\n+\n*** End Patch',
    "*** Begin Patch\n*** Delete File: a\n*** Update File: b\n*** Move to: c\n@@\n x\n-\n@@ def f():\n+y\n"
    "*** End of File\n*** End Patch\n",
    "*** Begin Patch\n*** Update File: b\n*** End Patch\n",
]


def test_an_escaped_backslash_begins_no_escape() -> None:
    assert exactly(r"\x41B") in lark_rules(r'start: "\\x41\x42"').values()


def test_patches() -> None:
    own = ours(PATCH)
    assert all(accepts(own, patch) for patch in PATCHES)
    assert not any(accepts(own, patch.replace("@@", "@").replace("+", "*")) for patch in PATCHES[:2])


@pytest.mark.parametrize("source", GRAMMARS[1:])
def test_llguidances_texts_are_ours(source: str) -> None:
    own, oracle = ours(source), theirs(source)
    chooser = Random(2)
    texts = {text for _ in range(40) for text in whole_texts(oracle, chooser)}
    assert texts
    for text in texts:
        # We ignore nothing behind the last token, and strings have no line feeds, as Lark defines them.
        if not text.endswith((" ", "\t", "\n", "\r", "\f")) and "\n" not in text:
            assert accepts(own, text), text


def whole_texts(grammar: Grammar, chooser: Random) -> list[str]:
    """The beginnings of a random text that are whole texts themselves."""
    matcher, text, found = grammar.matcher(), b"", []
    for _ in range(60):
        if matcher.complete:
            found.append(text.decode())
        tokens = [int(token) for token in np.flatnonzero(mask_of(matcher, tiny())) if token != STOP]
        if not tokens:
            break
        token = chooser.choice(tokens)
        assert matcher.accept(token)
        text += tiny().tokens[token]
    return found


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('start: WORD "b"\nWORD: /[a-z]+/', "ab"),
        ("start: WORD WORD\nWORD: /[a-z]+/", "ab"),
        ('start: "ab" | "a" "c" | "a" "b" "d"', "abd"),
        ('start: ("if" | NAME) NAME? ";"\nNAME: /[a-z]+/', "ifx;x"),
    ],
)
def test_what_depends_on_tokens_is_refused(source: str, text: str) -> None:
    """Rules over characters would read the text, and the grammar does not."""
    assert not accepts(theirs(source), text)
    with pytest.raises(InvalidConstraint, match=r"may also be a longer token"):
        ours(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('start: "a', "line 1: '\"' is not supported here"),
        ('start: "a"\n  | b', "line 2: the rule 'b' is not defined"),
        ('foo: "a"', "no rule named start"),
        ('start: "a" start', "'start' never ends"),
        ('start: x{1}\nx{y}: "a"', "line 2: a colon is expected"),
        ("start: <|im_end|>", "line 1: '<' is not supported"),
        ("start: ~/a/", "line 1: '~' is not supported"),
        ('start: "a"\n%declare X', "line 2: '%declare' is not supported"),
        ('start: %json {"type": "null"}', "is not supported here"),
        ('start: %json {"type": }', "JSON value"),
        ('start[lazy]: "a"', "line 1: a colon is expected"),
        ("start: A\nA.2: /a/", "line 2: a colon is expected"),
        ("start: /a*?b/", "A lazy repetition is not supported"),
        ("start: /[a&&b]/", "An operator or a set in a set"),
        ("start: /(?=a)b/", "A lookahead is not supported"),
        ("start: A\nA: B\nB: A", "calls itself"),
        ("start: A\nA: b\nb: A", "a terminal cannot call the rule 'b'"),
        ("start: C_COMMENT\n%import common.C_COMMENT", "common has no terminal 'C_COMMENT'"),
        ("start: X\n%import python.X", "only terminals of the module common"),
        ('start: ("a"', "this ( is not closed"),
        ('start: "a"..""', "between two characters"),
        ('start: "\\q"', "has an escape"),
        ('start: "a"~-3', "line 1: -3 is no count from 0 to 100000"),
        ('start: "a"~5..2', "line 1: 2 is no count from 5 to 100000"),
        ('start: "a"{5,2}', "line 1: 2 is no count from 5 to 100000"),
        ('start: "a"~' + "9" * 5000, "is no count from 0"),
        (DOUBLED, "more than 4000 parts"),
        ("start: r0\n" + linked('"<{0}>"? r{1}', 200), "pairs of its terminals"),
        ('start: /a*/ "b"\n%ignore " "', "terminal /a*/ may be empty"),
    ],
)
def test_what_is_refused_says_why(source: str, why: str) -> None:
    with pytest.raises(InvalidConstraint) as error:
        ours(source)
    assert why in error.value.message
    assert error.value.pointer == "/format/grammar"


def test_the_time_for_linked_rules_is_linear() -> None:
    began = time.process_time()
    rules = lark_rules("start: r0\n" + linked('"<{0}>" r{1}', 2000))
    assert len(rules) == 4004
    assert time.process_time() - began < 10  # takes less than a second
