"""A model's turn as it is answered: reasoning, content and tool calls, told apart while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ramify.messages import ToolCall
from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.parser import Arguments, CallBegins, CallParser, Content, overlap


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text before the end of the reasoning."""

    text: str


TurnEvent = Reasoning | Content | CallBegins | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFormat:
    """What to look for in a turn. `reasoning_end` is None where there is no reasoning to be told apart."""

    reasoning_end: str | None = None
    show_reasoning: bool = True
    tools: ToolFormat | None = None


class TurnParser:
    """Takes a turn's text piece by piece and says what it is."""

    def __init__(self, form: TurnFormat) -> None:
        self._form = form
        self._end = form.reasoning_end
        self._held = ""
        self._calls = None if form.tools is None else CallParser(form.tools)
        self.answered = 0
        """Characters after the end of the reasoning, in the push that it ended in."""

    @property
    def reasoning(self) -> bool:
        """The end of the reasoning has not come."""
        return self._end is not None

    @property
    def called(self) -> bool:
        """There are calls, and the last one is finished."""
        return self._calls is not None and self._calls.calls > 0 and not self._calls.inside

    def push(self, text: str) -> list[TurnEvent]:
        """What `text` adds."""
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
        """The output has ended: what was held back."""
        if self._end is not None:
            return self._thought(self._held)
        return [] if self._calls is None else list(self._calls.close())

    def _thought(self, text: str) -> list[TurnEvent]:
        return [Reasoning(text)] if text and self._form.show_reasoning else []

    def _answer(self, text: str) -> list[TurnEvent]:
        if self._calls is not None:
            return list(self._calls.push(text))
        return [Content(text)] if text else []


@dataclass(frozen=True, slots=True)
class Turn:
    """A whole turn."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    called: bool
    """There are calls, and all of them are finished."""


def parse_turn(form: TurnFormat, text: str) -> Turn:
    """`text`, the whole output, taken apart."""
    reader = TurnParser(form)
    return _put_together(form, [*reader.push(text), *reader.close()], reader.called)


def _put_together(form: TurnFormat, parts: Sequence[TurnEvent], called: bool) -> Turn:
    content, reasoning = "", ""
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegins(_, name):
                calls.append((name, []))
            case Arguments(index, text):
                calls[index][1].append(text)
    new_id = form.tools.new_id if form.tools is not None else str
    return Turn(
        content=content,
        reasoning=reasoning,
        calls=tuple(ToolCall(id=new_id(), name=name, arguments="".join(pieces)) for name, pieces in calls),
        called=called,
    )
