"""The content of a branch: text and token ids, as a linked list that forks share.

Each piece points at the piece before it, so a fork copies one pointer. Generated text is kept as the token
ids that the backend returned and is never tokenized again. Adjacent constant texts are sent as one string,
so that they are tokenized as one text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from ramify.messages import Segment

if TYPE_CHECKING:
    from ramify.lang.prompt.chat import Dialogue
    from ramify.lang.prompt.model import PromptModel


class Mark(Protocol):
    """The kind of a piece whose text and ids are those of one model: it can be written for another."""

    def write(
        self, dialogue: Dialogue, tail: Piece | None, target: PromptModel
    ) -> tuple[Dialogue, Piece | None]:
        """`dialogue` and `tail` with the piece appended as `target` reads it."""
        ...


class Generated(msgspec.Struct, frozen=True):
    """The mark of another model's output, which the piece has as text."""

    by: PromptModel
    ids: tuple[int, ...]


class Continued(msgspec.Struct, frozen=True):
    """The mark of a piece that belongs to the mark before it."""

    def write(
        self, dialogue: Dialogue, tail: Piece | None, target: PromptModel
    ) -> tuple[Dialogue, Piece | None]:
        return dialogue, tail


class Piece(msgspec.Struct, frozen=True):
    """One segment after the piece `before`, and its text."""

    before: Piece | None
    segment: Segment
    text: str
    boundary: bool = False
    """Whether text of a chat template ends here: no token spans this piece and the next one."""
    mark: Mark | Generated | None = None
    """The kind of the piece; None for the program's text and for the output of the run's own model."""
    generated: bool = False
    """Whether `text` is a model's output."""
    later: str | None = None
    """The text that replaces it once thoughts leave the prompt; None: it stays."""
    of: Piece | None = None
    """The piece that this one replaces: it was written anew when thoughts began or left the prompt."""


def append_text(tail: Piece | None, text: str) -> Piece | None:
    """`tail` with constant text after it."""
    return Piece(tail, text, text) if text else tail


def append_marked(tail: Piece | None, text: str, mark: Mark, *, boundary: bool = False) -> Piece:
    """`tail` with the text of a model's template after it, which may be empty."""
    return Piece(tail, text, text, boundary if text else ends_on_token(tail), mark)


def append_output(
    tail: Piece | None,
    text: str,
    ids: tuple[int, ...],
    kept_ids: int,
    cut: str,
    by: PromptModel | None = None,
) -> Piece | None:
    """`tail` with generated text after it: ``ids[:kept_ids]`` as ids, and `cut`, the end of `text`, as text.

    Without ids, from a backend that returns none, all of `text` is kept as text. The output of another
    model, `by`, is kept as text with its ids beside it.
    """
    if not kept_ids:
        return _append_generated(tail, text)
    kept, mark = text.removesuffix(cut), None if by is None else Generated(by, ids[:kept_ids])
    segment = kept if by is not None else ids[:kept_ids]
    return _append_generated(Piece(tail, segment, kept, mark=mark, generated=True), cut)


def _append_generated(tail: Piece | None, text: str) -> Piece | None:
    return Piece(tail, text, text, generated=True) if text else tail


def append_pieces(tail: Piece | None, new: Iterable[Piece]) -> Piece | None:
    """`tail` with copies of other pieces after it."""
    for piece in new:
        tail = replace(piece, before=tail)
    return tail


def marked(tail: Piece | None, since: Piece | None, mark: Mark) -> Piece | None:
    """`tail` with all pieces after `since` marked as one: `mark` is on the first of them."""
    marks: list[Mark] = [mark]
    new = pieces(tail, since)
    found = new[0].before if new else tail
    for piece in new:
        found = replace(piece, before=found, mark=marks.pop() if marks else Continued())
    return found


class Prompt(NamedTuple):
    """All segments up to `end`, adjacent texts joined."""

    end: Piece | None = None
    segments: tuple[Segment, ...] = ()


EMPTY = Prompt()


def prompt_of(tail: Piece | None, known: Prompt = EMPTY) -> Prompt:
    """The prompt up to `tail`. Where `known` ends in an earlier piece, only later pieces are walked."""
    new = pieces(tail, known.end)
    if (new[0].before if new else tail) is not known.end:
        known, new = EMPTY, pieces(tail)
    segments = list(known.segments)
    texts: list[str] = []
    if segments and isinstance(last := segments[-1], str):
        texts.append(last)
        segments.pop()
    for piece in new:
        if isinstance(piece.segment, str):
            if piece.segment:
                texts.append(piece.segment)
            continue
        if texts:
            segments.append("".join(texts))
            texts.clear()
        segments.append(piece.segment)
    if texts:
        segments.append("".join(texts))
    return Prompt(tail, tuple(segments))


def place_of(end: Piece | None, known: Prompt = EMPTY) -> tuple[int, int]:
    """The place of `end` in prompts: (segments before it, characters of the next segment before it)."""
    segments = prompt_of(end, known).segments
    if segments and isinstance(last := segments[-1], str):
        return len(segments) - 1, len(last)
    return len(segments), 0


def text_of(tail: Piece | None, since: Piece | None = None, *, later: bool = False) -> str:
    """The text after `since`, which is `tail` or a piece before it; with None, all text.

    With `later` it is the text once thoughts have left the prompt.
    """
    return "".join(
        [piece.later if later and piece.later is not None else piece.text for piece in pieces(tail, since)]
    )


def pieces(tail: Piece | None, since: Piece | None = None) -> list[Piece]:
    """The pieces after `since`, oldest first."""
    found: list[Piece] = []
    while tail is not None and tail is not since and (tail.of is None or tail.of is not since):
        found.append(tail)
        tail = tail.before
    found.reverse()
    return found


def ends_on_token(tail: Piece | None) -> bool:
    """Whether text after `tail` begins a new token: `tail` ends in ids, at a chat boundary, or is empty."""
    return tail is None or tail.boundary or not isinstance(tail.segment, str)
