"""Splits a model's turn into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ramify.messages import ToolCall
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser, Content, JsonEnd, overlap


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

TurnEvent = Reasoning | Content | CallBegins | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFormat:
    """How reasoning and calls are marked. `reasoning_end` is None where reasoning stays in the content, or
    where the turn has none."""

    reasoning_end: str | None = None
    show_reasoning: bool = True
    channels: bool = False
    """The turn is messages in channels (`channel_parser`)."""
    tools: ToolFormat | None = None


class TurnParser:
    """Takes a turn's text piece by piece and returns events."""

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format = turn_format
        self._end = turn_format.reasoning_end
        self._held = ""
        self._calls = None if turn_format.tools is None else CallParser(turn_format.tools)
        self.answered = 0
        """In the push in which the reasoning ended: characters after its end."""

    @property
    def reasoning(self) -> bool:
        """The turn is still in its reasoning."""
        return self._end is not None

    @property
    def called(self) -> bool:
        """There are calls, and the last one is complete."""
        return self._calls is not None and self._calls.calls > 0 and not self._calls.inside

    def push(self, text: str) -> list[TurnEvent]:
        """The events for `text`."""
        if self._end is None:
            return self._answer(text)
        self._held += text
        thought, found, rest = self._held.partition(self._end)
        if found:
            self._end, self._held, self.answered = None, "", len(rest)
            return [*self._thought(thought), *self._answer(rest)]
        kept = overlap(self._held, self._end)
        thought, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._thought(thought)

    def close(self) -> list[TurnEvent]:
        """The events for the text that was held back; the output has ended."""
        if self._end is not None:
            return self._thought(self._held)
        return [] if self._calls is None else list(self._calls.close())

    def _thought(self, text: str) -> list[TurnEvent]:
        return [Reasoning(text)] if text and self._format.show_reasoning else []

    def _answer(self, text: str) -> list[TurnEvent]:
        if self._calls is not None:
            return list(self._calls.push(text))
        return [Content(text)] if text else []


class ChannelParser:
    """As `TurnParser`, for a turn of messages in channels, as gpt-oss writes them.

    Example, each line a message; the first begins where the prompt has ended, in ``<|start|>assistant``:

        <|channel|>analysis<|message|>Hm.<|end|>                                            Reasoning('Hm.')
        <|start|>assistant<|channel|>commentary<|message|>I look.<|end|>                    Content('I look.')
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}  CallBegins, …
        <|start|>assistant<|channel|>final<|message|>Four.                                  Content('Four.')

    A recipient may also stand before the channel. The turn is in its reasoning until a message that is none.
    """

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format = turn_format
        self._text = ""  # in no event yet
        self._kind: Literal["header", "reasoning", "content", "call"] = "header"
        self._json = JsonEnd()
        self._calls = 0
        self.reasoning = True
        """No message has begun that is not reasoning."""
        self.answered = 0
        """In the push in which that began: characters from there on."""

    @property
    def called(self) -> bool:
        """There are calls, and the last one is complete."""
        return self._calls > 0 and self._json.ended

    def push(self, text: str) -> list[TurnEvent]:
        """The events for `text`."""
        self._text += text
        events: list[TurnEvent] = []
        while True:
            marks = (_MESSAGE,) if self._kind == "header" else _ENDS
            found = min(((at, mark) for mark in marks if (at := self._text.find(mark)) >= 0), default=None)
            if found is None:
                break
            before, self._text = self._text[: found[0]], self._text[found[0] + len(found[1]) :]
            events += self._begin(before) if self._kind == "header" else self._write(before)
            if found[1] != _MESSAGE:
                self._kind = "header"
        if self._kind != "header":
            kept = max(overlap(self._text, mark) for mark in _ENDS)
            before, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
            events += self._write(before)
        return events

    def close(self) -> list[TurnEvent]:
        """The events for the text that was held back; the output has ended."""
        rest, self._text = self._text, ""
        return [] if self._kind == "header" else self._write(rest)

    def _begin(self, header: str) -> list[TurnEvent]:
        """Begin the message whose header has been read, up to the channel's name and the recipient."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and self._format.tools is not None:
            self._kind, self._json = "call", JsonEnd()
            self._calls += 1
            self._answers()
            return [CallBegins(self._calls - 1, recipient[1].removeprefix("functions."))]
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        if self._kind == "content":
            self._answers()
        return []

    def _answers(self) -> None:
        if self.reasoning:
            self.reasoning, self.answered = False, len(self._text)

    def _write(self, text: str) -> list[TurnEvent]:
        if not text:
            return []
        if self._kind == "call":
            self._json.push(text)
            return [Arguments(self._calls - 1, text)]
        if self._kind == "content":
            return [Content(text)]
        if not self._format.show_reasoning:
            return []
        return [Content(text) if self._format.reasoning_end is None else Reasoning(text)]


def parser_of(turn_format: TurnFormat) -> TurnParser | ChannelParser:
    return ChannelParser(turn_format) if turn_format.channels else TurnParser(turn_format)


@dataclass(frozen=True, slots=True)
class Turn:
    """A whole turn."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    called: bool
    """There are calls, and all of them are complete."""
    answered: int
    """Characters behind the end of the reasoning."""


def parse_turn(turn_format: TurnFormat, text: str) -> Turn:
    """The turn in `text`, a whole output."""
    parser = parser_of(turn_format)
    content, reasoning = "", ""
    calls: list[tuple[str, list[str]]] = []
    for event in (*parser.push(text), *parser.close()):
        match event:
            case Content(piece):
                content += piece
            case Reasoning(piece):
                reasoning += piece
            case CallBegins(_, name):
                calls.append((name, []))
            case Arguments(index, piece):
                calls[index][1].append(piece)
    new_id = turn_format.tools.new_id if turn_format.tools is not None else str
    return Turn(
        content=content,
        reasoning=reasoning,
        calls=tuple(ToolCall(id=new_id(), name=name, arguments="".join(pieces)) for name, pieces in calls),
        called=parser.called,
        answered=parser.answered,
    )
