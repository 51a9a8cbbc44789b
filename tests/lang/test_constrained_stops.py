"""A stop string that may cut a constrained answer is refused, by engines and by scripts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer

import ramify as rm
from tests.lang.steps import program_of

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schema": dict[str, str]}, "END"),
    ({"schema": Literal["yes", "no"]}, "es"),
    ({"schema": int}, "1"),
    ({"json_schema": {"type": "object"}}, "}"),
    ({"regex": "[a-z]+!"}, "ab"),
    ({"grammar": rm.constraint.ebnf('root ::= "(" root ")" | "x"')}, "(("),
]
TAKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"schema": Literal["yes", "no"]}, "\n", "yes"),
    ({"schema": int}, "!", "7"),
    ({"regex": "[a-c]{3}"}, ".", "abc"),
    ({"schema": int}, "\n", "7"),  # it ends the number
    ({"regex": ".*"}, "END", "some words"),
]


@pytest.mark.parametrize(("options", "stop"), REFUSED)
def test_a_script_refuses_as_an_engine_does(options: dict[str, Any], stop: str) -> None:
    error = program_of("Q" + rm.gen("x", stop=stop, **options)).run(backend=rm.ScriptedBackend(["x"])).error()
    assert error is not None
    assert (error.__cause__.field, type(error.__cause__)) == ("stop", rm.InvalidRequest)


@pytest.mark.parametrize(("options", "stop", "answer"), TAKEN)
def test_a_stop_string_that_no_answer_has_is_taken(options: dict[str, Any], stop: str, answer: str) -> None:
    state = program_of("Q" + rm.gen("x", stop=stop, **options)).run(backend=rm.ScriptedBackend([answer]))
    assert str(state["x"]) == answer


def test_the_stop_strings_of_the_run_count() -> None:
    state = program_of("Q" + rm.gen("x", regex="a+")).run(stop="aa", backend=rm.ScriptedBackend(["a"]))
    assert "The stop string 'aa' may occur inside an answer that the regex allows" in str(state.error())


def test_an_engine_refuses_before_it_generates(engine: rm.Engine) -> None:
    for options, stop in REFUSED:
        program = program_of("Q" + rm.gen("x", stop=[stop, "\n\n\n"], max_tokens=20, **options))
        error = program.run(backend=engine).error()
        assert error is not None
        assert f"The stop string {stop!r} may occur inside" in str(error)
        assert (error.__cause__.field, error.partial) == ("stop", "")
    for options, stop, _ in TAKEN:
        state = program_of("Q" + rm.gen("x", stop=stop, max_tokens=20, **options)).run(backend=engine)
        assert state.error() is None


def test_an_engine_refuses_a_stop_token_as_its_text(engine: rm.Engine, model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    [[letter], [line]] = [tokenizer.encode(text).ids for text in ("e", "\n")]
    gen = functools.partial(rm.gen, "x", schema=dict[str, str], max_tokens=20)
    error = program_of("Q" + gen(stop_token_ids=[letter])).run(backend=engine).error()
    assert error is not None
    assert f"The stop token {letter}, 'e', may occur inside" in str(error)
    assert (error.__cause__.field, error.partial) == ("stop_token_ids", "")
    program_of("Q" + gen(stop_token_ids=[line])).run(backend=engine)["x"]
