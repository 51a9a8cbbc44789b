"""An unknown name is answered with the right one: misspelt, or as SGLang and vLLM spell it."""

from __future__ import annotations

import dataclasses

import pytest

import ramify as rm
from ramify.cli import main
from ramify.lang.calls import options
from ramify.runtime.config import ELSEWHERE, EngineConfig

FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}


def test_names_of_others_lead_to_options_that_exist() -> None:
    assert {here for here in ELSEWHERE.values() if " " not in here} <= FIELDS
    assert not FIELDS & ELSEWHERE.keys()
    gen = options.NAMES | {"schema", "choices", "regex", "ebnf"}
    assert {here for here in options.ELSEWHERE.values() if " " not in here} <= gen
    assert not gen & options.ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"model_path": "x"}, "Here it is model."),
        ({"max_model_len": 8}, "Here it is context_length."),
        ({"polcy": "fcfs"}, "Did you mean policy?"),
        ({"tp": 2}, "one engine runs on one device"),
    ],
)
def test_options_of_an_engine(wrong: dict[str, object], right: str) -> None:
    with pytest.raises(rm.UnsupportedField, match=right.replace("?", r"\?")):
        rm.Engine(**wrong)


def test_the_generate_of_other_engines() -> None:
    engine = rm.Engine()
    for arguments in ((["a"], {"max_new_tokens": 3}), (["a"],), ("a",)):
        with pytest.raises(rm.UnsupportedField, match="complete_many"):
            engine.generate(*arguments)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("serve --model-path x", "Here it is --model."),
        ("serve --max-model-len=5", "Here it is --context-length."),
        ("serve --tp 2", "one engine runs on one device"),
        ("serve --polcy fcfs", "Did you mean --policy?"),
        ("run a.py:f --inptu rows.csv", "Did you mean --input?"),
        ("serve one two", "unknown argument two."),
    ],
)
def test_flags(line: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(line.split())
    assert ended.value.code == main.FAILED
    assert right in capsys.readouterr().err


def test_options_of_programs() -> None:
    with pytest.raises(rm.UnsupportedField, match=r"Did you mean temperature\?"):
        rm.gen("x", temprature=0)
    with pytest.raises(rm.UnsupportedField, match="Here it is schema"):
        rm.gen("x", guided_json={})

    @rm.function
    def program(s: rm.ProgramState, question: str) -> None:
        s += question

    with pytest.raises(TypeError, match=r"no parameter 'qustion'. Did you mean question\?"):
        program.run(qustion="x", backend=rm.ScriptedBackend([]))
    with pytest.raises(rm.UnsupportedField, match=r"Did you mean temperature\?"):
        program.run_batch([], temprature=0, backend=rm.ScriptedBackend([]))
