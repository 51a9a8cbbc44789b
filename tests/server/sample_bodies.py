"""Bodies that have each object which an endpoint takes."""

from __future__ import annotations

from typing import Any

from tests.server.fake_frontend import MODEL

SCHEMA: Any = {"type": "object"}
FUNCTION: Any = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
ANSWERED: Any = {
    "role": "assistant",
    "content": [{"type": "text", "text": "x"}],
    "reasoning_content": "r",
    "name": "a",
}
REGEX: Any = {"type": "grammar", "syntax": "regex", "definition": "a*"}
CUSTOM: Any = {
    "name": "c",
    "description": "d",
    "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a*"}},
}
CUSTOM_CALL: Any = {"id": "t", "type": "custom", "custom": {"name": "c", "input": "a"}}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
RESPONSE: Any = {"model": MODEL, "input": "hi"}
CHAT: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
ITEMS: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "r"},
]
CODEX_ITEMS: Any = [
    {"type": "custom_tool_call", "call_id": "c", "name": "e", "namespace": "s", "input": "a"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "r"},
    {"type": "local_shell_call", "call_id": "l", "action": {}},
    {"type": "apply_patch_call", "call_id": "p", "operation": {}},
    {
        "type": "agent_message",
        "author": "a",
        "recipient": "b",
        "content": [{"type": "input_text", "text": "x"}, {"type": "encrypted_content"}],
    },
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]},
]
LONG: Any = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": "hi", "name": "u"},
        ANSWERED | {"tool_calls": [CALL, CUSTOM_CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f"},
    ],
}
OLLAMA_CALL: Any = {"id": "c", "function": {"name": "f", "arguments": {}}}
SAMPLING: Any = {
    "temperature": 0.5,
    "stop": ["."],
    "sampling_seed": 1,
    "n": 2,
    "logit_bias": {"1": 1},
    "max_new_tokens": 3,
}
MARK: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BLOCK: Any = {"type": "text", "text": "x"} | MARK
MESSAGES: Any = {
    "model": MODEL,
    "system": [BLOCK],
    "messages": [
        {"role": "user", "content": [BLOCK]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}} | MARK,
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]} | MARK]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA} | MARK],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low"},
    "cache_control": MARK["cache_control"],
}
FORMATTED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
FORM: Any = {"type": "json_schema", "schema": SCHEMA, "description": "d"}
DECISIONS: Any = {
    "model": MODEL,
    "input": "hi",
    "questions": [
        {"type": "predicate", "instructions": [{"type": "input_json", "data": {"a": [1]}}]},
        {
            "type": "choice",
            "name": "n",
            "instructions": [{"type": "input_text", "text": "t"}],
            "choices": [{"value": True, "description": "d"}, {"value": "true"}],
        },
        {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]},
    ],
    "prompt_cache_key": "k",
    "prompt_cache_options": {"ttl": "30m", "mode": "implicit"},
    "safety_identifier": "u",
    "normalise": "pmi",
    "stream_options": {},
}
DECISIONS_ABOUT_ITEMS: Any = {
    "model": MODEL,
    "input": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "t"}, {"type": "input_json", "data": [{"a": 1}]}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "phase": "commentary"},
        {"type": "function_call", "call_id": "c", "name": "f", "namespace": "s", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "custom_tool_call", "call_id": "d", "name": "e", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "r", "status": "completed"},
    ],
    "questions": [{"type": "predicate", "instructions": "Is it?"}],
}
SYSTEM_ONE: Any = {
    "model": MODEL,
    "state": {"a": [1]},
    "questions": {
        "n": {"type": "noul", "criteria": {"true": "t", "false": None}},
        "c": {"type": "choice", "instructions": ["Which?"], "criteria": {"a": {"b": "c"}, "d": None}},
        "s": {"type": "score", "instructions": "How?", "criteria": ["low", {"b": 1}]},
    },
    "permutations": 2,
    "return_prompt_ids": True,
    "stream_options": {},
    "prompt_cache_options": {},
}
BODIES: dict[str, tuple[str, Any]] = {
    **{
        f"{path} {name}": (path, body | ({} if "count" in path else {"max_tokens": 3} | more))
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for name, body, more in (
            ("whole", MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto"}),
            ("with a format", FORMATTED | {"output_config": {"format": FORM}}, {"stream": True}),
            ("with a format in place", FORMATTED | {"output_format": FORM}, {}),
        )
    },
    "chat": (
        "/v1/chat/completions",
        LONG
        | {"max_completion_tokens": 3, "logprobs": True, "n": 2, "user": "u"}
        | {"prompt_cache_key": "k", "prompt_cache_options": {"ttl": "5m"}},
    ),
    "tools": (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
    ),
    "custom tools": (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "custom", "custom": CUSTOM}],
            "tool_choice": {"type": "custom", "custom": {"name": "c"}},
        },
    ),
    "allowed custom tools": (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "custom", "custom": CUSTOM}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "c"}}]},
            },
        },
    ),
    "infill": (
        "/infill",
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "input_extra": [{"filename": "f", "text": "t"}],
            "n_predict": 2,
        },
    ),
    "stream": ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "reasoning": (
        "/v1/chat/completions",
        CHAT
        | {
            "reasoning": {"effort": "low", "summary": "auto", "max_tokens": 5, "exclude": True, "start": "<"},
            "chat_template_kwargs": {"tone": "dry"},
        },
    ),
    "schema": (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "description": "d",
                    "schema": SCHEMA,
                    "strict": False,
                    "whitespace": 1,
                },
            }
        },
    ),
    **{
        f"format {kind}": ("/v1/chat/completions", CHAT | {"response_format": {"type": kind, field: value}})
        for kind, field, value in (
            ("json_object", "whitespace", "compact"),
            ("regex", "regex", "a"),
            ("ebnf", "ebnf", 'root ::= "a"'),
            ("lark", "lark", 'start: "a"'),
            ("choice", "choice", ["a"]),
            ("structural_tag", "format", {"type": "any_text"}),
        )
    },
    **{
        f"text format {kind}": (
            "/v1/responses",
            RESPONSE | {"text": {"format": {"type": kind, field: value}}},
        )
        for kind, field, value in (
            ("json_object", "whitespace", "compact"),
            ("regex", "regex", "a"),
            ("ebnf", "ebnf", 'root ::= "a"'),
            ("lark", "lark", 'start: "a"'),
            ("choice", "choice", ["a"]),
            ("structural_tag", "format", {"type": "any_text"}),
        )
    },
    "allowed tools": (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        },
    ),
    "tool choice of responses": (
        "/v1/responses",
        RESPONSE
        | {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "stream_options": {"include_usage": False},
            "structured_outputs": {},
        },
    ),
    "allowed tools of responses": (
        "/v1/responses",
        RESPONSE
        | {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}],
            },
        },
    ),
    "tools and items of Codex": (
        "/v1/responses",
        RESPONSE
        | {
            "input": CODEX_ITEMS,
            "tools": [
                {"type": "custom", "name": "c", "format": REGEX},
                {
                    "type": "namespace",
                    "name": "s",
                    "description": "d",
                    "tools": [
                        {"type": "function", **FUNCTION},
                        {"type": "custom", "name": "e", "format": REGEX},
                    ],
                },
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "namespace", "name": "s"}],
            },
        },
    ),
    "structured outputs": ("/v1/chat/completions", CHAT | {"structured_outputs": {"json": SCHEMA}}),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
    "embedding": ("/v1/embeddings", {"model": MODEL, "input": "hi", "dimensions": 2}),
    "decisions": ("/v1/decisions", DECISIONS),
    "system one": ("/v1/systemone", SYSTEM_ONE),
    "decisions about items": ("/v1/decisions", DECISIONS_ABOUT_ITEMS),
    "rerank": (
        "/v1/rerank",
        {
            "model": MODEL,
            "query": "q",
            "documents": ["a", {"text": "b", "title": "c"}],
            "top_n": 1,
            "stream_options": {},
            "prompt_cache_options": {"ttl": "5m"},
        },
    ),
    **{
        f"score by {first} and {second}": (
            "/v1/score",
            {"model": MODEL, first: "q", second: ["a", "b"], "stream_options": {}}
            | {"prompt_cache_options": {"ttl": "5m"}},
        )
        for first, second in (
            ("text_1", "text_2"),
            ("queries", "documents"),
            ("queries", "items"),
            ("data_1", "data_2"),
        )
    },
    "conversation of Codex": ("/v1/conversations", {"items": CODEX_ITEMS}),
    "conversation": ("/v1/conversations", {"items": ITEMS, "metadata": {"k": "v"}}),
    "responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "instructions": "Be kind.",
            "input": ITEMS,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "description": "d"}},
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "none",
            "reasoning": {"effort": "low"},
            "metadata": {"k": "v"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ),
    "generate": (
        "/generate",
        {
            "text": "hi",
            "sampling_params": SAMPLING,
            "constraint": {"kind": "regex", "source": "a+"},
            "program": {"program": "p", "calls_left": 1},
            "return_logprob": True,
        },
    ),
    "generate with a schema": (
        "/generate",
        {"text": "hi", "constraint": {"kind": "json_schema", "source": "{}", "definitions": {}}},
    ),
    "scored": ("/generate", {"text": "hi", "choices": {"texts": ["a", "b"]}, "preambles": []}),
    "ollama": (
        "/api/chat",
        CHAT
        | {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "thinking": "r", "tool_calls": [OLLAMA_CALL]},
                {"role": "tool", "content": "r", "tool_name": "f", "tool_call_id": "c"},
            ],
            "stream": False,
            "options": {"num_predict": 3, "num_ctx": 9},
        },
    ),
    "ollama tools": (
        "/api/chat",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream": False,
        },
    ),
    "ollama allowed tools": (
        "/api/chat",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            "stream": False,
        },
    ),
    "ollama prompt": ("/api/generate", {"model": MODEL, "prompt": "hi", "system": "s", "stream": False}),
    "ollama raw": ("/api/generate", {"model": MODEL, "prompt": "hi", "raw": True, "stream": False}),
    "ollama embed": ("/api/embed", {"model": MODEL, "input": "hi", "options": {"num_ctx": 9}}),
    "ollama embeddings": ("/api/embeddings", {"model": MODEL, "prompt": "hi", "options": {}}),
    "ollama show": ("/api/show", {"model": MODEL}),
    "ollama pull": ("/api/pull", {"model": MODEL, "name": MODEL, "stream": False}),
    "tokenize": ("/tokenize", {"prompt": "hi", "add_special_tokens": False}),
    "tokenize chat": ("/tokenize", {"messages": LONG["messages"], "add_generation_prompt": False}),
    "detokenize": ("/detokenize", {"tokens": [65], "skip_special_tokens": False}),
    "abort": ("/abort_request", {"rid": "none", "abort_all": False}),
    "tools of programs": ("/await_tools", {"program": "p", "branch": "b", "tools": ["t"]}),
    "program": (
        "/v1/programs",
        {"graph": {"nodes": [{"kind": "gen", "name": "x"}]}, "sampling_params": {"max_tokens": 1}},
    ),
    "unload": ("/unload_lora_adapter", {"lora_name": "loaded"}),
    "end": ("/end_program", {"program": "p"}),
    "load": ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"}),
}


def objects(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """(path, object) of each object in a body. The paths are written as in errors."""
    if isinstance(value, list):
        return [found for i, each in enumerate(value) for found in objects(each, f"{path}[{i}]")]
    if not isinstance(value, dict):
        return []
    inner = [objects(each, f"{path}.{key}" if path else key) for key, each in value.items()]
    return [(path, value), *(found for each in inner for found in each)]
