"""Ollama's API as Ollama's own package calls and reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.server.conftest import ONE
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.test_tools import render_tools

USER: Any = [{"role": "user", "content": "hi"}]
OPTIONS: Any = ollama.Options(num_predict=4, num_ctx=2048, temperature=0.5, stop=["x"])
SCHEMA: Any = {"type": "object", "properties": {"n": {"type": "integer"}}}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


@pytest.fixture
def package(server: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def test_chat(package: ollama.Client) -> None:
    answer = package.chat(MODEL, USER, options=OPTIONS, keep_alive="5m", think=False)
    assert (answer.message.role, answer.message.content, answer.done_reason) == (
        "assistant",
        "<USE",
        "length",
    )
    assert (answer.prompt_eval_count, answer.eval_count) == (len("<user>hi"), 4)
    pieces = list(package.chat(MODEL, USER, options=OPTIONS, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "<USE"
    assert [piece.done for piece in pieces] == [False] * 4 + [True]
    assert pieces[-1].eval_count == 4
    formed = package.chat(MODEL, USER, format=SCHEMA)
    assert json.loads(formed.message.content or "") == {"n": 7}


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_a_tool(package: ollama.Client, frontend: FakeFrontend, stream: bool) -> None:
    render_tools(frontend, "hermes", suffix={"user": "", "assistant": "", "tool": ""})
    frontend.script = ["Let me see. " + ONE, "It rains."]
    messages: list[Any] = [*USER]
    answers = package.chat(MODEL, messages, tools=[get_weather], stream=stream)
    for answer in answers if stream else [answers]:
        if answer.message.content or answer.message.tool_calls:
            messages.append(answer.message)
        for call in answer.message.tool_calls or ():
            result = get_weather(**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    last = package.chat(MODEL, messages, tools=[get_weather])
    assert last.message.content == "It rains."
    result = (frontend.requests[-1].chat or ())[-1]
    assert (result.role, result.name, result.content) == ("tool", "get_weather", 'rain in Bonn, "}é')
    tools = json.loads(frontend.requests[-1].tools)
    assert tools[0]["function"]["parameters"]["required"] == ["city"]


def test_generate(package: ollama.Client) -> None:
    assert package.generate(MODEL, "hi", options=OPTIONS, system="Be brief.").response == "<USE"
    pieces = package.generate(MODEL, "hi", options=OPTIONS, stream=True, logprobs=True, top_logprobs=1)
    found = [(piece.response, piece.logprobs) for piece in pieces]
    assert "".join(text or "" for text, _ in found) == "<USE"
    assert [logprobs[0].token for _, logprobs in found[:-1] if logprobs] == list("<USE")
    assert package.generate(MODEL).done_reason == "load"


def test_embeddings(package: ollama.Client) -> None:
    assert len(package.embed(MODEL, ["abc", "b"], dimensions=2, truncate=True).embeddings) == 2
    assert package.embeddings(MODEL, "abc").embedding == [3, *b"abc"]


def test_models(package: ollama.Client) -> None:
    (model,) = package.list().models
    assert model.model == MODEL
    assert package.ps().models[0].context_length == 4096
    assert package.show(MODEL).capabilities == ["completion", "tools", "embedding"]
    assert package.pull(MODEL).status == "success"
    for refused in (
        lambda: package.delete(MODEL),
        lambda: package.copy(MODEL, "b"),
        lambda: package.create("b", from_=MODEL),
        lambda: package.push(MODEL),
        lambda: list(package.pull("llama3", stream=True)),
        lambda: package.generate(MODEL, keep_alive=0),
    ):
        with pytest.raises(ollama.ResponseError) as error:
            refused()
        assert error.value.status_code == 400


def test_errors(package: ollama.Client, frontend: FakeFrontend) -> None:
    with pytest.raises(ollama.ResponseError, match="There is no model 'x' here") as error:
        package.chat("x", USER)
    assert error.value.status_code == 404
    frontend.fail_after = (1, Exception("secret"))
    with pytest.raises(ollama.ResponseError, match="An internal error ended the stream"):
        list(package.chat(MODEL, USER, stream=True))


async def test_the_async_client(server: LiveServer, frontend: FakeFrontend) -> None:
    async with ollama.AsyncClient(host=server.url) as package:
        assert (await package.chat(MODEL, USER, options=OPTIONS)).message.content == "<USE"
        stream = await package.chat(MODEL, USER, options=OPTIONS, stream=True)
        assert "".join([piece.message.content or "" async for piece in stream]) == "<USE"
        assert (await package.generate(MODEL, "hi", options=OPTIONS, raw=True)).response == "HI "
        assert len((await package.embed(MODEL, "abc")).embeddings) == 1
        assert (await package.list()).models[0].model == MODEL
        assert (await package.show(MODEL)).template is not None
        assert (await package.ps()).models[0].size_vram == 0
