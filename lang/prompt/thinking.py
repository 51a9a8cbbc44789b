"""Thoughts of a model: the option `thinking`, splitting outputs, and removing thoughts from prompts.

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
from ramify.lang.prompt.transcript import Piece, pieces
from ramify.messages import Preamble, TextChunk, Thinking
from ramify.model_info import ModelInfo, ThinkingFormat
from ramify.spelling import nearest
from ramify.tool_calls.parser import overlap

DEFAULT_TOKENS = 1024
"""Most tokens of thoughts, if the `gen` sets no max_tokens for them."""

MARKS = 16
"""Number of tokens that a limit on tokens reserves for the marks after the thoughts. An upper bound: the
marks have fewer tokens."""

PLAIN = ThinkingFormat()
"""The format for models that have no chat template, or a chat template without thinking."""


def read_thinking(given: object) -> Thinking | None:
    """The setting of thinking for the argument ``thinking=`` of a `gen`, which is a bool, or a mapping of the
    fields of `Thinking`. None if `given` is None."""
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
    """Most tokens of the thoughts and the marks after them; 0 if the model is not told to think."""
    if thinking is None or not thinking.enabled:
        return 0
    return MARKS + (DEFAULT_TOKENS if thinking.max_tokens is None else thinking.max_tokens)


def preambles_of(thinking: Thinking | None, info: ModelInfo) -> tuple[Preamble, ...]:
    """The preambles that describe the thoughts to the runtime: unconstrained text up to the end mark or a
    limit of tokens, then the text between end mark and answer. Empty if the model is not told to think."""
    if thinking is None or not thinking.enabled:
        return ()
    marks = thinking_of(info)
    thoughts = Preamble(end=marks.end, max_tokens=most_tokens(thinking) - MARKS, apart=True)
    return (thoughts, Preamble(end=marks.gap, max_tokens=0, apart=True)) if marks.gap else (thoughts,)


def without_thoughts(tail: Piece | None, since: Piece | None) -> Piece | None:
    """The pieces up to `tail`, without the thoughts after `since`."""
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
    """A splitter of one generation's chunks, which are pushed in order, into thoughts and answer."""

    def __init__(self, marks: ThinkingFormat) -> None:
        self._marks = marks
        self._texts: list[str] = []
        self._length = 0
        self._pending = ""
        """Text not yet assigned to the thoughts or the answer. It may be the beginning of the end mark, or,
        after the end mark, of the gap."""
        self._ended = False
        self._spaces: list[str] = []
        """White space that belongs to the thoughts only if more thoughts follow."""
        self._shown = False
        self._open = True
        self.head = ""
        """The beginning of the answer that is in the same token as the end of the thoughts; usually empty."""
        self.ids = 0

    @property
    def before(self) -> str:
        """The output before the answer: the thoughts and the marks after them."""
        return "".join(self._texts)

    def push(self, chunk: TextChunk) -> TextChunk:
        """A copy of `chunk` with the thoughts moved to `reasoning`, without white space around them. The time
        taken depends on the length of the chunk, not of all text."""
        if not self._open:
            return self._counted(chunk)
        start = self._length
        self._length += len(chunk.text)
        self._texts.append(chunk.text)
        self._pending += chunk.text
        thoughts = "" if self._ended else self._take_thoughts()
        answer = self._answer(last=chunk.finish is not None)
        if answer is None:
            self.ids += len(chunk.ids)
            return self._counted(replace(chunk, text="", controls=(), reasoning=thoughts))
        self._open = False
        border = self._length - len(answer)
        self._texts = [self.before[:border]]
        ids, characters = 0, start
        for count, length in chunk.pieces or ((len(chunk.ids), len(chunk.text)),):
            if characters >= border:
                break
            ids, characters = ids + count, characters + length
        self.ids += ids
        self.head = answer[: max(0, characters - border)]
        return self._counted(replace(chunk, text=answer, controls=(), reasoning=thoughts))

    def _answer(self, *, last: bool) -> str | None:
        """The answer so far; None while thoughts or marks may continue. `last`: whether this is the last
        chunk."""
        after, gap = self._pending, self._marks.gap
        if not self._ended or (gap.startswith(after) and after != gap):
            return "" if self._ended and last else None
        return after.removeprefix(gap)

    def _take_thoughts(self) -> str:
        """Remove the part that certainly belongs to the thoughts from the pending text, and return that
        part."""
        end = self._marks.end
        at = self._pending.find(end)
        self._ended = at >= 0
        if at < 0:
            at = len(self._pending) - overlap(self._pending, end)
        new, self._pending = self._pending[:at], self._pending[at + len(end) * self._ended :]
        bare = new.rstrip()
        if bare:
            bare = "".join([*self._spaces, bare]) if self._shown else bare.lstrip()
            self._shown, self._spaces, new = True, [], new[len(new.rstrip()) :]
        self._spaces.append(new)
        return bare

    def _counted(self, chunk: TextChunk) -> TextChunk:
        if chunk.usage is None or chunk.usage.stored_tokens:
            return chunk
        return replace(chunk, usage=replace(chunk.usage, reasoning_tokens=self.ids))
