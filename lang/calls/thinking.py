"""Thinking: what is asked of a `gen`, how its thoughts are told from its answer, and when they are dropped.

Example, Qwen 3, with the answer "4" and the thoughts "2 + 2.":

    sent         <|im_start|>assistant\n<think>\n    with the marks of the chat template
    generated    2 + 2.\n</think>\n\n4              the runtime forces the blank line
    later turns  <|im_start|>assistant\n4           as the template writes earlier turns
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.calls.transcript import Piece, pieces
from ramify.messages import ModelInfo, Preamble, TextChunk, Thinking, ThinkingFormat
from ramify.spelling import nearest
from ramify.tool_calls.parser import overlap

DEFAULT_TOKENS = 1024
"""The most tokens of thoughts where the `gen` does not say."""

MARKS = 16
"""The marks behind thoughts have at most about this many tokens: a limit of a program allows for them."""

PLAIN = ThinkingFormat()
"""For models whose chat template has no sign of thinking, or that have none."""


def read_thinking(given: object) -> Thinking | None:
    """``thinking=`` of a `gen`: None, a bool, or a mapping of the fields of `Thinking`."""
    if given is None or isinstance(given, Thinking):
        return given
    if isinstance(given, bool):
        return Thinking(enabled=given)
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"thinking is {given!r}; it must be True, False, or a dict such as {{'max_tokens': 256}}.",
            field="thinking",
        )
    for name in given:
        if name not in Thinking.__struct_fields__:
            raise UnsupportedField(
                f"thinking has no field {name!r}.",
                field=f"thinking.{name}",
                remedy=nearest(str(name), Thinking.__struct_fields__),
            )
    try:
        return msgspec.convert(dict(given), Thinking).check()
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"thinking is of the wrong type: {error}.", field="thinking") from None


def thinking_of(info: ModelInfo) -> ThinkingFormat:
    found = None if info.chat_format is None else info.chat_format.thinking
    return found or PLAIN


def most_tokens(thinking: Thinking | None) -> int:
    """The most tokens of thoughts, with the marks behind them; 0 where the model does not think."""
    if thinking is None or not thinking.enabled:
        return 0
    return MARKS + (DEFAULT_TOKENS if thinking.max_tokens is None else thinking.max_tokens)


def preambles_of(thinking: Thinking | None, info: ModelInfo) -> tuple[Preamble, ...]:
    """What the runtime is told of the thoughts: free text with an end and a limit, then the blank line."""
    if thinking is None or not thinking.enabled:
        return ()
    marks = thinking_of(info)
    thoughts = Preamble(end=marks.end, max_tokens=most_tokens(thinking) - MARKS, apart=True)
    return (thoughts, Preamble(end=marks.gap, max_tokens=0, apart=True)) if marks.gap else (thoughts,)


def without_thoughts(tail: Piece | None, since: Piece | None) -> Piece | None:
    """The content up to `tail`, without the thoughts after `since`."""
    after = pieces(tail, since)
    first = next((index for index, piece in enumerate(after) if piece.later is not None), None)
    if first is None:
        return tail
    kept = after[first].before
    for piece in after[first:]:
        if piece.later is not None:
            piece = replace(piece, segment=piece.later, text=piece.later, later=None, of=piece.of or piece)
        kept = replace(piece, before=kept, of=piece.of or piece)
    return kept


class ThoughtSplitter:
    """Tells the thoughts from the answer in the chunks of one generation, in their order."""

    def __init__(self, marks: ThinkingFormat) -> None:
        self._marks = marks
        self._text = ""
        self._shown = 0
        self._end = -1  # where the end mark begins in the text
        self._open = True
        self.before = ""
        """The output before the answer: the thoughts and the marks behind them."""
        self.head = ""
        """The beginning of the answer, as far as its tokens cannot be told from those before it."""
        self.ids = 0
        """Tokens of `before` and `head`."""

    def push(self, chunk: TextChunk) -> TextChunk:
        """`chunk` with its thoughts apart, without white space at their beginning and end."""
        if not self._open:
            return self._counted(chunk)
        start = len(self._text)
        self._text += chunk.text
        border = self._border(last=chunk.finish is not None)
        if border is None:
            self.ids += len(chunk.ids)
            self.before = self._text
            return self._counted(replace(chunk, text="", reasoning=self._thoughts()))
        self._open = False
        self.before, answer = self._text[:border], self._text[border:]
        ids, characters = 0, start
        for count, length in chunk.pieces or ((len(chunk.ids), len(chunk.text)),):
            if characters >= border:
                break
            ids, characters = ids + count, characters + length
        self.ids += ids
        self.head = self._text[border:characters]
        return self._counted(replace(chunk, text=answer, reasoning=self._thoughts()))

    def _border(self, *, last: bool) -> int | None:
        """Where the answer begins; None while that is not known."""
        end, gap = self._marks.end, self._marks.gap
        if self._end < 0:
            self._end = self._text.find(end)
            if self._end < 0:
                return None
        after = self._text[self._end + len(end) :]
        if gap.startswith(after) and after != gap:
            return len(self._text) if last else None
        return self._end + len(end) + (len(gap) if after.startswith(gap) else 0)

    def _thoughts(self) -> str:
        """The thoughts that have not been shown yet, and can no longer change."""
        end = self._end if self._end >= 0 else len(self._text) - overlap(self._text, self._marks.end)
        thoughts = self._text[:end].strip()
        new, self._shown = thoughts[self._shown :], len(thoughts)
        return new

    def _counted(self, chunk: TextChunk) -> TextChunk:
        if chunk.usage is None or chunk.usage.stored_tokens:
            return chunk
        return replace(chunk, usage=replace(chunk.usage, reasoning_tokens=self.ids))
