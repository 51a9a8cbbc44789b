"""A stop string is refused where it may cut an answer that the constraint allows."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

import ramify.constraint as constraint
from ramify.constraint import Constraint, with_controls
from ramify.engine_messages import CompileGrammar, GrammarFailed, GrammarReady
from ramify.errors import InvalidRequest
from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.compile.grammar_files import GrammarFiles
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.compile.stops import check_stops, may_cut
from ramify.grammar.vocabulary import Vocabulary
from tests.grammar.test_grammar_store import A, Compiler
from tests.grammar.vocabularies import tiny

FIXED = {
    "type": "object",
    "properties": {"kind": {"enum": ["bug", "feature"]}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False}
LIST = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
TAG = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": TEXT}, "end": "</f>"}


def tag(form: object) -> Constraint:
    return constraint.structural_tag({"type": "structural_tag", "format": form})


CALL = tag({"type": "tag", **TAG})
WORDS = tag({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]})
INNER = tag({"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"})
OLDER = constraint.structural_tag(
    {"structures": [{"begin": "<f>", "schema": TEXT, "end": "</f>"}], "triggers": ["<f"]}
)


@pytest.mark.parametrize(
    ("wanted", "refused", "taken"),
    [
        (constraint.json_schema(FIXED), ["bug", "}", '", "n"', ": 1"], ["\n", "###", "bugs", "}}", "Human:"]),
        (constraint.json_schema(TEXT), ["###", "</s>", "}", "Human:"], ["\n\n", "\nHuman:", "\t"]),
        (constraint.json_schema(LIST), ["]]", "1, 2", "], ["], ["1,2", "###", "[,"]),
        (constraint.json_object(), ["}", "END"], ["\n", "\nObservation:"]),
        (constraint.json_object(whitespace=2), ["\n"], ["###\r"]),
        (constraint.regex("(ab)+[.]"), ["ba", "abab", "b."], ["aa", ".a", "c", "é"]),
        (constraint.regex(".*"), [], ["x", "END", "\n"]),  # each beginning is an answer
        (constraint.regex("-?[0-9]+[ \n]?"), ["1", "-"], [" ", "\n", "="]),
        (constraint.regex("[a-z ]+"), ["a", " "], ["."]),
        (constraint.choices(["Paris", "Rome"]), ["ari", "Rome"], ["sR", "z", "Paris "]),
        (constraint.ebnf('root ::= "(" root ")" | "x"'), ["((", "x)", "(x"], ["()", ")x"]),
        (CALL, ["###", "<f>", "</f>"], ["\n", "\t"]),
        (WORDS, [], ["###", "<f>", "\n"]),
        (OLDER, [], ["###", "<f>"]),
        (INNER, [], ["###"]),
    ],
)
def test_a_stop_string_that_an_answer_may_contain_is_refused(
    wanted: Constraint, refused: list[str], taken: list[str]
) -> None:
    compiled = compile_constraint(wanted, tiny())
    for stop in refused:
        with pytest.raises(InvalidRequest, match=re.escape(repr(stop))) as error:
            check_stops(wanted, compiled, tiny(), ("never\r\r", stop))
        assert error.value.field == "stop"
    check_stops(wanted, compiled, tiny(), taken)


@pytest.mark.parametrize(
    ("wanted", "refused", "taken"),
    [
        (constraint.json_schema(TEXT), [b"a", b"e", b'"', b"}"], [b"\n", b"\t"]),
        (constraint.regex("-?[0-9]+[ \n]?"), [b"1", b"-"], [b" ", b"\n", b"="]),
        (constraint.regex(".*"), [], [b"x", b"\xc3"]),
        (constraint.regex("[é]+!"), ["é".encode()[:1], "é".encode()[1:], b"!"], [b"e"]),
        (WORDS, [], [b"<", b"\n"]),
    ],
)
def test_a_stop_token_is_refused_as_its_text_is(
    wanted: Constraint, refused: list[bytes], taken: list[bytes]
) -> None:
    stop_ids, control = (0, 5), 4
    tokens = [bytes([byte]) for byte in range(256)]
    tokens[0] = tokens[4] = tokens[5] = b""
    vocabulary = Vocabulary(tuple(tokens), stop_ids)
    compiled = compile_constraint(wanted, vocabulary)
    for text in refused:
        with pytest.raises(InvalidRequest, match=f"The stop token {text[0]}, ") as error:
            check_stops(wanted, compiled, vocabulary, (), (7, text[0]))
        assert error.value.field == "stop_token_ids"
    check_stops(wanted, compiled, vocabulary, (), (*stop_ids, control, *(text[0] for text in taken)))


def test_a_control_token_is_refused_as_its_stand_in_is() -> None:
    wanted = constraint.regex(with_controls("<|tool|>[a-z]*<|end|>"))
    tokens = (*(bytes([byte]) for byte in range(256)), b"", b"")
    vocabulary = Vocabulary(tokens, (0,), ((256, with_controls("<|end|>").encode()),))
    compiled = compile_constraint(wanted, vocabulary)
    check_stops(wanted, compiled, vocabulary, (), (257,))
    with pytest.raises(InvalidRequest, match="The stop token 256"):
        check_stops(wanted, compiled, vocabulary, (), (256,))


def expression(draw: random.Random, depth: int = 3) -> str:
    kind = draw.choice("aabéé.|*" if depth else "abé")
    inner = [expression(draw, depth - 1) for _ in range(2)] if kind in ".|*" else []
    return {".": "{}{}", "|": "({}|{})", "*": "({}){{0,2}}"}.get(kind, kind).format(*inner)


@pytest.mark.parametrize("seed", range(30))
def test_it_is_exact_for_regular_expressions(seed: int) -> None:
    draw = random.Random(seed)
    source = expression(draw)
    compiled = compile_constraint(constraint.regex(source), tiny())
    automaton = PushdownAutomaton.from_bytes(compiled.payload)
    words = ["".join(word) for size in range(8) for word in itertools.product("abé", repeat=size)]
    texts = [word for word in words if re.fullmatch(source, word)]
    whole, longest = set(texts), max(map(len, texts))
    for word in words[1:120]:
        cut = any(
            text.startswith(word, at) and text[:at] not in whole for text in texts for at in range(len(text))
        )
        found = may_cut(automaton, word.encode(), regular=True)
        assert found == cut or (found and (longest == 7 or not word.isascii())), (source, word)


def test_the_compiler_refuses_and_requests_without_stops_pay_nothing() -> None:
    ready = answer(CompileGrammar(key="k", constraint=CALL), tiny())
    same = answer(CompileGrammar(key="k", constraint=CALL, stop=("\n",)), tiny())
    assert isinstance(ready, GrammarReady)
    assert isinstance(same, GrammarReady)
    assert ready.payload == same.payload
    failed = answer(CompileGrammar(key="k", constraint=CALL, stop=("\n", "###")), tiny())
    assert isinstance(failed, GrammarFailed)
    assert (failed.error.code, failed.error.field) == ("invalid_request", "stop")


def test_stops_are_checked_once_and_share_the_grammar() -> None:
    compiler = Compiler()
    assert compiler.store.request("1", A) is None
    assert compiler.store.request("2", A, ("é", "ü"), (9, 8)) is None
    assert [(job.stop, job.stop_token_ids) for job in compiler.jobs] == [((), ()), (("é", "ü"), (9, 8))]
    assert [compiler.answer(), compiler.answer()] == [[("1", "grammar")], [("2", "grammar")]]
    same = [compiler.store.request("3", A, ("ü", "é", "é"), (8, 9)), compiler.store.request("4", A)]
    assert same[0] is same[1] is not None
    assert compiler.keys() == []
    for stops in ((("é",),), ((), (9,)), (("é", "ü"),)):
        assert compiler.store.request("5", A, *stops) is None
    compiler.store.compiler_died()
    assert [job.stop for job in compiler.jobs] == [("é",), (), ("é", "ü")]
    assert [compiler.answer() for _ in range(3)] == [[("5", "grammar")]] * 3
    assert compiler.store.request("6", A, (), (9,)) is same[0]
    assert isinstance(compiler.store.request("7", A, ("a",)), type(None))
    assert compiler.answer() == [("7", "InvalidRequest")]
    assert isinstance(compiler.store.request("8", A, ("a",)), InvalidRequest)
    assert compiler.store.request("9", A) is same[0]


def test_a_grammar_that_was_compiled_is_checked_alone(tmp_path: Path) -> None:
    files = GrammarFiles(tiny(), tmp_path)
    never = pytest.fail
    first = answer(CompileGrammar(key=f"{A.key} ['é']", constraint=A, stop=("é",)), tiny(), find=files.get)
    assert isinstance(first, GrammarReady)
    files.put(first)
    stored = files.get(A.key)
    assert stored is not None
    assert stored.payload == first.payload
    for stop, kind in ((("ü",), GrammarReady), (("a",), GrammarFailed)):
        job = CompileGrammar(key=f"{A.key} {stop}", constraint=A, stop=stop)
        assert type(answer(job, tiny(), "auto", never, files.get)) is kind
