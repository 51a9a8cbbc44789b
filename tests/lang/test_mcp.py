"""Tools of real MCP servers, over stdio and streamable HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest, RequestTimeout
from ramify.lang.tools.mcp import ToolError

SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = [sys.executable, SERVER]
NAMES = ["add", "weather_today", "lines", "picture", "divide", "environment", "header", "sleep", "die"]


@rm.function
def agent(s, tools):
    s += rm.system("You help.", tools=tools) + rm.user("Go.")
    return list(s.call_tools(tools, "calls", 512, max_calls=8))


def called(tools, *calls):
    script = rm.ScriptedBackend({"calls": [[rm.ToolCall(name, arguments) for name, arguments in calls]]})
    return agent.run(tools, backend=script).ret_value


@pytest.fixture(scope="module")
def tools():
    with rm.mcp(COMMAND, env={"RAMIFY_TEST": "set"}, cwd=os.sep) as tools:
        yield tools


def serve():
    """A server that is reached by HTTP: (its process, its URL)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "Uvicorn running" in line:
            break
    return process, f"http://127.0.0.1:{port}/mcp"


@pytest.fixture(scope="module")
def url():
    process, url = serve()
    yield url
    process.kill()
    process.communicate()


def test_tools_of_a_command(tools):
    assert [tool.name for tool in tools] == NAMES
    add = tools[0]
    assert add.description == "Add two numbers."
    assert list(add.parameters["properties"]) == ["a", "b"]
    assert add.parameters["additionalProperties"] is False
    added, weather, lines, picture, set_, failed = called(
        tools,
        ("add", {"a": 1}),
        ("weather_today", {"city": "Delft"}),
        ("lines", {"number": 2}),
        ("picture", {}),
        ("environment", {"name": "RAMIFY_TEST"}),
        ("divide", {"a": 1, "b": 0}),
    )
    assert (added.result, added.shown) == ({"result": 3}, '{"result":3}')
    assert weather.result == {"city": "Delft", "degrees": 20}
    assert lines.result == "line 0\nline 1"
    assert picture.result == "Here:\n[image: image/png, 5 bytes]"
    assert set_.result == {"result": f"set in {os.sep}"}
    assert isinstance(failed.error, ToolError)
    assert failed.shown == "Error: ToolError: Error executing tool divide."


def test_tools_of_a_url(url):
    with rm.mcp(url, headers={"X-Token": "secret"}, prefix="remote_") as tools:
        assert [tool.name for tool in tools] == [f"remote_{name}" for name in NAMES]
        added, header = called(
            tools, ("remote_add", {"a": 1, "b": 1}), ("remote_header", {"name": "x-token"})
        )
    assert (added.result, header.result) == ({"result": 2}, {"result": "secret"})


async def test_an_async_program_in_an_async_block(url):
    @rm.function
    async def program(s, tools):
        s += rm.system("You help.", tools=tools) + rm.user("Go.")
        return [call.result for call in await s.call_tools(tools, "calls")]

    script = {"calls": [[rm.ToolCall("add", {"a": number}) for number in range(3)]]}
    async with rm.mcp(url) as over_http, rm.mcp(COMMAND) as over_stdio:
        for tools in (over_http, over_stdio):
            state = await program.run(tools, backend=rm.ScriptedBackend(script))
            assert state.ret_value == [{"result": 2}, {"result": 3}, {"result": 4}]
    with pytest.raises(BackendError, match=r"mcp_server.py is closed, so add cannot be called"):
        await over_stdio[0](a=1)


def test_pages_names_and_resources(caplog):
    with caplog.at_level("WARNING"), rm.mcp(f"{sys.executable} {SERVER} paged") as tools:
        assert [tool.name for tool in tools] == ["tool_0", "tool_2"]
        (call,) = called(tools, ("tool_2", {}))
    assert call.result == (
        "[resource link: notes, file:///notes, text/plain]\nA text.\n"
        "[resource: file:///b, application/zip, 6 bytes]"
    )
    (message,) = caplog.messages
    assert message.startswith("The tool tool 1 of the MCP server ")
    assert "is left out: its schema is invalid. At /required: " in message


def test_a_server_that_dies_fails_its_calls_and_no_others():
    def local() -> str:
        return "here"

    with rm.mcp(COMMAND) as tools:
        died, lived = called([*tools, local], ("die", {}), ("local", {}))
        (later,) = called(tools, ("add", {"a": 1}))
    assert lived.result == "here"
    for call, name in ((died, "die"), (later, "add")):
        assert isinstance(call.error, BackendError)
        assert f"mcp_server.py has ended, so {name} cannot be called. It wrote: " in str(call.error)
        assert "I cannot go on." in str(call.error)


def test_a_url_that_dies_fails_its_calls():
    process, url = serve()
    with rm.mcp(url) as tools:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        (call,) = called(tools, ("add", {"a": 1}))
    assert isinstance(call.error, BackendError)
    assert f"{url} " in str(call.error)


def test_a_call_that_takes_too_long_is_given_up():
    with rm.mcp(COMMAND, timeout=0.05) as tools:
        (call,) = called(tools, ("sleep", {}))
        assert isinstance(call.error, RequestTimeout)
    with rm.mcp(COMMAND, concurrency=1) as tools:
        assert [call.error for call in called(tools, *[("add", {"a": 1})] * 4)] == [None] * 4


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (
            [sys.executable, "-c", "raise SystemExit('no luck')"],
            {},
            "did not start: Connection closed. It wrote: no luck",
        ),
        ("no-such-command --flag", {}, "no-such-command --flag did not start: .*No such file"),
        ("http://127.0.0.1:9/mcp", {}, "http://127.0.0.1:9/mcp did not start: .*connect"),
        (
            [sys.executable, "-c", "input(); input()"],
            {"startup_timeout": 0.5},
            "it did not answer within 0.5 s",
        ),
    ],
)
def test_a_server_that_does_not_start(server, options, message):
    with pytest.raises(BackendError, match=message), rm.mcp(server, **options):
        pass


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ("server", {"headers": {}}, "headers is for a URL"),
        ("http://localhost", {"env": {}}, "env is for a command"),
        ("http://localhost", {"cwd": "/"}, "cwd is for a command"),
        ([], {}, "needs a command or a URL"),
    ],
)
def test_options_that_do_not_fit(server, options, message):
    with pytest.raises(InvalidRequest, match=message):
        rm.mcp(server, **options)


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'ramify-llm\[mcp\]'"):
        rm.mcp(COMMAND)


def test_a_block_is_entered_once(tools):
    server = rm.mcp(COMMAND)
    with server, pytest.raises(InvalidRequest, match="has been entered before"):
        server.__enter__()
