"""Writes a message of the Messages API while it is generated: its content blocks, and the events for them.

Source: Anthropic's API reference, Messages and its streaming. A field beyond that API is named ``ramify``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.errors import RamifyError
from ramify.messages import Enforcement, Finish, TextChunk, Usage
from ramify.runtime.generation import ids_in, pieces_of
from ramify.runtime.server.anthropic.cache import CacheMarks
from ramify.runtime.server.errors import Problem, anthropic_body
from ramify.runtime.server.openai.bodies import Body, choice_extras
from ramify.runtime.server.openai.responses.writer import sealed
from ramify.runtime.server.openai.turn_parser import TurnEvent, TurnFormat, parser_of
from ramify.runtime.server.sse import event
from ramify.tool_calls.parser import Arguments, CallBegins, Content, Reasoning

PING = event({"type": "ping"}, "ping")


def failed(error: RamifyError) -> bytes:
    """The last event of a stream that fails with `error`."""
    return event(msgspec.Raw(anthropic_body(Problem.of(error))), "error")


class MessageWriter:
    """Makes the blocks and events of a message from the chunks of a generation.

    message : the body of the response, which is completed in place
    max_tokens : the number of tokens that the client allows
    omitted : whether the text of thinking is left out, and only its signature is sent

    A block stays open until the next one begins.
    """

    def __init__(
        self, message: Body, turn_format: TurnFormat, marks: CacheMarks, max_tokens: int, *, omitted: bool
    ) -> None:
        self.message = message
        self._format = turn_format
        self._parser = parser_of(turn_format)
        self._marks = marks
        self._max_tokens = max_tokens
        self._omitted = omitted
        self._begun = False
        self._open: Body | None = None
        self._text = ""
        """The thinking, or the JSON text of the arguments, of the open block."""
        self._held = ""
        """White space that may begin a block of text. Alone it is none: clients may not send one back."""
        self._replaced = 0
        """Number of tokens at the end of a prefilled answer that the first output token replaces. They are in
        the count of `count_tokens`, and not in the engine's usage."""
        self._thinking_tokens = 0
        self._enforcement: Enforcement | None = None
        self._events: list[bytes] = []

    def push(self, chunk: TextChunk) -> bytes:
        """The events for `chunk`. The first chunk has the usage of the prompt."""
        if not self._begun:
            self._begun = True
            self._replaced = chunk.replaced
            self._set_usage(chunk.usage or Usage(), output_tokens=0)
            self._emit("message_start", message=self.message)
        self._enforcement = chunk.enforcement or self._enforcement
        thinking = self._parser.reasoning
        parts = self._parser.push(chunk.text, chunk.controls)
        if thinking:
            thought = len(chunk.text) - self._parser.answered
            self._thinking_tokens += ids_in(pieces_of(chunk), thought)
        if chunk.finish is not None:
            parts += self._parser.close()
        for part in parts:
            self._add_part(part)
        if self._open_type == "tool_use" and self._parser.called:
            self._close_block()
        if chunk.finish is not None:
            self._end_message(chunk, chunk.finish)
        events, self._events = b"".join(self._events), []
        return events

    def _add_part(self, part: TurnEvent) -> None:
        match part:
            case Reasoning(text):
                if self._open_type != "thinking":
                    self._begin_block({"type": "thinking", "thinking": "", "signature": ""})
                self._text += text
                if not self._omitted:
                    self._write("thinking", text)
            case Content(text):
                if self._open_type != "text":
                    text = self._held = self._held + text
                    if not text.strip():
                        return
                    self._begin_block({"type": "text", "text": ""})
                self._write("text", text)
            case CallBegins(_, name):
                assert self._format.tools is not None
                call_id = self._format.tools.new_id()
                self._begin_block({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Arguments(_, text):
                self._text += text
                self._emit_delta("input_json", "partial_json", text)

    @property
    def _open_type(self) -> str:
        return "" if self._open is None else str(self._open["type"])

    def _begin_block(self, block: Body) -> None:
        self._close_block()
        self._text = self._held = ""
        self._open = block
        self.message["content"].append(block)
        self._emit("content_block_start", index=self._index, content_block=block)

    def _write(self, field: str, text: str) -> None:
        """Append `text` to the text or the thinking of the open block."""
        assert self._open is not None
        self._open[field] += text
        self._emit_delta(field, field, text)

    def _close_block(self) -> None:
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "thinking":
            block["signature"] = sealed(self._text)
            self._emit_delta("signature", "signature", block["signature"])
        elif block["type"] == "tool_use":
            block["input"] = _object(self._text)
        self._emit("content_block_stop", index=self._index)

    def _end_message(self, chunk: TextChunk, finish: Finish) -> None:
        self._close_block()
        usage = chunk.usage or Usage()
        self._set_usage(usage, usage.completion_tokens)
        reason, stop = self._stop_reason(finish, usage.completion_tokens)
        self.message |= {"stop_reason": reason, "stop_sequence": stop}
        extras = choice_extras(chunk.violations, self._enforcement)
        if extras:
            self.message["ramify"] = extras
        told = {name: value for name, value in self.message["usage"].items() if name in _DELTA_USAGE}
        delta = {"stop_reason": reason, "stop_sequence": stop}
        self._emit("message_delta", delta=delta, usage=told, **({"ramify": extras} if extras else {}))
        self._emit("message_stop")

    def _stop_reason(self, finish: Finish, tokens: int) -> tuple[str, str | None]:
        """The reason for which the message ends, and the stop sequence that ended it."""
        if finish.reason == "length":
            return "max_tokens" if tokens >= self._max_tokens else "model_context_window_exceeded", None
        if self._parser.called:
            return "tool_use", None
        if isinstance(finish.matched, str):
            return "stop_sequence", finish.matched
        return "end_turn", None

    def _set_usage(self, usage: Usage, output_tokens: int) -> None:
        usage = msgspec.structs.replace(usage, prompt_tokens=usage.prompt_tokens + self._replaced)
        body = self._marks.input_usage(usage) | {"output_tokens": output_tokens}
        if self._format.reasoning_end is not None:
            body["output_tokens_details"] = {"thinking_tokens": self._thinking_tokens}
        self.message["usage"] = body | {"service_tier": "standard"}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _emit_delta(self, kind: str, field: str, text: str) -> None:
        self._emit("content_block_delta", index=self._index, delta={"type": f"{kind}_delta", field: text})

    def _emit(self, kind: str, **fields: Any) -> None:
        # Encoded now, since blocks and the message change later.
        self._events.append(event({"type": kind, **fields}, kind))


_DELTA_USAGE = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
}
"""Fields of a usage that the event ``message_delta`` has."""


def _object(text: str) -> Any:
    """The arguments of a call, as the model wrote them. They are empty if the message ended within them."""
    try:
        return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
