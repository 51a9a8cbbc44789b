"""Tool loops of the packages that clients are built on, against `ramify serve`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.agents.clients import COMMAND, MODEL, OUTPUT, Script
from tests.agents.scripted_model import call_text
from tests.agents.serving import scripted_server
from tests.agents.session import FINAL
from tests.end_to_end.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]

ASK = f"Run `{COMMAND}`."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ABOUT = "Run a command in the shell. " * 40
"""Long enough that a page of KV more or less is no share of the prompt."""
Loop = Callable[[str], tuple[dict[str, Any], str, int, int]]
"""Takes the server's address; returns the call's arguments, the last text, and the first prompt's tokens with
those of them that were found cached."""


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model calls the tool of the name that is the parameter."""
    script = Script(request.param, call_text(request.param, {"command": COMMAND}), False)
    with scripted_server(script, tmp_path_factory.mktemp("model")) as served:
        yield served


def chat(url: str) -> tuple[dict[str, Any], str, int, int]:
    openai = pytest.importorskip("openai")
    function = {"name": "bash", "description": ABOUT, "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": ASK}]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "tools": [{"type": "function", "function": function}], "messages": messages}
        first = client.chat.completions.create(**fields)
        (call,) = first.choices[0].message.tool_calls
        messages.append(first.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": OUTPUT})
        second = client.chat.completions.create(**fields)
    cached = second.usage.prompt_tokens_details.cached_tokens
    answer = second.choices[0].message.content
    return json.loads(call.function.arguments), answer, first.usage.prompt_tokens, cached


def responses(url: str) -> tuple[dict[str, Any], str, int, int]:
    openai = pytest.importorskip("openai")
    tool = {"type": "function", "name": "bash", "description": ABOUT, "parameters": PARAMETERS}
    items: list[Any] = [{"role": "user", "content": ASK}]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "tools": [tool], "input": items, "store": False}
        first = client.responses.create(**fields)
        (call,) = first.output
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": OUTPUT}]
        second = client.responses.create(**fields)
    cached = second.usage.input_tokens_details.cached_tokens
    return json.loads(call.arguments), second.output_text, first.usage.input_tokens, cached


def namespace(url: str) -> tuple[dict[str, Any], str, int, int]:
    openai = pytest.importorskip("openai")
    function = {"type": "function", "name": "bash", "description": ABOUT, "parameters": PARAMETERS}
    tool = {"type": "namespace", "name": "shell", "description": "Shells.", "tools": [function]}
    items: list[Any] = [{"role": "user", "content": ASK}]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "tools": [tool], "input": items, "store": False}
        first = client.responses.create(**fields)
        (call,) = first.output
        assert (call.namespace, call.name) == ("shell", "bash")
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": OUTPUT}]
        second = client.responses.create(**fields)
    cached = second.usage.input_tokens_details.cached_tokens
    return json.loads(call.arguments), second.output_text, first.usage.input_tokens, cached


def messages(url: str) -> tuple[dict[str, Any], str, int, int]:
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "bash", "description": ABOUT, "input_schema": PARAMETERS}
    turns: list[Any] = [{"role": "user", "content": ASK}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        fields = {"model": MODEL, "max_tokens": 200, "tools": [tool], "messages": turns}
        with client.messages.stream(**fields) as stream:
            first = stream.get_final_message()
        (call,) = first.content
        turns.append({"role": "assistant", "content": first.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": OUTPUT}
        turns.append({"role": "user", "content": [result]})
        second = client.messages.create(**fields)
    used = first.usage
    prompt = used.input_tokens + used.cache_read_input_tokens + used.cache_creation_input_tokens
    return call.input, second.content[0].text, prompt, second.usage.cache_read_input_tokens


def ollama_chat(url: str) -> tuple[dict[str, Any], str, int, int]:
    ollama = pytest.importorskip("ollama")
    function = {"name": "bash", "description": ABOUT, "parameters": PARAMETERS}
    turns: list[Any] = [{"role": "user", "content": ASK}]
    with ollama.Client(host=url) as client:
        fields = {"model": MODEL, "tools": [{"type": "function", "function": function}], "messages": turns}
        first = client.chat(**fields)
        (call,) = first.message.tool_calls
        turns += [first.message, {"role": "tool", "tool_name": "bash", "content": OUTPUT}]
        second = client.chat(**fields)
    return (
        dict(call.function.arguments),
        second.message.content,
        0,
        0,
    )  # its answers do not tell cached tokens


@pytest.mark.parametrize(
    ("served", "loop"),
    [*(("bash", loop) for loop in (chat, responses, messages, ollama_chat)), ("shell__bash", namespace)],
    indirect=["served"],
)
def test_a_tool_loop(served: Served, loop: Loop) -> None:
    arguments, answer, prompt, cached = loop(served.url)
    assert arguments == {"command": COMMAND}
    assert answer == FINAL
    assert cached >= 0.95 * prompt
