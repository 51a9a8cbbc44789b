"""A streaming parser for turns that consist of messages in channels, as gpt-oss writes them (harmony)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Literal

from ramify.tool_calls.parser import Arguments, CallBegins, Content, JsonEnd, Reasoning
from ramify.tool_calls.text import InputReader

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

Event = Reasoning | Content | CallBegins | Arguments


class ChannelParser:
    """A parser that takes a turn of messages in channels piece by piece and returns events.

    Example, each line a message; the first begins where the prompt has ended, in ``<|start|>assistant``:

        <|channel|>analysis<|message|>Hm.<|end|>                                            Reasoning('Hm.')
        <|start|>assistant<|channel|>commentary<|message|>I look.<|end|>                    Content('I look.')
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}  CallBegins, …
        <|start|>assistant<|channel|>final<|message|>Four.                                  Content('Four.')

    The marks are control tokens. Ordinary text with the same spelling, as in a quoted turn, is part of a
    message. A recipient may also come before the channel. The turn begins with its reasoning, which ends at
    the first message that is not reasoning.

    calls : whether messages to recipients are calls; else they are content
    reasoning : the class of the events for reasoning; None to leave reasoning out
    texts : the names of the free-text tools
    """

    def __init__(
        self,
        *,
        calls: bool,
        reasoning: type[Reasoning | Content] | None = Reasoning,
        texts: Collection[str] = (),
    ) -> None:
        self._with_calls, self._reasoning, self._texts = calls, reasoning, texts
        self._text = ""  # text that is in no event yet
        self._controls: list[int] = []  # positions in it at which control tokens begin
        self._kind: Literal["header", "reasoning", "content", "call"] = "header"
        self._json = JsonEnd()
        self._input: InputReader | None = None
        self._calls = 0
        self.reasoning = True
        """True until a message begins that is not reasoning."""
        self.answered = 0
        """The number of characters at the end of the pushed text that follow the header of the first message
        that is not reasoning. Set when `reasoning` becomes False."""

    @property
    def called(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return self._calls > 0 and self._json.ended

    def push(self, text: str, controls: Sequence[int]) -> list[Event]:
        """Take the next piece `text`, in which control tokens begin at `controls` (`TextChunk.controls`).

        Returns the events that are now certain.
        """
        self._controls += [len(self._text) + place for place in controls]
        self._text += text
        events: list[Event] = []
        while True:
            marks = (_MESSAGE,) if self._kind == "header" else _ENDS
            found = next(
                ((at, mark) for at in self._controls for mark in marks if self._text.startswith(mark, at)),
                None,
            )
            if found is None:
                break
            before = self._take(found[0])
            self._take(len(found[1]))
            events += self._begin_message(before) if self._kind == "header" else self._write(before)
            if found[1] != _MESSAGE:
                self._kind = "header"
        if self._kind != "header":
            begun = (at for at in self._controls if any(mark.startswith(self._text[at:]) for mark in _ENDS))
            events += self._write(self._take(next(begun, len(self._text))))
        return events

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._controls = [place - length for place in self._controls if place >= length]
        return taken

    def close(self) -> list[Event]:
        """End the output. Returns the events for text that was held back."""
        rest, self._text = self._text, ""
        return [] if self._kind == "header" else self._write(rest)

    def _begin_message(self, header: str) -> list[Event]:
        """Begin the message with the header `header`, which names the channel and the recipient."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and self._with_calls:
            self._kind, self._json = "call", JsonEnd()
            self._calls += 1
            self._answers()
            name = recipient[1].removeprefix("functions.")
            self._input = InputReader() if name in self._texts else None
            return [CallBegins(self._calls - 1, name, self._input is not None)]
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        if self._kind == "content":
            self._answers()
        return []

    def _answers(self) -> None:
        if self.reasoning:
            self.reasoning, self.answered = False, len(self._text)

    def _write(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._kind == "call":
            self._json.push(text)
            if self._input is not None:
                text = self._input.push(text)
            return [Arguments(self._calls - 1, text)] if text else []
        if self._kind == "content":
            return [Content(text)]
        return [] if self._reasoning is None else [self._reasoning(text)]
