"""The fields of OpenAI's Responses API."""

from __future__ import annotations

from ramify.runtime.server.tables.openai import (
    FUNCTION,
    OTHER_REASONING,
    OTHER_SERVERS,
    PART,
    REASONING,
    REASONING_OBJECT,
    REQUEST,
    SAMPLING,
    SCHEMA,
    STREAM_OPTIONS,
    STRUCTURED_OUTPUTS,
    TEMPLATE,
)
from ramify.runtime.server.tables.rows import Endpoint, FieldTable, ignored, refused, taken

_WHOLE_INPUT = "Nothing is stored here: send the whole conversation as input."

ITEM = FieldTable(
    "input[]",
    taken("type id status role content call_id name arguments output summary encrypted_content"),
    ignored("phase", allowed=("commentary", "final_answer")),
    refused("namespace caller async"),
)
INPUT_PART = FieldTable("input[].content[]", *PART.rows, taken("logprobs"))
TEXT = FieldTable(
    "text",
    taken("format"),
    ignored("verbosity", allowed=("medium",), remedy="Ask for it in the instructions."),
)
TEXT_FORMAT = FieldTable(
    "text.format",
    *SCHEMA.rows,
    taken("type regex pattern ebnf lark grammar choice format structures triggers"),
)
RESPONSES_TOOL = FieldTable("tools[]", taken("type"), *FUNCTION.rows)

RESPONSES = Endpoint(
    title="Responses",
    path="/v1/responses",
    shared=(REQUEST, SAMPLING, OTHER_SERVERS),
    body=FieldTable(
        "",
        taken("input", "text, or items of type message, reasoning, function_call and function_call_output"),
        taken("instructions", "the first system turn"),
        taken(
            "tools tool_choice parallel_tool_calls",
            "functions, `strict` unless they say false: arguments always satisfy their schema then;"
            " `allowed_tools` as well",
        ),
        taken(
            "text",
            "{format}: text, json_object, json_schema, and `regex`, `ebnf`, `lark`, `choice`,"
            " `structural_tag`",
        ),
        taken("max_output_tokens", "an answer that is cut has the status incomplete"),
        taken("include top_logprobs", "`message.output_text.logprobs`; `reasoning.encrypted_content`"),
        taken("metadata", "comes back in the response"),
        taken("store", "false is the only value taken"),
        ignored(
            "truncation",
            "a prompt over the context is refused, never cut",
            allowed=("auto", "disabled"),
        ),
        ignored("client_metadata"),
        REASONING,
        TEMPLATE,
        OTHER_REASONING,
        refused("previous_response_id conversation", _WHOLE_INPUT),
        refused("prompt", "Write it into instructions and input."),
        refused("background", "Use stream, or wait for the answer."),
        refused("max_tool_calls", "Use parallel_tool_calls; the server itself calls no tools."),
        refused("background_options context_management image access_programs"),
        refused("messages", "Use input."),
        refused("response_format", "Use text.format."),
        refused("max_tokens max_completion_tokens", "Use max_output_tokens."),
        refused("logprobs", "Use include with message.output_text.logprobs."),
        refused("n", "Send one request per answer."),
    ),
    inner=(
        ITEM,
        INPUT_PART,
        RESPONSES_TOOL,
        FieldTable("tool_choice", taken("type name mode tools")),
        FieldTable("tool_choice.tools[]", taken("type name")),
        TEXT,
        TEXT_FORMAT,
        REASONING_OBJECT,
        STREAM_OPTIONS,
        STRUCTURED_OUTPUTS,
    ),
    required={"model": "default", "input": "x"},
)
ENDPOINTS = (RESPONSES,)
