"""Splits a model's turn into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ramify.messages import ToolCall
from ramify.tool_calls.channels import ChannelParser
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser, Content, Reasoning, overlap

TurnEvent = Reasoning | Content | CallBegins | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFormat:
    """The marks of reasoning and calls. `reasoning_end` is None if the turn has no reasoning, or if reasoning
    stays in the content."""

    reasoning_end: str | None = None
    show_reasoning: bool = True
    channels: bool = False
    """Whether the turn consists of messages in channels (`tool_calls.channels`)."""
    tools: ToolFormat | None = None
    texts: frozenset[str] = frozenset()
    """The names of the free-text tools. The arguments of their calls are the decoded input."""


class TurnParser:
    """Parser of a turn: takes its text piece by piece, and returns events."""

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format = turn_format
        self._end = turn_format.reasoning_end
        self._held = ""
        self._calls = None if turn_format.tools is None else CallParser(turn_format.tools, turn_format.texts)
        self.answered = 0
        """Number of characters after the end of the reasoning, in the `push` that contained this end."""

    @property
    def reasoning(self) -> bool:
        """Whether the turn is still in its reasoning."""
        return self._end is not None

    @property
    def called(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return self._calls is not None and self._calls.calls > 0 and not self._calls.inside

    def push(self, text: str, controls: Sequence[int]) -> list[TurnEvent]:
        """The events for the next piece `text`. `controls` (`TextChunk.controls`) is ignored, as marks are
        found in the text."""
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
        """The events for the text that was held back. Called at the end of the output."""
        if self._end is not None:
            return self._thought(self._held)
        return [] if self._calls is None else list(self._calls.close())

    def _thought(self, text: str) -> list[TurnEvent]:
        return [Reasoning(text)] if text and self._format.show_reasoning else []

    def _answer(self, text: str) -> list[TurnEvent]:
        if self._calls is not None:
            return list(self._calls.push(text))
        return [Content(text)] if text else []


def parser_of(turn_format: TurnFormat) -> TurnParser | ChannelParser:
    if not turn_format.channels:
        return TurnParser(turn_format)
    apart = Content if turn_format.reasoning_end is None else Reasoning
    thought = apart if turn_format.show_reasoning else None
    return ChannelParser(calls=turn_format.tools is not None, reasoning=thought, texts=turn_format.texts)


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete turn."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    called: bool
    """Whether there are calls, and all of them are complete."""
    answered: int
    """Number of characters after the end of the reasoning, in the piece of text that contains this end."""


def parse_turn(turn_format: TurnFormat, text: str, controls: Sequence[int] = ()) -> Turn:
    """Parse `text`, a complete output, in which control tokens begin at the places `controls`."""
    parser = parser_of(turn_format)
    content, reasoning = "", ""
    calls: list[tuple[str, list[str]]] = []
    for event in (*parser.push(text, controls), *parser.close()):
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
