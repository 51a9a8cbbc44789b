"""The output of a step while it is generated: chunks for the readers of its variable, and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ramify.lang.program.events import CallText, Event, Text, Thought, ToolCalled
from ramify.lang.program.variables import Variable
from ramify.lang.tools.forms import JsonCalls, TaggedCalls, WrittenCalls
from ramify.lang.trace.calls import Call
from ramify.messages import TextChunk

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch


class StepOutput:
    """The output of the step that sets `variable`."""

    def __init__(self, branch: Branch, variable: Variable) -> None:
        self._branch, self._variable, self._step = branch, variable, variable.name

    def take(self, chunk: TextChunk) -> None:
        """Show readers the next chunk."""
        self._variable.chunks.append(chunk)
        self.note(chunk.reasoning, chunk.text)

    def note(self, thoughts: str, text: str) -> None:
        """Note the events of the next thoughts and of the next text."""
        found = [Thought(self._step, thoughts, self._branch.path)] if thoughts else []
        self._branch.note(*found, *(self._events(text) if text else ()))

    def _events(self, text: str) -> Iterator[Event]:
        """The events of the next text."""
        yield Text(self._step, text, self._branch.path)


class CallsOutput(StepOutput):
    """The output of a `call_tools` step. Each call is noted when its text is complete.

    Args:
        call: The step's call in the trace.
        opening: The beginning of the turn that is part of the prompt.
    """

    def __init__(
        self, branch: Branch, variable: Variable, call: Call, form: TaggedCalls | JsonCalls, opening: str
    ) -> None:
        super().__init__(branch, variable)
        self._place = call.place
        self._reader = form.reader()
        self._reader.push(opening)
        self._held = ""
        """Text that may be the beginning of a call, or words. Not noted yet."""
        self._called = 0

    def id(self, index: int) -> str:
        """The id of the call at `index` of the turn."""
        return f"{self._place}/{index}"

    def end(self, written: WrittenCalls) -> None:
        """Note what has not been noted of the turn, whose calls are `written`."""
        held = super()._events(self._held) if self._held else ()
        self._branch.note(*held, *self._calls(written[self._called :]))

    def _events(self, text: str) -> Iterator[Event]:
        words, calls = self._reader.push(text)
        held, self._held = self._held + text, ""
        if not held.startswith(words):  # blanks between calls
            words = ""
        if words:
            yield from super()._events(words)
        rest = held[len(words) :]
        if not self._reader.begun:
            self._held = rest
        elif rest:
            yield CallText(self._step, rest, self._branch.path)
        yield from self._calls(calls)

    def _calls(self, calls: WrittenCalls) -> Iterator[Event]:
        for name, text in calls:
            yield ToolCalled(self._step, self.id(self._called), name, _object(text), self._branch.path)
            self._called += 1


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
