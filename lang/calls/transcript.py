"""The content of a branch: text and token ids, as a linked list that forks share.

Each piece points at the piece before it, so a fork copies one pointer. Generated text is kept as the token
ids that the backend returned and is never tokenized again. Adjacent constant texts are sent as one string,
so that they are tokenized as one text.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ramify.messages import Segment


class Piece(msgspec.Struct, frozen=True):
    """One segment after the piece `before`, and its text."""

    before: Piece | None
    segment: Segment
    text: str
    boundary: bool = False
    """The text of a chat template ends here, so that no token spans this piece and the next one."""


def append_text(tail: Piece | None, text: str, *, boundary: bool = False) -> Piece | None:
    """`tail` with constant text after it."""
    return Piece(tail, text, text, boundary) if text else tail


def append_output(
    tail: Piece | None, text: str, ids: tuple[int, ...], kept_ids: int, cut: str
) -> Piece | None:
    """`tail` with generated text after it: ``ids[:kept_ids]`` as ids, and `cut`, the end of `text`, as text.

    Without ids, from a backend that returns none, all of `text` is kept as text.
    """
    if not kept_ids:
        return append_text(tail, text)
    tail = Piece(tail, ids[:kept_ids], text.removesuffix(cut))
    return append_text(tail, cut)


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
            texts.append(piece.segment)
            continue
        if texts:
            segments.append("".join(texts))
            texts.clear()
        segments.append(piece.segment)
    if texts:
        segments.append("".join(texts))
    return Prompt(tail, tuple(segments))


def text_of(tail: Piece | None, since: Piece | None = None) -> str:
    """The text after `since`, which is `tail` or a piece before it; with None, all text."""
    return "".join([piece.text for piece in pieces(tail, since)])


def pieces(tail: Piece | None, since: Piece | None = None) -> list[Piece]:
    """The pieces after `since`, oldest first."""
    found: list[Piece] = []
    while tail is not None and tail is not since:
        found.append(tail)
        tail = tail.before
    found.reverse()
    return found


def ends_on_token(tail: Piece | None) -> bool:
    """Text after `tail` begins a new token, because `tail` ends in ids, at a chat boundary, or is empty."""
    return tail is None or tail.boundary or not isinstance(tail.segment, str)
