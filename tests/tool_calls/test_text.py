"""Free-text tools: what the model may write in a call, and what comes back of it."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.constraint import Constraint, ebnf, json_schema, lark, regex, structural_tag
from ramify.errors import InvalidConstraint
from ramify.grammar.engine.llguidance import LLGuidanceGrammar, compile_constraint
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.tokenizer.tokenizer import load_vocabulary
from ramify.tool_calls.channels import ChannelParser
from ramify.tool_calls.formats import FORMATS, HARMONY, ToolFormat
from ramify.tool_calls.grammar import Tool, calls_after_trigger, calls_or_answer, described
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser
from ramify.tool_calls.text import InputReader, TextFormat, text_arguments
from tests.grammar.sampling import samples
from tests.grammar.vocabularies import accepts, tiny
from tests.tool_calls.patches import PATCH

each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
FUNCTION = Tool(
    name="look", parameters='{"type":"object","properties":{"q":{"type":"integer"}},"required":["q"]}'
)


BYTES = Vocabulary(tokens=(b"", *(bytes([byte]) for byte in range(256))), stop_ids=(0,))


@cache
def default_vocabulary() -> Vocabulary:
    files = resolve(DEFAULT_MODEL, progress=False)
    return load_vocabulary(files.tokenizer, vocab_size=49152, stop_ids=[2])


def constraint_on(form: ToolFormat, tools: list[Tool]) -> Constraint:
    if form.answer:
        return calls_or_answer(form, tools, thought=False, content=None)
    return calls_after_trigger(form, tools, parallel=True, most=2)


def calls_in(form: ToolFormat, output: str, texts: set[str]) -> list[tuple[str, str]]:
    """(name, arguments) of the calls in an output of `constraint_on`, read character by character."""
    reader = CallParser(form, texts)
    calls: list[list[str]] = []
    for char in ("" if form.answer else form.trigger) + output:
        for event in reader.push(char):
            if isinstance(event, CallBegins):
                assert event.text == (event.name in texts)
                calls.append([event.name, ""])
            else:
                assert isinstance(event, Arguments)
                calls[event.index][1] += event.text
    assert not reader.inside
    return [(name, arguments) for name, arguments in calls]


def inputs_of(
    form: ToolFormat, format: TextFormat, count: int = 25, vocabulary: Vocabulary | None = None
) -> list[str]:
    """The inputs of sampled calls of a tool with this format; without `vocabulary`, a function may be called
    too."""
    others = [FUNCTION] if vocabulary is None else []
    constraint = constraint_on(form, [Tool(name="edit", text=format), *others])
    found = []
    for output in samples(constraint, count, budget=150, vocabulary=vocabulary):
        if form is HARMONY:  # control tokens, which the vocabulary of the test lacks, stand for themselves
            name, output = ("edit", output) if "edit" in output else ("look", output)
            calls = [(name, output.partition("{")[1] + output.partition("{")[2])]
            calls = [(name, InputReader().push(text) if name == "edit" else text) for name, text in calls]
        else:
            calls = calls_in(form, output, {"edit"})
        found += [text for name, text in calls if name == "edit"]
        assert all(json.loads(text)["q"] is not None for name, text in calls if name == "look")
    assert found
    return found


@each_format
def test_a_regex_holds_for_the_decoded_input(form: ToolFormat) -> None:
    pattern = r'["\\{}\n\t\x01\x7fé😀a-c]{2,9}|<<\n'
    found = inputs_of(form, TextFormat(regex(pattern)))
    assert all(re.fullmatch(pattern, text) for text in found)
    assert any(set(text) & set('"\\\n\x01') for text in found)


@each_format
def test_an_ebnf_holds_for_the_decoded_input(form: ToolFormat) -> None:
    # Left-recursive, and balanced: no regular expression does that.
    found = inputs_of(
        form, TextFormat(ebnf(r'root ::= root "\n" line | line' '\nline ::= "{" line? "}" | "\\""'))
    )
    for text in found:
        for line in text.split("\n"):
            half = len(line) // 2
            assert line in ("{" * half + "}" * half, "{" * half + '"' + "}" * half)


@each_format
@pytest.mark.parametrize("model", ["bytes", pytest.param("smollm2", marks=pytest.mark.weights)])
def test_a_patch_parses_under_its_grammar(form: ToolFormat, model: str) -> None:
    """On a vocabulary of bytes and on the default model's; llguidance reads the grammar for the test."""
    vocabulary = BYTES if model == "bytes" else default_vocabulary()
    oracle = LLGuidanceGrammar(compile_constraint(lark(PATCH), tiny()), tiny())
    found = inputs_of(form, TextFormat(lark(PATCH)), 10 if model == "bytes" else 3, vocabulary)
    for patch in found:
        assert accepts(oracle, patch), patch


@each_format
def test_without_a_grammar_any_text_is_an_input(form: ToolFormat) -> None:
    found = inputs_of(form, TextFormat(), 40)
    assert len(set(found)) > 5
    assert "".join(found)


@given(text=st.text(st.characters(exclude_categories=["Cs"])), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_an_input_is_read_however_it_is_cut(text: str, cuts: list[int]) -> None:
    written = text_arguments(text)
    assert json.loads(written) == {"input": text}
    edges = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    reader = InputReader()
    assert "".join(reader.push(written[a:b]) for a, b in itertools.pairwise(edges)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
def test_what_clients_send_back_is_what_the_model_wrote(text: str) -> None:
    """The prompt of the next turn begins with this one: an input has one spelling."""
    literal = {"type": "json_string", "content": {"type": "const_string", "value": text}}
    tag = structural_tag({"type": "structural_tag", "format": literal})
    assert list(samples(tag, 1)) == [json.dumps(text, ensure_ascii=False)[1:-1]]


def test_channels_have_the_decoded_input() -> None:
    parser = ChannelParser(calls=True, texts={"edit"})
    message = "<|message|>"
    header = f"<|channel|>commentary to=functions.edit <|constrain|>json{message}"
    text = header + text_arguments('a\n"b"') + "<|call|>"
    controls = [at.start() for at in re.finditer(r"<\|", text)]
    events = parser.push(text, controls)
    assert events == [CallBegins(0, "edit", True), Arguments(0, 'a\n"b"')]
    assert parser.called


def test_the_prompt_shows_one_string_and_the_grammar() -> None:
    tool = Tool(name="edit", description="Edits.", text=TextFormat(regex("a+")))
    function = described(tool)["function"]
    assert function["description"] == "Edits.\n\nThe input follows this regular expression:\na+"
    assert json.loads(bytes(function["parameters"]))["required"] == ["input"]
    assert described(Tool(name="edit", text=TextFormat()))["function"].keys() == {"name", "parameters"}


def test_refusals() -> None:
    with pytest.raises(InvalidConstraint, match="cannot follow a json_schema"):
        TextFormat(json_schema({}))
    schema = {
        "type": "json_string",
        "content": {
            "type": "json_schema",
            "json_schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        },
    }
    with pytest.raises(InvalidConstraint, match="inside a JSON string"):
        next(samples(structural_tag({"type": "structural_tag", "format": schema}), 1))
