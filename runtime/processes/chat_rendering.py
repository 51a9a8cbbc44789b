"""Rendering of chats by the model's chat template."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from functools import cached_property
from types import FrameType
from typing import Any

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import ChatMessage, Generate
from ramify.model_info import ChatFormat
from ramify.runtime.model.tokenizer.chat_format import chat_format, template_source
from ramify.runtime.processes.message_texts import MessageTexts

TEMPLATE_S = 5.0
"""Limit of processor time for rendering a chat template, in seconds. A template is a program from the model's
files. No other prompt is tokenised meanwhile."""


class ProcessorTimeOver(BaseException):
    """Raised by `processor_time_limit` in its ``with`` block when time is over. `except Exception` does not
    catch it."""


@contextlib.contextmanager
def processor_time_limit(seconds: float) -> Iterator[None]:
    """Raise `ProcessorTimeOver` in the block after `seconds` of the process's processor time (setitimer(2),
    ITIMER_VIRTUAL), between two operations of the interpreter. Only for the main thread."""

    def over(number: int, frame: FrameType | None) -> None:
        raise ProcessorTimeOver

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


class ChatRenderer:
    """The chat template of `tokenizer`, a fast transformers tokenizer.

    messages : marks special tokens that messages spell; None to leave them
    template_s : the limit `TEMPLATE_S`
    """

    def __init__(self, tokenizer: Any, messages: MessageTexts | None, template_s: float = TEMPLATE_S) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._template_s = template_s

    @cached_property
    def format(self) -> ChatFormat | None:
        """The chat template as pieces; None if there is none."""
        return chat_format(self._tokenizer)

    @cached_property
    def has_channels(self) -> bool:
        """Whether the chat template writes messages in channels, as that of gpt-oss does."""
        return "<|channel|>" in template_source(self._tokenizer)

    def marked(self, request: Generate) -> Generate:
        """`request` with marks in the special tokens that the messages of its chat spell."""
        if self._messages is None or request.chat is None:
            return request
        mark = self._messages.marked_values
        chat = [msgspec.structs.replace(turn, content=mark(turn.content)) for turn in request.chat]
        return msgspec.structs.replace(request, chat=tuple(chat))

    def render(self, request: Generate, **more: Any) -> str:
        """The chat as the template renders it. `more`: further variables of the template. Raises
        `InvalidRequest` if there is no template, and if it raises or takes too long."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "This model has no chat template.", field="messages", remedy="Send a plain prompt instead."
            )
        variables: dict[str, Any] = {"add_generation_prompt": True, **more}
        try:
            with processor_time_limit(self._template_s):
                if request.template_kwargs:
                    variables |= json.loads(request.template_kwargs)
                if request.tools:
                    variables["tools"] = json.loads(request.tools)
                turns = [_turn(message, self._thoughts) for message in request.chat or ()]
                if self._messages is not None:
                    turns = [self._messages.marked(turn) for turn in turns]
                    variables = self._messages.marked_values(variables)
                rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, **variables)
        except ProcessorTimeOver:
            raise InvalidRequest(
                f"The model's chat template takes more than {self._template_s:g} s for these messages.",
                field="messages",
                remedy="Send fewer or shorter messages, or a plain prompt.",
            ) from None
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", field="messages"
            ) from error
        return str(rendered)

    @cached_property
    def _thoughts(self) -> str:
        """Name of the field from which the chat template takes the reasoning of a message."""
        source = template_source(self._tokenizer)
        other = "message.thinking" in source and "reasoning_content" not in source
        return "thinking" if other else "reasoning_content"


def _turn(message: ChatMessage, thoughts: str) -> dict[str, Any]:
    """A message in the form that chat templates take: the arguments of calls are objects instead of JSON
    text. `thoughts` is the name of the field for the reasoning."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    if message.reasoning:
        turn[thoughts] = message.reasoning
    return turn
