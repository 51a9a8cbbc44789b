"""Writes a response of the Responses API while it is generated: its items, and the events for them."""

from __future__ import annotations

import collections
import itertools
import time
from typing import Any

import msgspec

from ramify.errors import RamifyError
from ramify.messages import Enforcement, Finish, TextChunk
from ramify.runtime.generation import ids_in, pieces_of
from ramify.runtime.server.openai.protocol import TokenLogprob, chat_logprobs, choice_extras
from ramify.runtime.server.openai.responses.protocol import (
    CallItem,
    IncompleteDetails,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseReply,
    response_problem,
    response_usage,
)
from ramify.runtime.server.openai.responses.sealed import sealed
from ramify.runtime.server.openai.turn_parser import TurnEvent, TurnFormat, parser_of
from ramify.runtime.server.sse import event
from ramify.tool_calls.parser import Arguments, CallBegins, Content, Reasoning


class ResponseWriter:
    """Makes the items and events of a response from the chunks of a generation.

    An item stays open until the next one begins. Items and events are numbered from 0. With `encrypted`, a
    closed reasoning item gets an encrypted_content.
    """

    def __init__(self, response: ResponseReply, turn_format: TurnFormat, *, encrypted: bool = False) -> None:
        self.response = response
        self._encrypted = encrypted
        self._format = turn_format
        self._parser = parser_of(turn_format)
        self._open: Item | None = None
        self._logprobs: collections.deque[tuple[list[TokenLogprob], int]] = collections.deque()
        """(log-probability entries, number of characters) of each piece whose text is not in an event yet."""
        self._reasoning_tokens = 0
        self._enforcement: Enforcement | None = None
        self._event_count = 0
        self._events: list[bytes] = []

    def push(self, chunk: TextChunk) -> bytes:
        """The events for `chunk`."""
        if not self._event_count:
            self._emit("response.created", response=self.response)
            self._emit("response.in_progress", response=self.response)
        for part in self._read_chunk(chunk):
            self._add_part(part)
        if isinstance(self._open, CallItem) and self._parser.called:
            self._close_item("completed")
        if chunk.finish is not None:
            self._end_response(chunk, chunk.finish)
        return self._take_events()

    def failed(self, error: RamifyError) -> bytes:
        """The last event of a response that fails with `error`."""
        if self._open is not None:
            self._open.status = "incomplete"
        self.response.status, self.response.error = "failed", response_problem(error)
        self._emit("response.failed", response=self.response)
        return self._take_events()

    # --- chunks -----------------------------------------------------------------------------------

    def _read_chunk(self, chunk: TextChunk) -> list[TurnEvent]:
        thinking = self._parser.reasoning
        parts = self._parser.push(chunk.text, chunk.controls)
        if chunk.logprobs is not None:
            entries = iter(chat_logprobs([chunk.logprobs]).content)
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

    def _add_part(self, part: TurnEvent) -> None:
        match part:
            case Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    self._begin_item(ReasoningItem(id=self._new_id("rs"), content=[ReasoningText()]))
                self._write_text(text)
            case Content(text):
                if not isinstance(self._open, MessageItem):
                    self._begin_item(MessageItem(id=self._new_id("msg"), content=[OutputText()]))
                self._write_text(text)
            case CallBegins(_, name):
                assert self._format.tools is not None
                call_id = self._format.tools.new_id()
                self._begin_item(CallItem(id=self._new_id("fc"), call_id=call_id, name=name))
            case Arguments(_, text):
                assert isinstance(self._open, CallItem)
                self._open.arguments += text
                self._emit("response.function_call_arguments.delta", **self._place(self._open), delta=text)

    # --- items ------------------------------------------------------------------------------------

    def _begin_item(self, item: Item) -> None:
        self._close_item("completed")
        self._open = item
        self.response.output.append(item)
        if isinstance(item, CallItem):
            self._emit_item("added", item)
        else:
            self._emit_item("added", msgspec.structs.replace(item, content=[]))
            self._emit("response.content_part.added", **self._place(item), part=item.content[0])

    def _write_text(self, text: str) -> None:
        item = self._open
        assert isinstance(item, MessageItem | ReasoningItem)
        part = item.content[0]
        part.text += text
        more: dict[str, Any] = {}
        if isinstance(part, OutputText):
            more = {"logprobs": self._take_logprobs(len(text))}
            part.logprobs += more["logprobs"]
        self._emit(f"response.{part.type}.delta", **self._place(item), delta=text, **more)

    def _close_item(self, status: ItemStatus) -> None:
        """End the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if isinstance(item, ReasoningItem) and self._encrypted:
            item.encrypted_content = sealed(item.content[0].text)
        if isinstance(item, CallItem):
            self._emit(
                "response.function_call_arguments.done",
                **self._place(item),
                name=item.name,
                arguments=item.arguments,
            )
        else:
            part = item.content[0]
            more = {"logprobs": part.logprobs} if isinstance(part, OutputText) else {}
            self._emit(f"response.{part.type}.done", **self._place(item), text=part.text, **more)
            self._emit("response.content_part.done", **self._place(item), part=part)
        self._emit_item("done", item)

    def _end_response(self, chunk: TextChunk, finish: Finish) -> None:
        response = self.response
        cut = finish.reason == "length"
        self._close_item("incomplete" if cut or isinstance(self._open, CallItem) else "completed")
        if not response.output:
            self._add_part(Content(""))
            self._close_item("incomplete" if cut else "completed")
        if chunk.usage is not None:
            response.usage = response_usage(chunk.usage, self._reasoning_tokens)
        response.ramify = choice_extras(msgspec.structs.replace(chunk, enforcement=self._enforcement))
        if cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            response.status, response.completed_at = "completed", int(time.time())
        self._emit(f"response.{response.status}", response=response)

    def _take_logprobs(self, characters: int) -> list[TokenLogprob]:
        """The log-probability entries of the tokens in the next `characters` characters. A token counts as
        lying where its first character is."""
        taken: list[TokenLogprob] = []
        while characters and self._logprobs:
            entries, length = self._logprobs.popleft()
            taken += entries
            if length > characters:
                self._logprobs.appendleft(([], length - characters))
            characters = max(characters - length, 0)
        return taken

    # --- events -----------------------------------------------------------------------------------

    def _new_id(self, prefix: str) -> str:
        _, _, rid = self.response.id.partition("_")
        return f"{prefix}_{rid}_{len(self.response.output)}"

    def _place(self, item: Item) -> dict[str, Any]:
        """The fields of an event that locate `item`, the last item of the response."""
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self.response.output) - 1}
        return place if isinstance(item, CallItem) else place | {"content_index": 0}

    def _emit_item(self, what: str, item: Item) -> None:
        self._emit(f"response.output_item.{what}", output_index=len(self.response.output) - 1, item=item)

    def _emit(self, kind: str, **fields: Any) -> None:
        # Encoded now, since items and the response change later.
        body = {"type": kind, "sequence_number": self._event_count, **fields}
        self._events.append(event(body, kind))
        self._event_count += 1

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
