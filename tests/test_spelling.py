"""An unknown name is answered with the right one: misspelt, or as SGLang and vLLM spell it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

import ramify as rm
from ramify import sampling_options as options
from ramify.cli import main
from ramify.runtime.config import ELSEWHERE, EngineConfig
from ramify.spelling import nearest

FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}


def test_names_of_others_lead_to_options_that_exist() -> None:
    assert {here for here in ELSEWHERE.values() if " " not in here} <= FIELDS
    assert not FIELDS & ELSEWHERE.keys()
    gen = options.NAMES | {"schema", "choices", "regex", "ebnf", "grammar"}
    assert {here for here in options.ELSEWHERE.values() if " " not in here} <= gen
    assert not gen & options.ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"model_path": "x"}, "Here it is model."),
        ({"max_model_len": 8}, "Here it is context_length."),
        ({"polcy": "fcfs"}, "Did you mean policy?"),
        ({"tp": 2}, "Here it is tensor_parallel."),
        ({"retry_fr": 2}, "Did you mean retry_for?"),
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
    ("name", "known", "close"),
    [
        ("--to", "--lora", False),  # they share only dashes
        ("--two", "--to", True),
        ("#/$defs/customer", "#/$defs/price", False),  # they share only a folder
        ("#/$defs/custmer", "#/$defs/customer", True),
        ("options", "stream_options", False),
        ("bgi", "big", True),
    ],
)
def test_what_names_share_before_they_differ_makes_them_not_similar(
    name: str, known: str, close: bool
) -> None:
    assert nearest(name, [known, "x"]) == (f"Did you mean {known}?" if close else None)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("serve --model-path x", "Here it is --model."),
        ("serve --max-model-len=5", "Here it is --context-length."),
        ("serve --tp 2", "--tensor-parallel"),
        ("serve --policy lpm", "'lpm' is none of program, prefix, fcfs. Here it is prefix."),
        ("serve --no-async-scheduling", "--no-overlap"),
        ("serve --guided-decoding-backend outlines", "--grammar-backend"),
        (
            "serve --grammar-backend guidance",
            "'guidance' is none of auto, ramify, xgrammar, llguidance, outlines. Here it is llguidance.",
        ),
        ("serve --disable-radix-cache", "--prefix-cache naive"),
        ("serve --dp 2", "Here it is --replicas"),
        ("serve --enable-lora", "Adapters need no switch"),
        ("serve --enable-priority-scheduling", "give requests a priority"),
        ("serve --enable-auto-tool-choice", "Tools can always be called"),
        ("serve --disable-log-requests", "are not logged"),
        ("serve --swap-space 4", "Here it is --host-kv-gb."),
        ("serve --polcy fcfs", "Did you mean --policy?"),
        ("run a.py:f --inptu rows.csv", "Did you mean --input?"),
        ("run a.py:f --to x essay=y", "unknown argument --to. See "),
        ("chat one two=x", "unknown argument two=x."),
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
    with pytest.raises(rm.UnsupportedField, match=r"Did you mean progress\?"):
        program.run_batch([], proress=True, backend=rm.ScriptedBackend([]))
    with pytest.raises(rm.InvalidRequest, match=r"Did you mean changed\?"):
        program.run_batch([], out="x.jsonl", rerun="chnged", backend=rm.ScriptedBackend([]))


@pytest.mark.parametrize(
    ("wrong", "right"), [("thinkin", "thinking"), ("schem", "schema"), ("retry", "retries")]
)
def test_arguments_of_gen(wrong: str, right: str) -> None:
    for more in ({}, {"choices": ["a"]}):
        with pytest.raises(rm.UnsupportedField, match=rf"no option '{wrong}'. Did you mean {right}\?"):
            rm.gen("x", **{wrong: 1}, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rm.select(choice=["a"]), "select has no parameter 'choice'. Did you mean choices?"),
        (lambda: rm.limit(max_call=1), "limit has no parameter 'max_call'. Did you mean max_calls?"),
        (lambda: rm.mcp("x", envs={}), "mcp has no parameter 'envs'. Did you mean env?"),
        (lambda: rm.repeat(None, None, until=1, at_mst=1), "'at_mst'. Did you mean at_most?"),
        (lambda: rm.when("x", {}, defalt="y"), "'defalt'. Did you mean default?"),
        (
            lambda: rm.RuntimeEndpoint("http://x", retry=1),
            "RuntimeEndpoint has no parameter 'retry'. Did you",
        ),
        (lambda: rm.OpenAI("x", baseurl="http://x"), "'baseurl'. Did you mean base_url?"),
        (lambda: rm.limit(zzz=1), "limit has no parameter 'zzz'."),
    ],
)
def test_arguments_of_functions_and_backends(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


def test_the_policy_of_another_engine() -> None:
    with pytest.raises(ValueError, match=r"one of program, prefix, fcfs. Here it is prefix\."):
        EngineConfig(policy="lpm")  # type: ignore[arg-type]
