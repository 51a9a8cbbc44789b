"""The fields of Anthropic's Messages API."""

from __future__ import annotations

from ramify.runtime.server.tables.openai import SAMPLING, SCHEMA
from ramify.runtime.server.tables.rows import Endpoint, FieldTable, Row, ignored, refused, taken

_PARTS = ("", "system[]", "messages[].content[]", "messages[].content[].content[]", "tools[]")
"""Places of objects that may have a mark ``cache_control``."""
_TEXT = (taken("type text cache_control"), ignored("citations"))
_CHOSEN = " ".join(name for row in SAMPLING.rows[:-1] for name in row.names)  # not the constraint

MARK = FieldTable("cache_control", taken("type ttl"), ignored("scope"))
MESSAGE = FieldTable("messages[]", taken("role content"))
TEXT = FieldTable("system[]", *_TEXT)
BLOCK = FieldTable(
    "messages[].content[]",
    *_TEXT,
    taken("thinking signature id name input tool_use_id content is_error"),
    ignored("data caller toolset_name"),
)
TOOL = FieldTable(
    "tools[]",
    taken("type name description input_schema strict cache_control"),
    ignored("eager_input_streaming defer_loading allowed_callers"),
    refused("input_examples", "Write the examples into the description."),
)
TOOL_CHOICE = FieldTable("tool_choice", taken("type name disable_parallel_tool_use"))
THINKING = FieldTable("thinking", taken("type budget_tokens display"))
OUTPUT_CONFIG = FieldTable("output_config", taken("effort format"), refused("task_budget"))
METADATA = FieldTable("metadata", taken("user_id"))
_OBJECTS = (
    *(MESSAGE, BLOCK, TEXT, FieldTable("messages[].content[].content[]", *_TEXT), TOOL, TOOL_CHOICE),
    *(THINKING, OUTPUT_CONFIG),
    *(FieldTable(place, *SCHEMA.rows, taken("type")) for place in ("output_config.format", "output_format")),
    *(FieldTable(f"{place}.cache_control".lstrip("."), *MARK.rows) for place in _PARTS),
)
_PROMPT = FieldTable(
    "",
    taken(
        "model",
        "the served model, `default`, or a [LoRA adapter](lora.md) as `name` or `model:name`; without it the"
        " first model",
    ),
    taken(
        "messages system",
        "text, thinking, calls and their results. No images and documents. Messages of the role system may"
        " stand anywhere. Before the first answer they are parts of the system prompt; later, where the"
        " model's chat template shows none, they are text of the user. A last message of the assistant is"
        " continued",
    ),
    taken(
        "tools tool_choice",
        "at most 128 tools with an `input_schema`; `strict` as for chat completions. Tools with a type of"
        " their own (`web_search_20250305`, `bash_20250124`) are left out, and named in `x-ramify-ignored`",
    ),
    taken(
        "thinking",
        "enabled, with a budget that may exceed `max_tokens`; disabled; adaptive, which is enabled without a"
        " budget. Left out, a model that can answer without thinking does so",
    ),
    taken(
        "output_config output_format",
        "{format}: a JSON schema; {effort}, for the chat template, if it reads one",
    ),
    taken("cache_control", "a lease on the whole prompt, for 5 minutes or 1 hour; marks may be anywhere"),
    ignored(
        "context_management",
        "only an edit that keeps all thinking, which edits nothing",
        allowed=(
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            {"edits": []},
        ),
        remedy="Shorten the conversation in the client.",
    ),
    ignored(
        "diagnostics inference_geo speed user_profile_id workspace_id",
        "they are about Anthropic's service",
    ),
    refused("container"),
    refused("mcp_servers", "Let the client call the tools of these servers."),
    refused("prompt max_tokens_to_sample", "Use messages and max_tokens."),
    refused("n", "Send one request per answer."),
)
_OPTIONS: tuple[Row, ...] = (
    taken(
        "max_tokens",
        "required; cut to the room in the context. 0 computes the prompt, so that later requests find it",
    ),
    taken("stop_sequences", "the same as `stop`"),
    taken(_CHOSEN, "as for OpenAI's endpoints"),
    taken("priority cache_salt", "as for OpenAI's endpoints"),
    taken("metadata", "{user_id}, written to the log"),
    taken("service_tier", '"auto" and "standard_only" mean the same'),
    taken("stream", "Anthropic's events, with `ping` after 10 seconds of silence"),
)
_REQUIRED = {"model": "default", "messages": [{"role": "user", "content": "x"}]}

MESSAGES = Endpoint(
    title="Messages",
    path="/v1/messages",
    body=FieldTable("", *_PROMPT.rows, *_OPTIONS),
    inner=(*_OBJECTS, METADATA),
    required=_REQUIRED | {"max_tokens": 1},
    limit="max_tokens",
)
COUNT_TOKENS = Endpoint(
    title="Count tokens",
    path="/v1/messages/count_tokens",
    shared=(_PROMPT,),
    body=FieldTable("", ignored(" ".join(name for row in _OPTIONS for name in row.names))),
    inner=_OBJECTS,
    required=_REQUIRED,
)
ENDPOINTS = (MESSAGES, COUNT_TOKENS)
