"""The fields of OpenAI's Responses API."""

from __future__ import annotations

from ramify.runtime.server.tables.openai import (
    FUNCTION,
    OTHER_REASONING,
    OTHER_SERVERS,
    PART,
    PROMPT_CACHE_OPTIONS,
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

ITEM = FieldTable(
    "input[]",
    taken("type id status role content call_id name namespace arguments input output summary"),
    taken("encrypted_content", "of this server; that of another one has no effect"),
    taken("action operation author recipient tools"),
    ignored("phase", allowed=("commentary", "final_answer")),
    ignored("agent created_by environment internal_chat_message_metadata_passthrough max_output_length"),
    refused("caller async"),
)
INPUT_PART = FieldTable(
    "input[].content[]",
    *PART.rows,
    taken("logprobs"),
    ignored("encrypted_content", "the server cannot read it"),
)
TEXT = FieldTable(
    "text",
    taken("format"),
    ignored("verbosity", "no chat template reads it", allowed=("low", "medium", "high")),
)
TEXT_FORMAT = FieldTable(
    "text.format",
    *SCHEMA.rows,
    taken("type regex pattern ebnf lark grammar choice format structures triggers"),
)
NAMESPACE_TOOL = FieldTable("tools[].tools[]", taken("type format"), *FUNCTION.rows)
RESPONSES_TOOL = FieldTable("tools[]", *NAMESPACE_TOOL.rows, taken("tools"))
TOOL_FORMAT = FieldTable("tools[].format", taken("type syntax definition"))
NAMESPACE_FORMAT = FieldTable("tools[].tools[].format", *TOOL_FORMAT.rows)

RESPONSES = Endpoint(
    title="Responses",
    path="/v1/responses",
    shared=(REQUEST, SAMPLING, OTHER_SERVERS),
    body=FieldTable(
        "",
        taken(
            "input",
            "text, or items of type message, reasoning, function_call, custom_tool_call, the outputs of both,"
            " additional_tools and agent_message (a user turn). Calls of a shell or of apply_patch, and their"
            " results, are shown to the model as those of a function. Items of other tools that OpenAI's"
            " server runs are left out, and named in `x-ramify-ignored`, as `input[web_search_call]`",
        ),
        taken("instructions", "the first system turn"),
        taken(
            "tools tool_choice parallel_tool_calls",
            "at most 128, those in namespaces included: functions, `strict` unless they say false: arguments"
            " always satisfy their schema then; `allowed_tools` as well. Namespaces: the model knows the"
            " function `f` of the namespace `ns` as"
            " `ns__f`; calls and history have both names. Custom tools: their input is text, or follows a"
            " Lark grammar or a regular expression while it is sampled. Tools that OpenAI's server runs"
            " (web_search, file_search, mcp, …) are left out of the prompt and named in `x-ramify-ignored`,"
            " as `tools[web_search]`; a `tool_choice` that demands one is refused",
        ),
        taken(
            "text",
            "{format, verbosity}; the format is text, json_object, json_schema, and `regex`, `ebnf`, `lark`,"
            " `choice`, `structural_tag`",
        ),
        taken(
            "max_output_tokens",
            "cut to the room in the context; an answer that is cut has the status incomplete",
        ),
        taken(
            "include top_logprobs",
            "`message.output_text.logprobs`; `reasoning.encrypted_content`; OpenAI's other values have no"
            " effect",
        ),
        taken("metadata", "comes back in the response"),
        taken("store", "default true, in a batch false: the response is [stored](#stored-responses)"),
        taken(
            "previous_response_id conversation",
            "the stored items before `input`; a conversation is its id or {id}",
        ),
        ignored(
            "truncation",
            "a prompt over the context is refused, never cut",
            allowed=("auto", "disabled"),
        ),
        ignored("client_metadata"),
        REASONING,
        TEMPLATE,
        OTHER_REASONING,
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
        TOOL_FORMAT,
        NAMESPACE_TOOL,
        NAMESPACE_FORMAT,
        FieldTable("tool_choice", taken("type name namespace mode tools")),
        FieldTable("tool_choice.tools[]", taken("type name namespace")),
        TEXT,
        TEXT_FORMAT,
        REASONING_OBJECT,
        STREAM_OPTIONS,
        PROMPT_CACHE_OPTIONS,
        STRUCTURED_OUTPUTS,
    ),
    required={"model": "default", "input": "x"},
    limit="max_output_tokens",
)
CONVERSATIONS = Endpoint(
    title="Conversations",
    path="/v1/conversations",
    body=FieldTable(
        "",
        taken("items", "items as in `input`, at most 20"),
        taken("metadata", "comes back with the conversation"),
        taken("cache_salt", "the cache scope, as of requests"),
    ),
    inner=(FieldTable("items[]", *ITEM.rows), FieldTable("items[].content[]", *INPUT_PART.rows)),
)
UPDATED_CONVERSATION = Endpoint(
    title="", path=CONVERSATIONS.path + "/{conversation_id}", body=FieldTable("", taken("metadata"))
)
NEW_ITEMS = Endpoint(
    title="",
    path=CONVERSATIONS.path + "/{conversation_id}/items",
    body=FieldTable("", taken("items")),
    required={"items": [{"role": "user", "content": "x"}]},
)
ENDPOINTS = (RESPONSES, CONVERSATIONS)
