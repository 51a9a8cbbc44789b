"""Outputs that reach max_tokens: finish reason "stop" if they are whole, "length" if free text was cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import constraint
from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint
from ramify.grammar.compile.policy import compile_constraint
from ramify.grammar.engine.load import load_grammar
from ramify.grammar.engine.thinking import FreeGrammar, with_preambles
from ramify.messages import Preamble
from ramify.runtime.scheduler.requests.constrained import ConstrainedOutput
from ramify.tool_calls.formats import GENERIC
from ramify.tool_calls.grammar import Tool, calls_after_trigger, preamble_of
from tests.grammar.vocabularies import STOP, compiled, tiny, tiny_tokenizer
from tests.runtime.test_preambles import Thinking

ANY: dict[str, Any] = {"type": "any_text"}
TAG = {"begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</a>"}
CALL = Tool(
    name="actions_run_trigger",
    parameters='{"type":"object","properties":{"any_text":{"enum":[1]}},"required":["any_text"],'
    '"additionalProperties":false}',
)


def tag(form: dict[str, Any]) -> Constraint:
    return constraint.structural_tag({"type": "structural_tag", "format": form})


def after(held: Constraint, text: str, backend: str = "auto") -> ConstrainedOutput:
    matcher = load_grammar(*compile_constraint(held, tiny(), backend), tiny()).matcher()
    assert matcher.accept_bytes(text.encode())
    return ConstrainedOutput(matcher, tiny().size, [STOP], None)


CASES: list[tuple[Constraint, str, bool, bool]] = [
    (tag(ANY), "some", True, False),
    (tag(ANY | {"excludes": ["<a>", "no", "!"]}), "some <a n", True, False),
    (tag({"type": "tag", "begin": "<a>", "content": ANY, "end": "</a>"}), "<a>some", False, False),
    (tag({"type": "tag", "begin": "<a>", "content": ANY, "end": "</a>"}), "<a>some</a>", True, True),
    (constraint.regex(r"<a>[^<]*</a>"), "<a>some</a>", True, True),
    (constraint.regex(r"[\s\S]*"), "some", True, False),
    (constraint.regex(r"[\s\S]{0,12}"), "some", True, False),
    (constraint.regex(r"[\s\S]{0,4}"), "some", True, True),
    (constraint.regex(r"[ -~]{0,60}"), "some", True, False),
    (constraint.regex(r"[a-zA-Z0-9 .,!?]*"), "some", True, True),
    (constraint.regex(r"[a-z ]+"), "some", True, True),
    (tag({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}), "so <", True, False),
    (tag({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}), "so <a>12", False, False),
    (tag({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}), "<a>12</a>", True, False),
    (
        tag({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], "stop_after_first": True}),
        "so <a>12</a>",
        True,
        True,
    ),
    (tag({"type": "regex", "pattern": "trigger(s any_text)?"}), "trigger", True, True),
    (constraint.json_schema({"type": "string", "description": "any_text"}), '"some"', True, True),
    (constraint.ebnf('root ::= "(" root ")" | [^()]*'), "(a)", True, True),
    (constraint.ebnf("root ::= word root | word\nword ::= [^()]"), "so", True, False),
]


@pytest.mark.parametrize(("held", "text", "complete", "whole"), CASES)
def test_whole_is_asked_of_the_grammar(held: Constraint, text: str, complete: bool, whole: bool) -> None:
    output = after(held, text)
    assert (output.complete, output.whole) == (complete, whole)
    assert output.whole == whole, "asking changes nothing"


@pytest.mark.parametrize("backend", ["ramify", "xgrammar"])
def test_so_it_is_with_another_library(backend: str) -> None:
    held = tag({"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]})
    assert not after(held, "so <a>12</a> and", backend).whole
    assert after(tag(TAG | {"type": "tag"}), "<a>12</a>", backend).whole


@pytest.mark.parametrize("text", ["", "some words", "some <tool_c"])
def test_a_turn_without_a_call_is_cut(text: str) -> None:
    wanted = preamble_of(GENERIC, required=False)
    known = Preamble(
        end=wanted.end, optional=wanted.optional, end_ids=tuple(tiny_tokenizer().encode(wanted.end).ids)
    )
    matcher = with_preambles(FreeGrammar(tiny()).matcher(), [known], tiny())
    assert not text or matcher.accept_bytes(text.encode())
    output = ConstrainedOutput(matcher, tiny().size, [STOP], None)
    assert output.complete
    assert not output.whole


@pytest.mark.parametrize(
    "held",
    [
        calls_after_trigger(GENERIC, [CALL], parallel=True),
        tag({"type": "tag", "begin": "<a>", "content": {"type": "or", "elements": [ANY]}, "end": "</a>"}),
    ],
)
def test_a_whole_answer_that_takes_all_tokens_stops(tiny_folder: Path, held: Constraint) -> None:
    local = Thinking(tiny_folder)
    needed = local.ask(constraint=held, max_tokens=1).error
    assert needed is not None
    least = int(needed.message.split(" has ")[1].split()[0])
    result = local.ask(constraint=held, max_tokens=least)
    assert result.finish is not None
    assert (result.finish.reason, len(result.ids)) == ("stop", least)


def test_a_limit_of_a_library_ends_its_own_request_alone(tiny_folder: Path) -> None:
    """An increasingly ambiguous grammar reaches llguidance's limit only after some text."""
    held = constraint.lark('start: start start start | start start | "a" | ""')
    assert compiled(held)
    local = Thinking(tiny_folder)
    error = local.ask(constraint=held, max_tokens=400, min_tokens=400).error
    assert isinstance(error, InvalidConstraint)
    assert (error.field, "llguidance reached a limit" in error.message) == ("lark", True)
    assert error.remedy
    assert local.ask(constraint=constraint.regex("[0-9]{3}")).finish is not None
