"""What a branch of a program holds: text and token ids, as a list that forks share by reference.

Each piece points at the one before it, so a fork is one pointer and nothing is copied. Generated text
is kept as the ids that the backend returned and is never tokenised again; adjacent constant texts are
sent as one string, so that they are tokenised as the user wrote them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ramify.messages import Segment


class Piece(msgspec.Struct, frozen=True):
    """One segment after `before`, and the text that it stands for."""

    before: Piece | None
    segment: Segment
    text: str
    boundary: bool = False
    """A chat template ends here, so that no token can span what follows."""


def append_text(tail: Piece | None, text: str, *, boundary: bool = False) -> Piece | None:
    """`tail` with constant text after it."""
    return Piece(tail, text, text, boundary) if text else tail


def append_output(
    tail: Piece | None, text: str, ids: tuple[int, ...], kept_ids: int, cut: str
) -> Piece | None:
    """`tail` with generated text after it: ``ids[:kept_ids]`` as ids, and `cut`, the end of `text`, as text.

    A backend that tells no ids has its text kept as text.
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
    """The prompt up to `tail`; where `known` is an earlier part of it, only the rest is walked."""
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
    """The text after `since`, which is `tail` or a piece before it; all of it for None."""
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
    """What is appended to `tail` begins a new token: it ends in ids, at a chat boundary, or is empty."""
    return tail is None or tail.boundary or not isinstance(tail.segment, str)
