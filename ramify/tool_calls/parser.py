"""A streaming parser for tool calls in a model's output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ramify.tool_calls.formats import ToolFormat
from ramify.tool_calls.text import InputReader


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The beginning of call number `index` of this turn, a call of the tool `name`. `text`: whether it is a
    free-text tool."""

    index: int
    name: str
    text: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of call number `index`: JSON text, or the decoded input of a free-text
    tool."""

    index: int
    text: str


Event = Content | CallBegins | Arguments


class CallParser:
    """A parser that takes the output piece by piece and returns each event as soon as it is certain.

    Text that may be the beginning of a trigger is held back. If the output ends inside a call, the arguments
    of that call end there, too.

    Example, in the Hermes format:

        push('Well. <tool')                     Content('Well. ')
        push('_call>\\n{"name": "f", "argu')      -
        push('ments": {"x": 1')                 CallBegins(0, 'f'), Arguments(0, '{"x": 1')
        push('}}\\n</tool_call>')                Arguments(0, '}')

    texts : the names of the free-text tools
    """

    def __init__(self, tool_format: ToolFormat, texts: Collection[str] = ()) -> None:
        self._format = tool_format
        self._texts = texts
        self._text = ""  # text that is in no event yet
        self._state: Callable[[], Iterator[Event]] | None = self._content
        """The method that consumes the next text; None after the end of the calls."""
        self._literal = ""
        self._after_literal: Callable[[], Iterator[Event]] = self._content
        self._json = JsonEnd()
        self._input: InputReader | None = None
        self.calls = 0
        """Number of calls that have begun."""
        self.ended = 0
        """Number of calls that have ended."""
        self.inside = False
        """Whether the output is inside a call."""

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the output; returns the events that are now certain."""
        self._text += text
        events: list[Event] = []
        while True:
            state, length = self._state, len(self._text)
            events += self._next_events()
            if self._state == state and len(self._text) == length:
                return events

    def close(self) -> list[Event]:
        """End the output. Returns the event for text that was held back.

        After a call, the held-back text is the beginning of a further call, and is dropped.
        """
        rest, self._text = self._text, ""
        return [Content(rest)] if rest and self._state == self._content else []

    def _next_events(self) -> Iterator[Event]:
        if self._state is not None:
            yield from self._state()
        elif self._text:
            yield Content(self._text)
            self._text = ""

    def _content(self) -> Iterator[Event]:
        before, found, _ = self._text.partition(self._format.trigger)
        if found:
            self._text = self._text[len(before) :]
            self.inside = True
            self._expect(self._format.opening, self._name)
        else:
            before = self._text[: len(self._text) - overlap(self._text, self._format.trigger)]
            self._text = self._text[len(before) :]
        if before:
            yield Content(before)

    def _expect(self, literal: str, then: Callable[[], Iterator[Event]]) -> None:
        """Skip `literal`, which is the next text; then continue in the state `then`."""
        self._literal, self._after_literal, self._state = literal, then, self._skip

    def _skip(self) -> Iterator[Event]:
        if len(self._text) >= len(self._literal):
            self._text = self._text[len(self._literal) :]
            self._state = self._after_literal
        yield from ()

    def _name(self) -> Iterator[Event]:
        name, found, rest = self._text.partition(self._format.call[1])
        if found:
            self._text = rest
            self._json = JsonEnd()
            self._input = InputReader() if name in self._texts else None
            self._state = self._arguments
            self.calls += 1
            yield CallBegins(self.calls - 1, name, self._input is not None)

    def _arguments(self) -> Iterator[Event]:
        length = self._json.push(self._text)
        text, self._text = self._text[:length], self._text[length:]
        if self._json.ended:
            self._expect(self._format.call[2], self._end_call)
        if self._input is not None:
            text = self._input.push(text)
        if text:
            yield Arguments(self.calls - 1, text)

    def _end_call(self) -> Iterator[Event]:
        self.inside = False
        self.ended += 1
        self._state = self._after_call
        yield from ()

    def _after_call(self) -> Iterator[Event]:
        tool_format = self._format
        again = "" if tool_format.separator is None else tool_format.separator + tool_format.call[0]
        if again and self._text.startswith(again):
            self._text = self._text[len(again) :]
            self.inside = True
            self._state = self._name
        elif tool_format.end and self._text.startswith(tool_format.end):
            self._text = self._text[len(tool_format.end) :]
            self._state = None
        elif self._text and not again.startswith(self._text) and not tool_format.end.startswith(self._text):
            self._state = None
        yield from ()


def overlap(text: str, pattern: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `pattern`."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if pattern.startswith(text[-length:]):
            return length
    return 0


def common_start(texts: Sequence[str]) -> str:
    """The longest common prefix of `texts`."""
    low, high = min(texts), max(texts)  # the common prefix of these two is that of all
    length = next((at for at, char in enumerate(low) if char != high[at]), len(low))
    return low[:length]


class JsonEnd:
    """A scanner that finds the end of a JSON object or array by counting brackets outside strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False

    def push(self, text: str) -> int:
        """Take the next piece `text`; returns the number of its characters that belong to the object or
        array."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.ended = True
                    return i + 1
        return len(text)
