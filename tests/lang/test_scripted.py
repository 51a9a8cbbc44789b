"""The scripted backend keeps its script, its constraints, and an exact prefix cache."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Literal

import pydantic
import pytest

import ramify as rm
from ramify.lang.backends.base import Backend
from ramify.lang.prompt.chat import chatml
from ramify.runtime.model.tokenizer.chat_format import chat_format
from tests.lang.chat_templates import TEMPLATES
from tests.lang.steps import program_of
from tests.model.test_chat_format import tokenizer


@rm.function
def ask(s, question="Q:", **options):
    s += question + rm.gen("x", **options)


def answered(answers, **options):
    return ask.run(backend=rm.ScriptedBackend(answers), **options)


def test_it_is_a_backend():
    assert isinstance(rm.ScriptedBackend([]), Backend)


@pytest.mark.parametrize(
    "answers",
    [
        {"x": "a"},
        {"x": ["a"]},
        {"^Q": "a"},
        {"nothing": "b", "Q:$": "a", "Q": "c"},
        ["a"],
        lambda request: "a",
        {"x": lambda request: "a"},
        {"x": [lambda request: "a"]},
    ],
)
def test_answers_by_name_by_prompt_in_order_or_by_function(answers):
    assert answered(answers)["x"] == "a"


@rm.function
def titled(s, names):
    for name in names:
        s += f"A title, a summary; now the {name}: " + rm.gen(name)


@pytest.mark.parametrize("names", [("title", "summary"), ("summary", "title")])
@pytest.mark.parametrize("answers", [{"summary": "A"}, {"titel": "B", "summary": "A"}])
def test_the_name_of_a_step_answers_no_other_step_by_its_text_in_the_prompt(names, answers):
    with pytest.raises(rm.NotScripted, match=r"no answer for 'title'.*'summary' stands in its prompt"):
        titled.run(names, backend=rm.ScriptedBackend(answers))


def test_a_key_behind_the_name_of_a_step_answers_by_the_prompt():
    script = rm.ScriptedBackend({"summary": "A", "now the t": "B"})
    assert titled.run(("summary", "title"), backend=script)["title"] == "B"


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        ({"y": "a"}, {}, "has no answer for 'x'"),
        ([], {}, "0 answers are used up"),
        ({"x": []}, {}, "0 answers for 'x' are used up"),
        ({"x": 3}, {}, "answers with 3, which is no text"),
        (["d"], {"regex": "[abc]"}, "breaks its regex"),
        (["d"], {"json_schema": {"type": "object"}}, "breaks its json_schema"),
        (["[]"], {"json_schema": {"type": "object"}}, "breaks its json_schema"),
        (["maybe"], {"schema": bool}, "breaks its choices"),
        (["ab"], {"ebnf": 'root ::= "a" [0-9]'}, "the grammar does not allow 'b' after 'a'"),
        (["a"], {"grammar": 'start: "a" /[0-9]/'}, "the grammar does not allow it to end here"),
        (["1 2 3"], {"regex": "[1-3 ]+", "max_tokens": 2}, "has 3 tokens; max_tokens is 2"),
        (["a"], {"min_tokens": 3}, "has 2 tokens; min_tokens is 3"),
    ],
)
def test_a_script_that_does_not_fit_ends_the_run(answers, options, message):
    program = program_of("Q:" + rm.gen("x", **options))
    with pytest.raises(rm.NotScripted, match=message):
        program.run(backend=rm.ScriptedBackend(answers))
    with pytest.raises(rm.ProgramError, match=message):
        program.run(backend=rm.ScriptedBackend(answers, strict=False))["x"]


@pytest.mark.parametrize("option", [{"ignore_eos": True}, {"stop_token_ids": [3]}, {"logit_bias": {3: 1.0}}])
def test_an_option_that_it_lacks_fails_the_step(option):
    error = answered(["a"], **option).error()
    assert f"no {next(iter(option))}" in str(error)


def test_a_select_of_what_is_no_choice():
    program = program_of("Q:" + rm.select("x", ["a", "b"]))
    with pytest.raises(rm.NotScripted, match="'c', which is none of the choices"):
        program.run(backend=rm.ScriptedBackend({"x": "c"}))


@pytest.mark.parametrize(
    ("answer", "options", "text", "reason", "matched", "kept"),
    [
        ("one two", {}, "one two", "stop", 0, 2),
        ("one two three", {"max_tokens": 2}, "one two", "length", None, 2),
        ("one two", {"max_tokens": 2}, "one two", "length", None, 2),
        ("one two", {"stop": " two"}, "one", "stop", " two", 1),
        ("one two", {"stop": "wo"}, "one t", "stop", "wo", 1),  # inside a token
        ("one, two", {"stop": ["x", "e, t"]}, "on", "stop", "e, t", 0),
        ("one", {"stop": "one"}, "", "stop", "one", 0),
        ("", {}, "", "stop", 0, 0),
    ],
)
def test_how_an_output_ends(answer, options, text, reason, matched, kept):
    program = program_of("Q:" + rm.gen("x", **options) + " more" + rm.gen("y"))
    backend = rm.ScriptedBackend({"x": answer, "y": "z"})
    state = program.run(backend=backend)
    assert state["x"] == text
    finish = state.get_meta_info("x")["finish_reason"]
    assert (finish["type"], finish.get("matched")) == (reason, matched)
    following = backend.requests[1].prompt
    ids = tuple(backend.encode([answer])[:kept])
    tail = text.removeprefix(backend.decode(ids))
    assert following == (("Q:", ids, f"{tail} more") if ids else (f"Q:{tail} more",))


def test_the_cache_is_exact_and_scoped():
    backend = rm.ScriptedBackend(lambda request: " answer")

    def usage(prompt, **options):
        state = ask.run(prompt, backend=backend, **options)
        return state.usage.prompt_tokens, state.usage.cached_tokens

    assert usage("a b c d") == (4, 0)
    assert usage("a b c d") == (4, 3)  # the last token is computed for its logits
    assert usage("a b c x") == (4, 3)
    assert usage("a b x y") == (4, 2)
    assert usage("a b c d answer e") == (6, 5)  # outputs are cached as well
    assert usage("a b c d", cache_scope="other") == (4, 0)
    assert rm.flush_cache(backend) is True
    assert usage("a b c d") == (4, 0)


def test_what_a_backend_does_not_have_is_refused():
    with pytest.raises(rm.UnsupportedField, match="ScriptedBackend has no get_server_info"):
        rm.get_server_info(rm.ScriptedBackend([]))


def test_a_prompt_that_is_too_long():
    with pytest.raises(rm.ProgramError, match="context is 100") as failed:
        ask.run("a " * 50, backend=rm.ScriptedBackend(["b"], context_length=100))["x"]
    assert failed.value.__cause__.code == "context_length_exceeded"


def test_tokens_and_texts_are_inverse():
    backend = rm.ScriptedBackend([])
    for text in (
        "<|im_start|>user\nHi there!\n\n  x = 3.14 <|im_end|>\n",
        " \n",
        "naïve 😀 日本",
        "a  b   c",
    ):
        assert backend.decode(backend.encode([text])) == text


# --- values and tool calls ----------------------------------------------------------------------


class Verdict(pydantic.BaseModel):
    score: int = pydantic.Field(alias="points")
    day: datetime.date


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5


class Colour(enum.Enum):
    RED = "red"


VERDICT = Verdict(points=3, day=datetime.date(2026, 1, 2))


@pytest.mark.parametrize(
    ("answer", "schema", "value"),
    [
        (VERDICT, Verdict, VERDICT),
        ({"points": 3, "day": "2026-01-02"}, Verdict, VERDICT),
        (Point(1), Point, Point(1)),
        ([Point(1), {"x": 2}], list[Point], [Point(1), Point(2)]),
        ([], list[int], []),
        (3, int, 3),
        (2.5, float, 2.5),
        (True, bool, True),
        (Colour.RED, Colour, Colour.RED),
        ("red", Colour, Colour.RED),
        (None, Point | None, None),
        ({"a": [1, None]}, {"type": "object"}, {"a": [1, None]}),
        (datetime.date(2026, 1, 2), datetime.date, datetime.date(2026, 1, 2)),
    ],
)
def test_values_are_the_json_that_the_schema_allows(answer, schema, value):
    assert answered({"x": [answer]}, schema=schema)["x"] == value
    if not isinstance(answer, list):  # a list is the answers in order
        assert answered({"x": answer}, schema=schema)["x"] == value


def test_a_function_of_the_request_may_make_a_value():
    assert answered(lambda request: Point(len(request.prompt)), schema=Point)["x"] == Point(1)


def add(a: int, b: int) -> int:
    return a + b


def search(words: str) -> str:
    return words.upper()


@rm.function
def agent(s, **options):
    s += rm.system("You help.", tools=[add, search]) + rm.user("Go.")
    turn = s.call_tools([add, search], "calls", **options)
    return [call.result for call in turn], turn.text


ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
SEARCH = rm.ToolCall("search", {"words": "sea"})


@pytest.mark.parametrize(
    ("answer", "results"),
    [
        (ADD, [3]),
        (SEARCH, ["SEA"]),
        ([[ADD, SEARCH]], [3, "SEA"]),
        (lambda request: [SEARCH, ADD], ["SEA", 3]),
    ],
)
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("template", [None, "qwen2.5", "llama-3.1"])
def test_tool_calls_are_written_as_the_model_would(answer, results, required, template):
    form = chat_format(tokenizer(TEMPLATES[template])) if template else chatml()
    backend = rm.ScriptedBackend({"calls": answer}, chat_format=form)
    if template == "llama-3.1" and len(results) > 1:  # its template has one call a turn
        with pytest.raises(rm.NotScripted, match="which do not fit the turn"):
            agent.run(backend=backend, required=required)
        return
    state = agent.run(backend=backend, required=required)
    assert state.ret_value == (results, "")
    arguments = "parameters" if template == "llama-3.1" else "arguments"
    assert state.text().count(f'", "{arguments}": {{"') == len(results) + (template is None)


def test_a_turn_without_calls_is_words_or_an_empty_list():
    assert agent.run(backend=rm.ScriptedBackend({"calls": "No."}), required=False).ret_value == ([], "No.")
    assert agent.run(backend=rm.ScriptedBackend({"calls": [[]]}), required=False).ret_value == ([], "")


# --- errors and what is left --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        (
            {"verdct": "a", "other": "b"},
            {"name": "verdict"},
            "The script has no answer for 'verdict', which is call 1 and wants text. "
            "Its keys are 'verdct', 'other'. Did you mean verdct?",
        ),
        (
            {"x": []},
            {"choices": ["yes", "no"]},
            """The script's 0 answers for 'x' are used up. Call 1, of 'x', wants one of ["yes", "no"].""",
        ),
        (
            ["yes!"],
            {"choices": ["yes", "no"]},
            "The script selects 'yes!', which is none of the choices 'yes', 'no'. "
            "It is answer 1 of 1 in the script, in call 1. Did you mean yes?",
        ),
        (
            {"x": "yess"},
            {"schema": Literal["yes", "no"]},
            """The scripted answer 'yess' breaks its choices: it is none of ["yes", "no"]. """
            "It is the script's answer for 'x', in call 1. Did you mean yes?",
        ),
        (
            {"x": [{"n": 1}]},
            {"schema": {"type": "object", "required": ["m"]}},
            """'{"n": 1}' breaks its json_schema: The property 'm' is missing (/required). """
            """It wants json_schema {"type":"object","required":["m"]}. """
            "It is answer 1 of 1 for 'x' in the script, in call 1.",
        ),
        (
            {"x": [1, 2]},
            {"schema": list[int]},
            "A list in a script is the answers in order; write [[…]] for one answer that is a list.",
        ),
        ({"x": object()}, {"schema": Point}, "which has no JSON: "),
        (
            {"x": Point(1)},
            {},
            "which is no text. It is the script's answer for 'x', in call 1. Write the text",
        ),
    ],
)
def test_errors_say_where_and_what_was_expected(answers, options, message):
    program = program_of("Q:" + rm.gen(**{"name": "x", **options}))
    error = program.run(backend=rm.ScriptedBackend(answers, strict=False)).error()
    assert f"{__file__}:{error.line.rpartition(':')[2]} failed: " in str(error)
    assert message in str(error)
    with pytest.raises(rm.NotScripted) as ended:
        program.run(backend=rm.ScriptedBackend(answers))
    assert str(ended.value) == str(error)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"name": "serch", "arguments": {}},
            "it calls 'serch', which is none of the tools 'add', 'search'. ",
        ),
        ({"name": "serch", "arguments": {}}, " Did you mean search?"),
        ({"name": "add", "arguments": {"a": 1}}, "the arguments of add: The property 'b' is missing"),
        ([[ADD] * 5], "it makes 5 calls, which do not fit the turn. It is answer 1 of 1 for 'calls' in the"),
        ('\n{"name": "serch", "arguments": {}}\n</tool_call>', " Did you mean search?"),
        ("\n{", "The output ended inside a call"),
        ({"name": "add", "arguments": {"a": object()}}, "which has no JSON: "),
        (
            3,
            "3, which is no tool call. It is the script's answer for 'calls', in call 1. Write rm.",
        ),
    ],
)
def test_errors_of_tool_calls(answer, message):
    with pytest.raises(rm.NotScripted) as error:
        agent.run(backend=rm.ScriptedBackend({"calls": answer}))
    assert message in str(error.value)


def test_the_second_call_is_named():
    program = program_of("Q:" + rm.gen("x") + rm.gen("y", schema=int))
    error = program.run(backend=rm.ScriptedBackend(["a", "b", "c"], strict=False)).error()
    assert "It is answer 2 of 3 in the script, in call 2." in str(error)


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ({"x": "a", "y": "b", "z": ["c", "d"]}, [("y", "b"), ("z", "c"), ("z", "d")]),
        ({"x": ["a", "b"]}, [("x", "b")]),
        ({"^Q": "a"}, []),
        (["a", "b"], [(1, "b")]),
        (lambda request: "a", []),
    ],
)
def test_answers_that_were_not_asked_for_are_known(answers, left):
    backend = rm.ScriptedBackend(answers)
    assert ask.run(backend=backend)["x"] == "a"
    assert backend.unused == left
