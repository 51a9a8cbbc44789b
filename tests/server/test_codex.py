"""The Responses API as Codex uses it: namespaces, hosted tools, and items of other servers in the history.

The requests are those of Codex 0.171 in a session with an MCP server, with shortened texts and other ids.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ramify.errors import InvalidConstraint
from ramify.grammar.compile.policy import compile_constraint
from ramify.messages import ChatMessage, ToolCall
from tests.grammar.vocabularies import tiny
from tests.server.conftest import refused
from tests.server.fake_frontend import MODEL, FakeFrontend, LiveServer
from tests.server.responses_contract import check_events, check_response
from tests.server.test_responses import ASK, TIME, stream
from tests.server.test_tools import render_tools

REQUESTS: dict[str, Any] = json.loads((Path(__file__).parent / "codex_requests.json").read_text())
SHOUT = '<tool_call>\n{"name": "mcp__lab__shout", "arguments": {"text": "quiet"}}\n</tool_call>'


def request(name: str) -> Any:
    return copy.deepcopy(REQUESTS[name]) | {"model": MODEL}


def space(name: str, *tools: str, **fields: Any) -> Any:
    """A namespace of functions that take no arguments."""
    inner = [{"type": "function", "name": tool, "description": f"It is {tool}."} for tool in tools]
    return {"type": "namespace", "name": name, "description": f"About {name}.", "tools": inner, **fields}


@pytest.fixture(autouse=True)
def tools(frontend: FakeFrontend) -> None:
    render_tools(frontend, "hermes")


def last(frontend: FakeFrontend) -> tuple[ChatMessage, ...]:
    return frontend.requests[-1].chat or ()


def shown(frontend: FakeFrontend) -> dict[str, str]:
    """Name of each tool in the prompt → its description."""
    functions = [tool["function"] for tool in json.loads(frontend.requests[-1].tools)]
    return {function["name"]: function["description"] for function in functions}


def test_a_session(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = [SHOUT, "It shouted."]
    final = check_events(stream(http, request("first")))
    (call,) = final["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__lab", "shout")
    assert json.loads(call["arguments"]) == {"text": "quiet"}
    assert list(shown(frontend)) == [
        "exec_command",
        "view_image",
        "multi_agent_v1__close_agent",
        "multi_agent_v1__spawn_agent",
        "mcp__lab__shout",
    ]
    final = check_events(stream(http, request("second")))
    assert [item["content"][0]["text"] for item in final["output"]] == ["It shouted."]
    said, told = last(frontend)[-2:]
    assert [(one.name, one.arguments) for one in said.tool_calls] == [
        ("mcp__lab__shout", '{"text": "quiet words"}')
    ]
    assert (told.role, told.name, told.tool_call_id) == ("tool", "mcp__lab__shout", said.tool_calls[0].id)


def test_what_has_no_effect_is_named(http: httpx.Client) -> None:
    body = request("first") | {
        "stream": False,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "text": {"verbosity": "low"},
    }
    response = http.post("/v1/responses", json=body)
    check_response(response.json())
    assert response.headers["x-ramify-ignored"].split(", ") == [
        "tools[web_search]",
        "reasoning.summary",
        "text.verbosity",
        "include[web_search_call.action.sources]",
        "client_metadata",
    ]


def test_strict_fields_refuse_hosted_tools() -> None:
    with LiveServer(FakeFrontend(), strict_fields=True) as server, httpx.Client(base_url=server.url) as http:
        error = refused(http.post("/v1/responses", json=ASK | {"tools": [{"type": "web_search"}]}))
        assert error["param"] == "tools[0]"


def test_one_name_in_two_namespaces(http: httpx.Client, frontend: FakeFrontend) -> None:
    call = '<tool_call>\n{"name": "b__go", "arguments": {}}\n</tool_call>'
    frontend.script = [call]
    body = ASK | {"tools": [TIME | {"name": "go"}, space("a", "go", "stop"), space("b", "go")]}
    (item,) = http.post("/v1/responses", json=body).json()["output"]
    assert (item["namespace"], item["name"]) == ("b", "go")
    # The model reads what a namespace is for before the first of its tools.
    assert shown(frontend) == {
        "go": "Now.",
        "a__go": "Tools of a: About a.\n\nIt is go.",
        "a__stop": "It is stop.",
        "b__go": "Tools of b: About b.\n\nIt is go.",
    }


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "go"}, ["go"]),
        ({"type": "function", "name": "go", "namespace": "b"}, ["b__go"]),
        ({"type": "function", "name": "stop"}, ["a__stop"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "a"}]},
            ["a__go", "a__stop"],
        ),
    ],
)
def test_tool_choice_in_namespaces(
    http: httpx.Client, frontend: FakeFrontend, choice: Any, names: list[str]
) -> None:
    frontend.script = ["{}"]
    tools = [TIME | {"name": "go"}, space("a", "go", "stop"), space("b", "go")]
    http.post("/v1/responses", json=ASK | {"tools": tools, "tool_choice": choice})
    wanted = frontend.requests[-1].constraint
    assert wanted is not None
    begun = [one["begin"] for one in json.loads(wanted.source)["format"]["elements"][1]["elements"]]
    assert [text.partition('"')[0] for text in begun] == names


@pytest.mark.parametrize(
    ("change", "param", "remedy"),
    [
        ({"tools": [space("a", "b"), TIME | {"name": "a__b"}]}, "tools[1].name", ""),
        ({"tools": [space("a", "b", "b")]}, "tools[0].tools[1].name", ""),
        ({"tools": [space("a")]}, "tools[0].tools", ""),
        ({"tools": [space("a b", "c")]}, "tools[0].name", ""),
        ({"tools": [space("a", "b", depth=2)]}, "tools[0].depth", ""),
        (
            {"tools": [space("a", "b"), space("c", "b")], "tool_choice": {"type": "function", "name": "b"}},
            "tool_choice.name",
            "Add its namespace",
        ),
        (
            {
                "tools": [space("a", "b")],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "namespace", "name": "b"}],
                },
            },
            "tool_choice.tools[0].name",
            "",
        ),
        (
            {"tools": [space("a", "b")], "tool_choice": {"type": "mcp", "server_label": "a"}},
            "tool_choice.type",
            "Offer a function",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", ""),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_image", "image_url": "x"}],
                    }
                ]
            },
            "input[0].output[0].type",
            "",
        ),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, change: Any, param: str, remedy: str) -> None:
    error = refused(http.post("/v1/responses", json=ASK | change))
    assert error["param"] == param
    assert remedy in error["message"]


def test_a_schema_in_a_namespace_is_blamed_there(http: httpx.Client, frontend: FakeFrontend) -> None:
    tools = space("a", "b", "c")
    tools["tools"][1]["parameters"] = {"type": "array"}
    error = refused(http.post("/v1/responses", json=ASK | {"tools": [TIME, tools]}))
    assert error["param"] == "tools[1].tools[1].parameters.type"


def test_additional_tools(http: httpx.Client, frontend: FakeFrontend) -> None:
    """Codex sends its tools as an item to models that have no list of tools."""
    later = {"type": "additional_tools", "role": "developer", "id": "at_1"}
    items = [
        later | {"tools": [TIME, space("a", "b")]},
        {"role": "user", "content": "hi"},
        later | {"tools": [TIME | {"description": "Then."}, {"type": "web_search"}]},
    ]
    response = http.post("/v1/responses", json=ASK | {"input": items})
    assert response.headers["x-ramify-ignored"] == "tools[web_search]"
    assert shown(frontend) == {"a__b": "Tools of a: About a.\n\nIt is b.", "get_time": "Then."}
    assert [turn.content for turn in last(frontend)] == ["hi"]


def test_additional_tools_of_the_history(http: httpx.Client, frontend: FakeFrontend) -> None:
    offer = {"type": "additional_tools", "role": "developer", "tools": [TIME, space("a", "b")]}
    first = http.post(
        "/v1/responses", json=ASK | {"input": [offer, {"role": "user", "content": "hi"}]}
    ).json()
    offered = shown(frontend)
    assert list(offered) == ["get_time", "a__b"]
    items = http.get(f"/v1/responses/{first['id']}/input_items?order=asc").json()["data"]
    reference = {"type": "item_reference", "id": items[0]["id"]}
    for more in ({"previous_response_id": first["id"], "input": "go on"}, {"input": [reference, items[1]]}):
        http.post("/v1/responses", json=ASK | more)
        assert shown(frontend) == offered


def test_history_of_other_servers(http: httpx.Client, frontend: FakeFrontend) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABo"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "call_id": "a", "output": "x.py"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
        {"type": "shell_call", "call_id": "b", "action": {"commands": ["ls"]}, "environment": None},
        {"type": "shell_call_output", "call_id": "b", "output": [{"stdout": "x.py", "stderr": ""}]},
        {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": [
            {"type": "input_text", "text": "So."}, {"type": "encrypted_content", "encrypted_content": "x"}]},
    ]  # fmt: skip
    response = http.post("/v1/responses", json=ASK | {"input": items})
    assert response.headers["x-ramify-ignored"].split(", ") == [
        "input[].encrypted_content",
        "input[web_search_call]",
        "input[].content[].encrypted_content",
    ]
    _, looked, seen, said, seen_again, message = last(frontend)
    assert looked.tool_calls == (
        ToolCall(id="a", name="local_shell", arguments='{"type":"exec","command":["ls"]}'),
    )
    assert looked.reasoning == ""
    assert (seen.role, seen.name, seen.content) == ("tool", "local_shell", "x.py")
    assert (said.content, said.reasoning) == ("One file.", "Hm.")
    assert [one.name for one in said.tool_calls] == ["shell"]
    assert (seen_again.name, seen_again.content) == ("shell", '[{"stdout":"x.py","stderr":""}]')
    assert (message.role, message.content) == ("user", "[/root/a to /root]\nSo.")


@pytest.mark.parametrize("encrypted", ["gAAAAABo", "ramify1.a?b=", "ramify2.YQ==", "ramify1./w=="])
def test_reasoning_of_another_server_is_left_out(
    http: httpx.Client, frontend: FakeFrontend, encrypted: str
) -> None:
    items = [{"role": "user", "content": "hi"}, {"type": "reasoning", "encrypted_content": encrypted}]
    response = http.post("/v1/responses", json=ASK | {"input": items})
    assert response.headers["x-ramify-ignored"] == "input[].encrypted_content"
    assert [turn.role for turn in last(frontend)] == ["user"]


def test_a_result_without_its_call(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    """An agent that shortens its history may drop the call and keep the result."""
    items: Any = [
        {"role": "user", "content": "hi"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}] * 2},
        {"type": "function_call_output", "name": "go", "namespace": "b", "output": "y"},
    ]
    client.responses.create(**ASK | {"input": items})
    assert [(turn.role, turn.name, turn.content) for turn in last(frontend)[1:]] == [
        ("tool", "", "xx"),
        ("tool", "b__go", "y"),
    ]


@pytest.mark.parametrize(
    "reasoning", [None, {}, {"effort": None, "summary": None}, {"summary": "auto", "context": "all_turns"}]
)
def test_reasoning_is_not_switched_on_by_nulls(
    http: httpx.Client, frontend: FakeFrontend, reasoning: Any
) -> None:
    assert http.post("/v1/responses", json=ASK | {"reasoning": reasoning}).status_code == 200
    assert not frontend.requests[-1].preambles


PATCH_TOOL: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /[a-z]+/ NL\nNL: "\\n"'},
}
PATCH = '*** say "hi"\n'
CALL = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** say \\"hi\\"\\n"}}\n</tool_call>'


def test_a_custom_tool(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = [CALL] * 2
    body = ASK | {"tools": [PATCH_TOOL, TIME]}
    final = check_events(stream(http, body))
    (call,) = final["output"]
    assert call == {
        "id": call["id"],
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": call["call_id"],
        "name": "apply_patch",
        "input": PATCH,
    }
    assert call["id"].startswith("ctc_")
    whole = http.post("/v1/responses", json=body).json()
    check_response(whole)
    assert whole["output"][0]["input"] == PATCH
    assert shown(frontend)["apply_patch"].startswith("Edits a file.")
    assert '"*** " /[a-z]+/ NL' in shown(frontend)["apply_patch"]
    told = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    http.post("/v1/responses", json=body | {"input": [{"role": "user", "content": "hi"}, call, told]})
    _, said, result = last(frontend)
    assert said.tool_calls[0].name == "apply_patch"
    assert json.loads(said.tool_calls[0].arguments) == {"input": PATCH}
    assert (result.role, result.name, result.content) == ("tool", "apply_patch", "Done.")


def test_a_patch(http: httpx.Client, frontend: FakeFrontend) -> None:
    check_events(stream(http, request("patch")))
    said, told = last(frontend)[-2:]
    assert json.loads(said.tool_calls[0].arguments)["input"].startswith("*** Begin Patch\n")
    assert (told.name, told.content.partition("\n")[0]) == ("apply_patch", "Exit code: 0")
    wanted = frontend.requests[-1].constraint
    assert wanted is not None
    compile_constraint(wanted, tiny())  # the grammar is one that can be enforced


def test_a_custom_tool_in_a_namespace(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.script = [CALL.replace("apply_patch", "files__edit")]
    tools = {
        "type": "namespace",
        "name": "files",
        "description": "",
        "tools": [PATCH_TOOL | {"name": "edit"}],
    }
    (call,) = check_events(stream(http, ASK | {"tools": [tools]}))["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "files", "edit")


def test_a_custom_tool_of_chat_completions(client: openai.OpenAI, frontend: FakeFrontend) -> None:
    frontend.script = [CALL] * 2
    tool: Any = {
        "type": "custom",
        "custom": {
            "name": "apply_patch",
            "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[^x]*"}},
        },
    }
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    message = client.chat.completions.create(**ask).choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("apply_patch", PATCH)
    pieces = [
        piece.model_dump(exclude_none=True)
        for chunk in client.chat.completions.create(**ask, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert (pieces[0]["type"], pieces[0]["custom"]) == ("custom", {"name": "apply_patch", "input": ""})
    assert "".join(piece["custom"]["input"] for piece in pieces) == PATCH
    told: Any = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
    client.chat.completions.create(**ask | {"messages": [*ask["messages"], message, told]})
    said = last(frontend)[1].tool_calls[0]
    assert json.loads(said.arguments) == {"input": PATCH}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json"}, "tools[0].format.type"),
        ({"type": "grammar"}, "tools[0].format.syntax"),
        ({"type": "grammar", "syntax": "yacc"}, "tools[0].format.syntax"),
        ({"type": "grammar", "syntax": "lark"}, "tools[0].format.definition"),
        ({"type": "text", "syntax": "lark"}, "tools[0].format.syntax"),
    ],
)
def test_a_wrong_format_is_named(http: httpx.Client, form: Any, param: str) -> None:
    error = refused(http.post("/v1/responses", json=ASK | {"tools": [PATCH_TOOL | {"format": form}]}))
    assert error["param"] == param


def test_a_refused_grammar_names_its_tool(http: httpx.Client, frontend: FakeFrontend) -> None:
    frontend.fail_first = InvalidConstraint(
        "The rule NL is not defined.",
        field="structural_tag",
        pointer="/format/elements/1/elements/1/content/elements/1/content/grammar",
    )
    tools = [TIME, {"type": "web_search"}, space("a", "b") | {"tools": [PATCH_TOOL]}]
    error = refused(http.post("/v1/responses", json=ASK | {"tools": tools}))
    assert error["param"] == "tools[2].tools[0].format.definition"


NEEDED = {
    "base_instructions",
    "display_name",
    "experimental_supported_tools",
    "priority",
    "shell_type",
    "slug",
    "support_verbosity",
    "supported_in_api",
    "supported_reasoning_levels",
    "truncation_policy",
    "visibility",
}
"""Fields without which Codex 0.171 rejects its whole catalogue."""


@pytest.mark.parametrize(
    ("variables", "efforts"),
    [
        ((), []),
        (("enable_thinking",), ["none", "medium"]),
        (("reasoning_effort",), ["low", "medium", "high"]),
    ],
)
def test_the_model_catalogue(
    http: httpx.Client, frontend: FakeFrontend, variables: tuple[str, ...], efforts: list[str]
) -> None:
    render_tools(frontend, "hermes", variables=variables)
    body = http.get("/v1/models", params={"client_version": "0.171.0"}).json()
    plain = http.get("/v1/models").json()
    assert body.keys() == {"object", "data", "models"}
    assert plain["data"] == body["data"]
    (model,) = body["models"]
    assert model["slug"] == MODEL
    assert model.keys() > NEEDED
    assert model["context_window"] == frontend.info.context_length
    assert model["truncation_policy"] == {"mode": "tokens", "limit": frontend.info.context_length // 8}
    assert [level["effort"] for level in model["supported_reasoning_levels"]] == efforts
