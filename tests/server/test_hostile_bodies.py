"""Deep nesting, long numbers and long lists in any field: an answer below 500, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ramify.runtime.server.fields import MAX_OBJECTS
from ramify.runtime.server.service import MAX_TOLD
from tests.server.fake_frontend import MODEL, FakeFrontend

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "HERE"}}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"default": "HERE"}, "strict": "HERE2"},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "HERE"}}
CUSTOM = {
    "type": "custom",
    "name": "c",
    "format": {"type": "grammar", "syntax": "lark", "definition": "HERE"},
}
USER = {"role": "user", "content": "hi"}
PREDICATE = {"type": "predicate", "instructions": "Is it?"}
BLOCK = {"type": "tool_use", "id": "1", "name": "f", "input": "HERE"}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "HERE"}
BODIES: dict[str, tuple[Any, list[Any]]] = {
    "/v1/chat/completions": (
        {"model": MODEL, "messages": [USER], "max_tokens": 2},
        [
            {"messages": "HERE"},
            {"messages": [{"role": "user", "content": "HERE"}]},
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]},
            {"tools": [TOOL]},
            {"tools": "HERE"},
            {"tool_choice": "HERE"},
            {"response_format": SCHEMA},
            {"response_format": {"type": "structural_tag", "format": "HERE"}},
            {"structured_outputs": {"json": "HERE"}},
            {"guided_json": "HERE"},
            {"chat_template_kwargs": {"enable_thinking": "HERE"}},
            {"chat_template_kwargs": "HERE"},
            {"reasoning": "HERE"},
            {"logit_bias": "HERE"},
            {"stop": "HERE"},
            {"metadata": "HERE"},
            {"max_tokens": "HERE"},
            {"seed": "HERE"},
            {"temperature": "HERE"},
            {"n": "HERE"},
            {"no_such_field": "HERE"},
        ],
    ),
    "/v1/completions": (
        {"model": MODEL, "prompt": "hi", "max_tokens": 2},
        [{"prompt": "HERE"}, {"prompt": ["HERE"]}, {"logit_bias": {"1": "HERE"}}, {"stop": ["HERE"]}],
    ),
    "/v1/responses": (
        {"model": MODEL, "input": "hi", "max_output_tokens": 2},
        [
            {"input": "HERE"},
            {"input": [{"role": "user", "content": "HERE"}]},
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"const": "HERE"}}}},
            {"tools": [{"type": "function", "name": "f", "parameters": {"x": "HERE"}}]},
            {"metadata": {"a": "HERE"}},
            {"reasoning": {"effort": "HERE"}},
            {"previous_response_id": "HERE"},
            {"conversation": "HERE"},
            {"conversation": {"id": "HERE"}},
            {"prompt_cache_options": {"ttl": "HERE"}},
            {"input": [{"role": "user", "content": "x", "phase": "HERE"}]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "cache_control": "HERE"}]}]},
            {"client_metadata": "HERE"},
            {"include": ["HERE"]},
            {"tool_choice": {"type": "function", "name": "HERE"}, "tools": [CUSTOM]},
            {"tools": [{"type": "HERE"}]},
            {"tools": [{"name": "HERE"}]},
            {"tools": [{"type": "namespace", "name": "n", "tools": "HERE"}]},
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f", "parameters": "HERE"}]}]},
            {"tools": [{"type": "custom", "name": "c", "format": "HERE"}]},
            {"tools": [CUSTOM]},
            {"tools": [CUSTOM], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": "HERE"}},
            {"input": [{"type": "HERE"}]},
            {"input": [{"type": "custom_tool_call", "call_id": "a", "name": "c", "input": "HERE"}]},
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "HERE"}]},
            {"input": [{"type": "local_shell_call", "call_id": "a", "action": "HERE"}]},
            {"input": [{"type": "shell_call_output", "call_id": "a", "output": "HERE"}]},
            {"input": [{"type": "agent_message", "content": "HERE"}]},
            {"input": [{"type": "additional_tools", "tools": "HERE"}]},
        ],
    ),
    "/v1/decisions": (
        {"model": MODEL, "input": "hi", "questions": [PREDICATE]},
        [
            {"input": "HERE"},
            {"input": [{"role": "user", "content": "HERE"}]},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "HERE"}]}]},
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": "HERE"}]}]},
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": {"a": "HERE"}}]}]},
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "HERE"}]},
            {"input": [{"type": "function_call_output", "call_id": "HERE", "output": "HERE"}]},
            {"questions": "HERE"},
            {"questions": ["HERE"]},
            {"questions": [PREDICATE | {"instructions": "HERE"}]},
            {"questions": [PREDICATE | {"instructions": [{"type": "input_json", "data": ["HERE"]}]}]},
            {"questions": [PREDICATE | {"name": "HERE"}]},
            {"questions": [{"type": "choice", "instructions": "x", "choices": "HERE"}]},
            {"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "HERE"}]}]},
            {"questions": [{"type": "score", "instructions": "x", "levels": "HERE"}]},
            {"permutations": "HERE"},
            {"layout": "HERE"},
        ],
    ),
    "/v1/rerank": (
        {"model": MODEL, "query": "hi", "documents": ["a"]},
        [{"query": "HERE"}, {"documents": "HERE"}, {"documents": [{"text": "HERE"}]}, {"top_n": "HERE"}],
    ),
    "/v1/score": (
        {"model": MODEL, "text_1": "hi", "text_2": "a"},
        [{"text_1": "HERE"}, {"text_2": ["HERE"]}, {"instruction": "HERE"}],
    ),
    "/v1/conversations": (
        {"items": [USER]},
        [{"items": "HERE"}, {"items": [{"role": "user", "content": "HERE"}]}, {"metadata": {"a": "HERE"}}],
    ),
    "/v1/messages": (
        {"model": MODEL, "messages": [USER], "max_tokens": 2},
        [
            {"messages": "HERE"},
            {"messages": [{"role": "HERE", "content": "hi"}]},
            {"messages": [{"role": "user", "content": "HERE"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "HERE"}]}]},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [BLOCK]},
                    {"role": "user", "content": [RESULT]},
                ]
            },
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "HERE"}]},
                ]
            },
            {"messages": [USER, {"role": "assistant", "content": "hi"}], "output_config": "HERE"},
            {"system": "HERE"},
            {"system": [{"type": "text", "text": "x", "cache_control": "HERE"}]},
            {"tools": [{"name": "f", "input_schema": "HERE"}]},
            {"tools": [{"name": "f", "input_schema": {"type": "object", "x": "HERE"}}]},
            {"tools": "HERE"},
            {"tool_choice": "HERE"},
            {"thinking": "HERE"},
            {"thinking": {"type": "enabled", "budget_tokens": "HERE"}},
            {"output_config": {"effort": "HERE"}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": "HERE"}}}},
            {"metadata": {"user_id": "HERE"}},
            {"max_tokens": "HERE"},
            {"stop_sequences": "HERE"},
            {"context_management": "HERE"},
            {"no_such_field": "HERE"},
        ],
    ),
    "/v1/messages/count_tokens": (
        {"model": MODEL, "messages": [USER]},
        [{"messages": "HERE"}, {"system": "HERE"}, {"tools": "HERE"}, {"thinking": "HERE"}],
    ),
    "/generate": (
        {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
        [
            {"text": "HERE"},
            {"input_ids": "HERE"},
            {"sampling_params": {"json_schema": "HERE"}},
            {"sampling_params": {"stop_token_ids": "HERE"}},
            {"constraint": {"kind": "json_schema", "source": "HERE"}},
            {"hint": "HERE"},
            {"hint": {"program": "p", "parts": "HERE"}},
            {"preambles": "HERE"},
        ],
    ),
    "/tokenize": ({"model": MODEL, "prompt": "hi"}, [{"prompt": "HERE"}, {"messages": "HERE"}]),
    "/api/chat": (
        {"model": MODEL, "messages": [USER], "options": {"num_predict": 2}, "stream": False},
        [
            {"messages": "HERE"},
            {"messages": [{"role": "user", "content": "HERE"}]},
            {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
            {"messages": [USER, {"role": "tool", "content": "x", "tool_name": "HERE"}]},
            {"tools": [TOOL]},
            {"format": "HERE"},
            {"format": {"default": "HERE"}},
            {"options": "HERE"},
            {"options": {"num_predict": "HERE"}},
            {"options": {"num_ctx": "HERE"}},
            {"options": {"seed": "HERE"}},
            {"options": {"repeat_last_n": "HERE"}},
            {"think": "HERE"},
            {"stream": "HERE"},
            {"keep_alive": "HERE"},
            {"model": "HERE"},
        ],
    ),
    "/api/generate": (
        {"model": MODEL, "prompt": "hi", "options": {"num_predict": 2}, "stream": False},
        [
            {"prompt": "HERE"},
            {"prompt": "", "keep_alive": "HERE"},
            {"system": "HERE"},
            {"raw": "HERE"},
            {"raw": True, "format": {"default": "HERE"}},
            {"context": "HERE"},
            {"logprobs": True, "top_logprobs": "HERE"},
        ],
    ),
    "/api/embed": ({"model": MODEL, "input": "hi"}, [{"input": "HERE"}, {"options": {"seed": "HERE"}}]),
    "/api/embeddings": ({"model": MODEL, "prompt": "hi"}, [{"prompt": "HERE"}]),
    "/api/show": ({"model": MODEL}, [{"model": "HERE"}, {"verbose": "HERE"}]),
    "/api/pull": ({"model": MODEL}, [{"model": "HERE"}, {"name": "HERE"}]),
    "/v1/embeddings": ({"model": MODEL, "input": "hi"}, [{"input": "HERE"}, {"dimensions": "HERE"}]),
    "/v1/systemone": (
        {"model": MODEL, "state": "hi", "questions": {"q": {"type": "noul", "instructions": "x"}}},
        [
            {"state": "HERE"},
            {"questions": "HERE"},
            {"questions": {"q": "HERE"}},
            {"questions": {"q": {"type": "HERE"}}},
            {"questions": {"q": {"type": "noul", "instructions": "HERE"}}},
            {"questions": {"q": {"type": "noul", "criteria": {"true": "HERE"}}}},
            {"questions": {"q": {"type": "choice", "criteria": "HERE"}}},
            {"questions": {"q": {"type": "choice", "criteria": {"a": "HERE"}}}},
            {"questions": {"q": {"type": "score", "criteria": "HERE"}}},
            {"questions": {"q": {"type": "score", "criteria": ["HERE"]}}},
            {"permutations": "HERE"},
        ],
    ),
}
HOSTILE = {
    "deep list": "[" * 900 + "]" * 900,
    "deeper list": "[" * 30_000 + "]" * 30_000,
    "deep object": '{"a":' * 900 + "1" + "}" * 900,
    "unclosed": "[" * 100_000,
    "long integer": "9" * 5000,
    "longer integer": "9" * 300_000,
    "long integer in a list": "[" + "9" * 5000 + "]",
    "large exponent": "1e400",
    "larger exponent": "1e" + "9" * 30,
    "as text": json.dumps('{"const": 1e' + "9" * 30 + "}"),
    "long integer as text": json.dumps('{"a": ' + "9" * 5000 + "}"),
    "deep as text": json.dumps("[" * 30_000),
    "many entries": json.dumps({str(n): 1 for n in range(20_000)}),
    "many items": json.dumps(list(range(20_000))),
}


NAMES = [
    "_☃",
    "_\U0001f642" * 50,
    "_a\r\nx-forged: 1",
    "_\0",
    "_ ",
    "_" * 70_000,
    "☃",
    "a\r\nb",
    "a" * 70_000,
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("path", BODIES)
def test_no_field_of_a_body_is_a_500(
    http: httpx.Client, frontend: FakeFrontend, path: str, value: str
) -> None:
    base, changes = BODIES[path]
    frontend.script = ["{}"] * 1000  # whatever the constraint is
    for change in changes:
        text = json.dumps(base | change).replace('"HERE"', HOSTILE[value]).replace('"HERE2"', '"validate"')
        response = http.post(path, content=text.encode())
        assert response.status_code < 500, (change, response.text[:500])
        assert len(response.text) < 5000 or response.status_code == 200, response.text[:500]
    assert http.get("/health").status_code == 200
    assert not frontend.running


def test_a_list_of_too_many_objects_is_refused_by_name(http: httpx.Client, frontend: FakeFrontend) -> None:
    for count, named in ((MAX_OBJECTS, False), (MAX_OBJECTS + 1, True)):
        body = {"model": MODEL, "messages": [USER] * count, "max_tokens": 2}
        response = http.post("/v1/chat/completions", json=body)
        assert response.json()["error"]["param"] == "messages"
        assert (f"has {count} objects" in response.text) == named


@pytest.mark.parametrize("path", BODIES)
def test_names_that_a_client_chooses(http: httpx.Client, path: str) -> None:
    """Private fields, whatever their names, have no effect; other unknown fields are refused."""
    bodies = [{name: 1} for name in NAMES] + [{f"_{number}": 1 for number in range(2000)}]
    bodies += [{"tools": [{"type": name, "name": "f"}]} for name in NAMES]
    for extra in bodies:
        response = http.post(path, json=BODIES[path][0] | extra)
        assert response.status_code < 500, (extra, response.text[:500])
        header = response.headers.get("x-ramify-ignored", "")
        assert (header.isascii(), header.isprintable(), len(header) < 5000) == (True, True, True)
        assert "x-forged" not in response.headers


def test_the_log_names_a_bounded_number_of_ignored_fields(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for first in range(0, 2 * MAX_TOLD, 40):
        names = [f"_a\nb{number}" for number in range(first, first + 40)]
        http.post(
            "/tokenize", json={"model": MODEL, "prompt": "hi"} | dict.fromkeys(names, 1)
        ).raise_for_status()
    told = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert len(told) <= MAX_TOLD
    assert all(line.isprintable() for line in told)
