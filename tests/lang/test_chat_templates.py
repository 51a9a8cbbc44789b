"""Chats are appended piece by piece, and the prompts equal those that the model's template renders."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

import ramify as rm
from ramify.tool_calls.formats import FORMATS
from tests.lang.chat_templates import TEMPLATES, pieces_of, rendered
from tests.lang.steps import add, program_of

EXACT = ("smollm2", "qwen2.5", "qwen3")
NATIVE_TOOLS = ("qwen2.5", "qwen3", "llama-3.1")


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_cannot_be_appended_exactly_is_reported(name):
    pieces = pieces_of(name)
    assert pieces.exact is (name in EXACT)
    assert (pieces.tools is not None) is (name in NATIVE_TOOLS)
    if not pieces.exact:
        assert "by the template and" in pieces.difference
    else:
        assert pieces.difference == ""


@pytest.mark.parametrize("name", [*EXACT, "llama-3.1"])
def test_every_prompt_of_a_chat_is_the_templates(name):
    @rm.function
    def chat(s):
        s += rm.system("Be brief.")
        for turn in range(6):
            s += rm.user(f"Question {turn}?")
            s += rm.assistant(rm.gen("answer"))
            s["answer"]

    backend = rm.ScriptedBackend(lambda request: "It is so.", chat_format=pieces_of(name))
    state = chat.run(backend=backend)
    messages = state.messages()
    assert len(messages) == 13
    for turn, request in enumerate(backend.requests):
        assert backend.prompt_text(request) == rendered(name, messages[: 2 * turn + 2])


@rm.tool
def weather(city: Literal["Delft", "Ghent"], day: int = 0) -> str:
    """Tell the weather: "rain" or sun.

    Args:
        city: Where.
    """
    return f'It is {day} "degrees"\nin {city} & é.'


TOOLS = [weather, add]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", NATIVE_TOOLS)
def test_every_prompt_of_an_agent_is_the_templates(name, count):
    pieces = pieces_of(name)
    form = FORMATS[pieces.tool_format]
    made = [("weather", {"city": "Delft", "day": 3}), ("add", {"a": 1, "b": 2})][:count]
    if form.separator is None:
        made = made[:1]
    opening, middle, end = form.call
    calls = (form.separator or "").join(
        opening + called + middle + json.dumps(given) + end for called, given in made
    )

    @rm.function
    def agent(s):
        s += rm.system("Be brief.", tools=TOOLS[:count])
        for turn in range(3):
            s += rm.user(f"Question {turn}?")
            s.call_tools(TOOLS, "calls", max_calls=2)
            s += rm.assistant(rm.gen("answer"))
            s["answer"]

    script = {"calls": calls.removeprefix(form.trigger), "answer": "So it is."}
    backend = rm.ScriptedBackend(script, chat_format=pieces)
    state = agent.run(backend=backend)
    listed = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in TOOLS[:count]
    ]
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": called, "arguments": given}}
            for i, (called, given) in enumerate(made)
        ],
    }
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    wanted = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        wanted.append(rendered(name, messages, tools=listed) + form.trigger)
        messages.append(asked)
        for i, (_, result) in enumerate(zip(made, ('It is 3 "degrees"\nin Delft & é.', "3"), strict=False)):
            messages.append({"role": "tool", "tool_call_id": f"abcdefgh{i}", "content": result})
        wanted.append(rendered(name, messages, tools=listed))
        messages.append({"role": "assistant", "content": "So it is."})
    assert [backend.prompt_text(request) for request in backend.requests] == wanted
    assert [turn["role"] for turn in state.messages()][:4] == ["system", "user", "assistant", "tool"]
    assert state.messages()[3]["content"] == 'It is 3 "degrees"\nin Delft & é.'
    assert all(call.error is None for call in state["calls"])


@pytest.mark.parametrize("name", ["smollm2", "mistral-v0.3"])
def test_templates_without_tools_that_can_be_appended_get_the_generic_form(name):
    @rm.function
    def agent(s):
        s += rm.user("Go.", tools=TOOLS)
        s.call_tools(TOOLS, "calls")

    call = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    state = agent.run(backend=rm.ScriptedBackend([call], chat_format=pieces_of(name)))
    assert state["calls"][0].result == 3
    assert "<tool_response>\n3\n</tool_response>" in state.text()
    assert [turn["role"] for turn in state.messages()] == ["user", "assistant", "user"]


def test_results_outside_turns_have_the_generic_form_also_where_calls_have_their_own():
    @rm.function
    def agent(s):
        s += "1 + 2?\n"
        s.call_tools(TOOLS, "calls")

    call = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    state = agent.run(backend=rm.ScriptedBackend([call], chat_format=pieces_of("qwen2.5")))
    assert state.text() == f"1 + 2?\n<tool_call>{call}\n<tool_response>\n3\n</tool_response>\n"


def test_tools_stand_where_the_template_has_them():
    agent = program_of(rm.user("Go.", tools=TOOLS))
    error = agent.run(backend=rm.ScriptedBackend([], chat_format=pieces_of("qwen3"))).error()
    assert "in the first system turn" in str(error)


def test_a_result_may_be_longer_than_a_line():
    """Results of Llama 3.1 are JSON strings."""

    @rm.tool
    def quote() -> str:
        """Quote."""
        return 'a "b"\n\\c'

    @rm.function
    def agent(s):
        s += rm.system("Hi.", tools=[quote]) + rm.user("Go.")
        s.call_tools([quote])
        s.sync()

    backend = rm.ScriptedBackend(['quote", "parameters": {}}'], chat_format=pieces_of("llama-3.1"))
    text = agent.run(backend=backend).text()
    assert '\n\n"a \\"b\\"\\n\\\\c"<|eot_id|>' in text
