"""The examples run, on a script in place of a model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ramify as rm

FOLDER = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in FOLDER.glob("*.py")} <= tested


def test_judge(capsys):
    verdicts = [f'{{"score": {score}, "reason": "Because."}}' for score in (4, 2, 5)]
    state = load("judge").main(rm.ScriptedBackend({"verdict": verdicts, "grade": "B"}))
    assert sorted(verdict.score for verdict in state["verdict"]) == [2, 4, 5]
    assert state["grade"] == "B"
    assert "The lowest score was 2." in state.text()
    out = capsys.readouterr().out
    assert "├─ fork 0" in out
    assert "4 requests" in out
    assert state.trace.computed_tokens < state.usage.prompt_tokens / 2


def test_classify(capsys):
    words = ("Lovely", "Exactly", "delighted", "Great", "Soft", "Easy")

    def label(request):
        review = request.prompt[0].rpartition("Review: ")[2]
        return " positive" if any(word in review for word in words) else " negative"

    assert load("classify").main(rm.ScriptedBackend({"label": label})) == 1.0
    captured = capsys.readouterr()
    assert "12 of 12 right" in captured.out
    assert "12/12" in captured.err


def test_extract(capsys):
    answers = {
        "order": '{"customer": "Maria Lopez", "number": 48213, "missing": [{"name": "lamp", "quantity": 3}]}',
        "urgency": "high",
    }
    order = load("extract").main(rm.ScriptedBackend(answers))
    assert order.missing[0].quantity == 3
    assert capsys.readouterr().out.startswith("order 48213 of Maria Lopez, urgency high")


def test_chat(capsys):
    state = load("chat").main(rm.ScriptedBackend(["A tree.", "A router.", "A tree of shared prefixes."]))
    assert [turn.text for turn in state.trace.children] == [
        "A tree.",
        "A router.",
        "A tree of shared prefixes.",
    ]
    first, *later = state.trace.children
    assert all(turn.usage.cached_tokens >= first.usage.prompt_tokens for turn in later)
    assert "A tree of shared prefixes.\n" in capsys.readouterr().out


def test_agent(capsys):
    def calls(request):
        turn = sum(isinstance(part, str) and "<tool_response>" in part for part in request.prompt[1:])
        name, arguments = [
            ("height", '{"mountain": "Watzmann"}'),
            ("difference", '{"higher": "Watzmann", "lower": "Zugspitze"}'),
            ("difference", '{"higher": "Zugspitze", "lower": "Watzmann"}'),
            ("answer", '{"text": "The Zugspitze, by 249 metres."}'),
        ][turn]
        return f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    state = load("agent").main(rm.ScriptedBackend(calls))
    assert state.ret_value == "The Zugspitze, by 249 metres."
    assert [call.text for call in state.trace.children if call.kind == "tool"] == [
        "2713",
        "",
        "249",
        "The user has read it.",
    ]
    assert "  difference failed: Watzmann is lower than Zugspitze\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.py"))])
def test_an_example_says_how_to_run_it(name):
    assert f"python examples/{name}.py" in load(name).__doc__
