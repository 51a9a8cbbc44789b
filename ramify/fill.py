"""Filling in the middle between two texts."""

from __future__ import annotations

import msgspec


class Fill(msgspec.Struct, frozen=True):
    """A request to fill in the middle: the prompt is the text before it."""

    suffix: str
    """The text behind the middle."""
    files: tuple[tuple[str, str], ...] = ()
    """(name, text) of further files, which come before."""
