"""Response bodies of OpenAI's Responses API (API reference, responses), as msgspec structs.

Fields beyond that API are in objects named ``ramify``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.errors import RamifyError
from ramify.messages import Usage
from ramify.runtime.server.errors import type_of
from ramify.runtime.server.openai.protocol import (
    ChoiceExtras,
    Reply,
    TokenLogprob,
    UsageExtras,
    usage_reply,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Reply):
    text: str = ""
    type: str = "output_text"
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class ReasoningText(Reply):
    text: str = ""
    type: str = "reasoning_text"


class MessageItem(Reply):
    id: str
    content: list[OutputText]
    type: str = "message"
    role: str = "assistant"
    status: ItemStatus = "in_progress"


class ReasoningItem(Reply):
    id: str
    content: list[ReasoningText]
    type: str = "reasoning"
    summary: tuple[()] = ()
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    """The sealed reasoning of a closed item; unset unless ``include`` asks for it."""
    status: ItemStatus = "in_progress"


class CallItem(Reply):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    """JSON text of the arguments."""
    type: str = "function_call"
    status: ItemStatus = "in_progress"


Item = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int
    """Prompt tokens that were computed, and can be found in the cache by later requests."""


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    ramify: UsageExtras


class ResponseProblem(Reply):
    code: str
    message: str
    type: str
    param: str | None


class IncompleteDetails(Reply):
    reason: str


class ResponseReply(Reply):
    """A response, whole or in progress. Fields of type `msgspec.Raw` repeat the request's JSON text."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: msgspec.Raw
    safety_identifier: str | None
    temperature: float
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_logprobs: int
    top_p: float
    user: str | None
    object: str = "response"
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    error: ResponseProblem | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[Item] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    """The service tier; unset if the request names none."""
    ramify: ChoiceExtras | msgspec.UnsetType = msgspec.UNSET


def response_usage(usage: Usage, reasoning_tokens: int) -> ResponseUsage:
    """The usage of a response."""
    chat_usage = usage_reply([usage], 1)
    return ResponseUsage(
        input_tokens=chat_usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=chat_usage.prompt_tokens_details.cached_tokens,
            cache_write_tokens=chat_usage.ramify.computed_tokens,
        ),
        output_tokens=chat_usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=chat_usage.total_tokens,
        ramify=chat_usage.ramify,
    )


def response_problem(error: RamifyError) -> ResponseProblem:
    """`error` in the form for a response that has begun. OpenAI defines only a few codes for that form."""
    kind = type_of(error.status)
    code = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
    return ResponseProblem(
        code=code.get(kind, "server_error"), message=str(error), type=kind, param=error.field
    )
