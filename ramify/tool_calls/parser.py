"""Reads tool calls out of a model's output while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ramify.tool_calls.formats import ToolFormat


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Call `index` of this turn calls `name`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Part = Content | CallBegins | Arguments


class CallParser:
    """Takes text piece by piece and says what it is.

    Everything is said as soon as it is certain; what may be the beginning of a trigger waits. Where the
    output ends inside a call, what there is of its arguments has been said and nothing is made up.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._text = ""  # not yet said
        self._state: Callable[[], Iterator[Part]] | None = self._free
        self._literal = ""
        self._then: Callable[[], Iterator[Part]] = self._free
        self._json = _JsonEnd()
        self.calls = 0
        """Calls begun."""
        self.inside = False
        """The last call is not finished."""

    def push(self, text: str) -> list[Part]:
        """What `text` adds."""
        self._text += text
        parts: list[Part] = []
        while True:
            state, length = self._state, len(self._text)
            parts += self._run()
            if self._state == state and len(self._text) == length:
                return parts

    def close(self) -> list[Part]:
        """The output has ended: what was held back. After a call that is the beginning of another one."""
        left, self._text = self._text, ""
        return [Content(left)] if left and self._state == self._free else []

    def _run(self) -> Iterator[Part]:
        if self._state is not None:
            yield from self._state()
        elif self._text:
            yield Content(self._text)
            self._text = ""

    def _free(self) -> Iterator[Part]:
        before, found, _ = self._text.partition(self._form.trigger)
        if found:
            self._text = self._text[len(before) :]
            self.inside = True
            self._expect(self._form.opening, self._name)
        else:
            before = self._text[: len(self._text) - overlap(self._text, self._form.trigger)]
            self._text = self._text[len(before) :]
        if before:
            yield Content(before)

    def _expect(self, literal: str, then: Callable[[], Iterator[Part]]) -> None:
        """Next comes `literal`, which is not said."""
        self._literal, self._then, self._state = literal, then, self._skip

    def _skip(self) -> Iterator[Part]:
        if len(self._text) >= len(self._literal):
            self._text = self._text[len(self._literal) :]
            self._state = self._then
        yield from ()

    def _name(self) -> Iterator[Part]:
        name, found, rest = self._text.partition(self._form.call[1])
        if found:
            self._text = rest
            self._json = _JsonEnd()
            self._state = self._arguments
            self.calls += 1
            yield CallBegins(self.calls - 1, name)

    def _arguments(self) -> Iterator[Part]:
        length = self._json.push(self._text)
        text, self._text = self._text[:length], self._text[length:]
        if self._json.ended:
            self._expect(self._form.call[2], self._called)
        if text:
            yield Arguments(self.calls - 1, text)

    def _called(self) -> Iterator[Part]:
        self.inside = False
        self._state = self._after_call
        yield from ()

    def _after_call(self) -> Iterator[Part]:
        form = self._form
        again = None if form.separator is None else form.separator + form.call[0]
        if again is not None and self._text.startswith(again):
            self._text = self._text[len(again) :]
            self.inside = True
            self._state = self._name
        elif form.end and self._text.startswith(form.end):
            self._text = self._text[len(form.end) :]
            self._state = None
        elif self._text and not any(
            option and option.startswith(self._text) for option in (again or "", form.end)
        ):
            self._state = None
        yield from ()


def overlap(text: str, pattern: str) -> int:
    """Length of the longest end of `text` that begins `pattern`, without being all of it."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if pattern.startswith(text[-length:]):
            return length
    return 0


class _JsonEnd:
    """Finds where a JSON object or array ends, by its brackets and strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.ended = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
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
