"""Writes a response of the Responses API while it is generated: its items, and the events for them.

Source: OpenAI's API reference, responses. Fields beyond that API are in objects named ``ramify``.
"""

from __future__ import annotations

import base64
import binascii
import collections
import itertools
import time
from typing import Any, Literal

from ramify.errors import PromptTooLong, RamifyError
from ramify.messages import Enforcement, Finish, TextChunk, Usage
from ramify.runtime.generation import ids_in, pieces_of
from ramify.runtime.server.errors import type_of
from ramify.runtime.server.openai.bodies import Body, chat_logprobs, choice_extras, usage_body
from ramify.runtime.server.openai.tools import ToolUse
from ramify.runtime.server.openai.turn_parser import TurnEvent, TurnFormat, parser_of
from ramify.runtime.server.sse import KEEP_ALIVE, event
from ramify.tool_calls.parser import Arguments, CallBegins, Content, Reasoning

ItemStatus = Literal["completed", "incomplete"]

MARK = "ramify1."
"""Prefix of the ``encrypted_content`` of reasoning items, with the version of the format. Clients send this
string back without reading it. OpenAI encrypts it to hide the reasoning. Here nothing is hidden and there is
no key: the prefix is followed by the reasoning in base64."""

_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Type of a call → the field with its arguments, and the name of their events."""


class ResponseWriter:
    """Makes the items and events of a response from the chunks of a generation.

    response : the body of the response, which is completed in place
    tool_use : the tools that may be called; None if there are none
    encrypted : whether a closed reasoning item gets an encrypted_content

    An item stays open until the next one begins. Items and events are numbered from 0.
    """

    def __init__(
        self,
        response: Body,
        turn_format: TurnFormat,
        tool_use: ToolUse | None = None,
        *,
        encrypted: bool = False,
    ) -> None:
        self.response = response
        self._names = {} if tool_use is None else tool_use.names
        self._encrypted = encrypted
        self._format = turn_format
        self._parser = parser_of(turn_format)
        self._open: Body | None = None
        self._logprobs: collections.deque[tuple[list[Body], int]] = collections.deque()
        """(log-probability entries, number of characters) of each piece whose text is not in an event yet."""
        self._reasoning_tokens = 0
        self._enforcement: Enforcement | None = None
        self._event_count = 0
        self._events: list[bytes] = []

    def push(self, chunk: TextChunk) -> bytes:
        """The events for `chunk`."""
        self._begin()
        for part in self._read_chunk(chunk):
            self._add_part(part)
        if self._open_type in _CALLS and self._parser.called:
            self._close_item("completed")
        if chunk.finish is not None:
            self._end_response(chunk, chunk.finish)
        return self._take_events()

    def keep_alive(self) -> bytes:
        """The bytes to send while there is no new chunk: a comment and ``response.in_progress``.

        Codex skips comments, and gives up after 300 s without an event.
        """
        if self._event_count:
            self._emit("response.in_progress", response=self.response)
        self._begin()
        return KEEP_ALIVE + self._take_events()

    def failed(self, error: RamifyError) -> bytes:
        """The last events of a response that fails with `error`."""
        self._begin()
        if self._open is not None:
            self._open["status"] = "incomplete"
        self.response |= {"status": "failed", "error": _problem(error)}
        self._emit("response.failed", response=self.response)
        return self._take_events()

    def _begin(self) -> None:
        if not self._event_count:
            self._emit("response.created", response=self.response)
            self._emit("response.in_progress", response=self.response)

    def _read_chunk(self, chunk: TextChunk) -> list[TurnEvent]:
        thinking = self._parser.reasoning
        parts = self._parser.push(chunk.text, chunk.controls)
        if chunk.logprobs is not None:
            entries = iter(chat_logprobs([chunk.logprobs]))
            self._logprobs += [
                (list(itertools.islice(entries, count)), length) for count, length in pieces_of(chunk)
            ]
        if thinking:
            self._count_reasoning(chunk)
        if chunk.finish is not None:
            parts += self._parser.close()
        if parts and not any(isinstance(part, Content) for part in parts):
            self._logprobs.clear()
        self._enforcement = chunk.enforcement or self._enforcement
        return parts

    def _count_reasoning(self, chunk: TextChunk) -> None:
        """Count the tokens of `chunk` that belong to the reasoning. The reasoning was open before `chunk`."""
        if self._parser.reasoning:
            self._reasoning_tokens += len(chunk.ids)
            self._logprobs.clear()
            return
        thought = len(chunk.text) - self._parser.answered
        self._reasoning_tokens += ids_in(pieces_of(chunk), thought)
        self._take_logprobs(thought)

    def _add_part(self, turn_event: TurnEvent) -> None:
        match turn_event:
            case Reasoning(text):
                if self._open_type != "reasoning":
                    thought = {"type": "reasoning_text", "text": ""}
                    self._begin_item("rs", {"type": "reasoning", "summary": [], "content": [thought]})
                self._write_text(text)
            case Content(text):
                if self._open_type != "message":
                    part: Body = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                    self._begin_item("msg", {"type": "message", "role": "assistant", "content": [part]})
                self._write_text(text)
            case CallBegins(_, name, text):
                assert self._format.tools is not None
                kind, prefix = ("custom_tool_call", "ctc") if text else ("function_call", "fc")
                call = {"type": kind, "call_id": self._format.tools.new_id(), "name": name}
                if name in self._names:
                    call |= self._names[name]._asdict()
                self._begin_item(prefix, call | {_CALLS[kind][0]: ""})
            case Arguments(_, text):
                assert self._open is not None
                field, events = _CALLS[self._open_type]
                self._open[field] += text
                self._emit(f"response.{events}.delta", **self._place(self._open), delta=text)

    @property
    def _open_type(self) -> str:
        return "" if self._open is None else str(self._open["type"])

    def _begin_item(self, prefix: str, fields: Body) -> None:
        """Begin an item with these `fields`; its id begins with `prefix`."""
        self._close_item("completed")
        _, _, rid = self.response["id"].partition("_")
        item_id = f"{prefix}_{rid}_{len(self.response['output'])}"
        item = self._open = {"id": item_id, **fields, "status": "in_progress"}
        self.response["output"].append(item)
        if self._open_type in _CALLS:
            self._emit_item("added", item)
        else:
            self._emit_item("added", item | {"content": []})
            self._emit("response.content_part.added", **self._place(item), part=item["content"][0])

    def _write_text(self, text: str) -> None:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        more: Body = {}
        if "logprobs" in part:
            more = {"logprobs": self._take_logprobs(len(text))}
            part["logprobs"] += more["logprobs"]
        self._emit(f"response.{part['type']}.delta", **self._place(self._open), delta=text, **more)

    def _close_item(self, status: ItemStatus) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = status
        if item["type"] == "reasoning" and self._encrypted:
            item["encrypted_content"] = sealed(item["content"][0]["text"])
        if item["type"] in _CALLS:
            field, events = _CALLS[item["type"]]
            done = {field: item[field]} | ({"name": item["name"]} if field == "arguments" else {})
            self._emit(f"response.{events}.done", **self._place(item), **done)
        else:
            (part,) = item["content"]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            self._emit(f"response.{part['type']}.done", **self._place(item), text=part["text"], **more)
            self._emit("response.content_part.done", **self._place(item), part=part)
        self._emit_item("done", item)

    def _end_response(self, chunk: TextChunk, finish: Finish) -> None:
        response = self.response
        cut = finish.reason == "length"
        self._close_item("incomplete" if cut or self._open_type in _CALLS else "completed")
        if not response["output"]:
            self._add_part(Content(""))
            self._close_item("incomplete" if cut else "completed")
        if chunk.usage is not None:
            response["usage"] = _usage(chunk.usage, self._reasoning_tokens)
        if extras := choice_extras(chunk.violations, self._enforcement):
            response["ramify"] = extras
        if cut:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            response |= {"status": "completed", "completed_at": int(time.time())}
        self._emit(f"response.{response['status']}", response=response)

    def _take_logprobs(self, characters: int) -> list[Body]:
        """The log-probability entries of the tokens in the next `characters` characters. The position of a
        token is that of its first character."""
        taken: list[Body] = []
        while characters and self._logprobs:
            entries, length = self._logprobs.popleft()
            taken += entries
            if length > characters:
                self._logprobs.appendleft(([], length - characters))
            characters = max(characters - length, 0)
        return taken

    def _place(self, item: Body) -> Body:
        """The fields of an event that locate `item`, the last item of the response."""
        place = {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}
        return place if item["type"] in _CALLS else place | {"content_index": 0}

    def _emit_item(self, what: str, item: Body) -> None:
        index = len(self.response["output"]) - 1
        self._emit(f"response.output_item.{what}", output_index=index, item=item)

    def _emit(self, kind: str, **fields: Any) -> None:
        # Encoded now, since items and the response change later.
        body = {"type": kind, "sequence_number": self._event_count, **fields}
        self._events.append(event(body, kind))
        self._event_count += 1

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def _usage(usage: Usage, reasoning_tokens: int) -> Body:
    """The usage of a response. ``cache_write_tokens`` counts the prompt tokens that were computed: later
    requests find them in the cache."""
    chat = usage_body([usage], 1)
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    written = chat["ramify"]["computed_tokens"]
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": chat["total_tokens"],
        "ramify": chat["ramify"],
    }


def _problem(error: RamifyError) -> Body:
    """`error` as the object ``error`` of a response, for which OpenAI defines only a few codes."""
    kind = type_of(error.status)
    codes = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
    # Agents shorten the conversation when they read the code of a prompt that is too long.
    code = error.code if isinstance(error, PromptTooLong) else codes.get(kind, "server_error")
    return {"code": code, "message": str(error), "type": kind, "param": error.field}


def sealed(reasoning: str) -> str:
    return MARK + base64.b64encode(reasoning.encode()).decode()


def unsealed(text: str) -> str | None:
    """The reasoning in `text`, a result of `sealed`; None for any other string."""
    mark, _, data = text.partition(".")
    try:
        return base64.b64decode(data, validate=True).decode() if f"{mark}." == MARK else None
    except (binascii.Error, UnicodeDecodeError):
        return None
