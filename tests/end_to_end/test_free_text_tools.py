"""Calls of free-text tools, sampled by the default model."""

from __future__ import annotations

import pytest

from ramify import Engine
from ramify.constraint import Constraint, lark
from ramify.grammar.engine.llguidance import LLGuidanceGrammar, compile_constraint
from ramify.tool_calls.formats import FORMATS
from ramify.tool_calls.grammar import Tool, calls_after_trigger
from ramify.tool_calls.parser import Arguments, CallParser
from ramify.tool_calls.text import TextFormat
from tests.grammar.vocabularies import accepts, tiny
from tests.tool_calls.patches import PATCH

pytestmark = [pytest.mark.weights, pytest.mark.slow]
TOOLS = [Tool(name="apply_patch", text=TextFormat(lark(PATCH)))]
FORMS = [form for form in FORMATS.values() if not form.answer]  # control tokens, which this model lacks


def test_each_patch_of_the_model_is_one() -> None:
    oracle = LLGuidanceGrammar(compile_constraint(Constraint(kind="lark", source=PATCH), tiny()), tiny())
    with Engine() as engine:
        for seed, form in enumerate(FORMS):
            answer = engine.complete(
                "Add a file hello.py that prints hello.\n" + form.trigger,
                constraint=calls_after_trigger(form, TOOLS, parallel=False),
                temperature=1.0,
                max_tokens=120,
                seed=seed,
            )
            parser = CallParser(form, {"apply_patch"})
            events = parser.push(form.trigger + answer.text)
            assert not parser.inside
            patch = "".join(event.text for event in events if isinstance(event, Arguments))
            assert patch.startswith("*** Begin Patch\n")
            assert accepts(oracle, patch), patch
