"""The content of a branch: text and token ids, as a linked list that forks share.

Each piece points at the piece before it, so a fork copies one pointer. Generated text is kept as the token
ids that the backend returned, and is never tokenized again. Adjacent pieces of text are sent as one string,
so that they are tokenized together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from ramify.messages import Segment

if TYPE_CHECKING:
    from ramify.lang.prompt.chat import Content
    from ramify.lang.prompt.view import PromptModel


class Mark(Protocol):
    """The mark of a piece whose text and ids depend on the model. A mark can write its piece for another
    model."""

    def write(self, content: Content, target: PromptModel) -> Content:
        """`content` with the piece appended in the form that `target` reads."""
        ...


class Generated(msgspec.Struct, frozen=True):
    """The mark of an output of another model than the run's own. The piece has the output as text; the mark
    has the output's token ids, and the model `by`."""

    by: PromptModel
    ids: tuple[int, ...]


class Continued(msgspec.Struct, frozen=True):
    """The mark of a piece that the mark of an earlier piece writes together with its own piece."""

    def write(self, content: Content, target: PromptModel) -> Content:
        return content


class Piece(msgspec.Struct, frozen=True):
    """A segment of the content, which follows the piece `before`, and the segment's text."""

    before: Piece | None
    segment: Segment
    text: str
    boundary: bool = False
    """Whether the piece ends with text of a chat template, so that no token spans this piece and the next
    one."""
    mark: Mark | Generated | None = None
    """The mark that writes the piece for other models. None for the program's text and for outputs of the
    run's own model, which need no mark."""
    generated: bool = False
    later: str | None = None
    """The text that replaces the piece when thoughts are removed from the prompt; None if the piece stays."""
    of: Piece | None = None
    """The original piece, if this piece replaces it because thoughts began or were removed from the prompt;
    else None."""


def append_text(tail: Piece | None, text: str) -> Piece | None:
    """`tail` with a piece of text appended; `tail` itself for an empty text."""
    return Piece(tail, text, text) if text else tail


def append_marked(tail: Piece | None, text: str, mark: Mark, *, boundary: bool = False) -> Piece:
    """`tail` with a piece appended, which has `mark` and `text`, a text of the model's template. `text` may
    be empty."""
    return Piece(tail, text, text, boundary if text else ends_on_token(tail), mark)


def append_output(
    tail: Piece | None,
    text: str,
    ids: tuple[int, ...],
    kept_ids: int,
    cut: str,
    by: PromptModel | None = None,
) -> Piece | None:
    """`tail` with an output appended: ``ids[:kept_ids]`` as ids, and `cut`, the end of `text`, as text.

    If `kept_ids` is 0, for example because the backend returns no ids, all of `text` is kept as text. `by` is
    the model of the output; None for the run's own model. The output of another model is kept as text, with
    the ids in the mark.
    """
    if not kept_ids:
        return _append_generated(tail, text)
    kept, mark = text.removesuffix(cut), None if by is None else Generated(by, ids[:kept_ids])
    segment = kept if by is not None else ids[:kept_ids]
    return _append_generated(Piece(tail, segment, kept, mark=mark, generated=True), cut)


def _append_generated(tail: Piece | None, text: str) -> Piece | None:
    return Piece(tail, text, text, generated=True) if text else tail


def append_pieces(tail: Piece | None, new: Iterable[Piece]) -> Piece | None:
    """`tail` with copies of the pieces `new` appended."""
    for piece in new:
        tail = replace(piece, before=tail)
    return tail


def marked(tail: Piece | None, since: Piece | None, mark: Mark) -> Piece | None:
    """`tail`, with all pieces after `since` marked: the first of these pieces with `mark`, the others with
    `Continued`."""
    marks: list[Mark] = [mark]
    new = pieces(tail, since)
    found = new[0].before if new else tail
    for piece in new:
        found = replace(piece, before=found, mark=marks.pop() if marks else Continued())
    return found


class Prompt(NamedTuple):
    """The segments of a content up to the piece `end`, with adjacent texts concatenated."""

    end: Piece | None = None
    segments: tuple[Segment, ...] = ()


EMPTY = Prompt()


def prompt_of(tail: Piece | None, known: Prompt = EMPTY) -> Prompt:
    """The prompt up to `tail`. If `known` is the prompt up to an earlier piece, only the pieces after that
    piece are read."""
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
    """The place in the prompt at which the piece `end` ends: (number of whole segments before the place,
    number of characters of the next segment before the place). `known` is as for `prompt_of`."""
    segments = prompt_of(end, known).segments
    if segments and isinstance(last := segments[-1], str):
        return len(segments) - 1, len(last)
    return len(segments), 0


def text_of(tail: Piece | None, since: Piece | None = None, *, later: bool = False) -> str:
    """The text after the piece `since` up to `tail`; all text if `since` is None. With `later`, the text as
    it will be when thoughts have been removed from the prompt."""
    return "".join(
        [piece.later if later and piece.later is not None else piece.text for piece in pieces(tail, since)]
    )


def pieces(tail: Piece | None, since: Piece | None = None) -> list[Piece]:
    """The pieces after `since` (None: all pieces) up to `tail`, oldest first."""
    found: list[Piece] = []
    while tail is not None and tail is not since and (tail.of is None or tail.of is not since):
        found.append(tail)
        tail = tail.before
    found.reverse()
    return found


def ends_on_token(tail: Piece | None) -> bool:
    """Whether text appended to `tail` begins with a new token: `tail` is empty, or ends in ids or at a
    boundary."""
    return tail is None or tail.boundary or not isinstance(tail.segment, str)
