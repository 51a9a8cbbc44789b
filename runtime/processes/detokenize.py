"""Incremental detokenisation: whole characters only, stop strings found across token borders.

`TextStream` holds one request's output. Text is released as soon as it can no longer change: not
while its last bytes are an unfinished UTF-8 character, and not while it may be the beginning of a
stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

REPLACEMENT = "�"
LONGEST_UNFINISHED = 16
"""Ids that may wait for the rest of a character. A character has 4 bytes: more are not valid UTF-8."""

Decode = Callable[[Sequence[int]], str]


class Released(NamedTuple):
    """New text, and the stop string that ended it."""

    text: str
    matched: str | None


class TextStream:
    """The text of one output.

    `decode` turns token ids into text; `context` is the end of the prompt, since some tokenizers
    spell a token differently at the start of a text. `overlap`, which the output begins with, is the
    prompt's already, and no part of the text.
    """

    def __init__(
        self, decode: Decode, *, stop: Sequence[str] = (), context: Sequence[int] = (), overlap: str = ""
    ) -> None:
        self._decode = decode
        self._skip = len(overlap)
        self.healed = bool(overlap)
        self._stop = tuple(stop)
        self._longest_stop = max((len(stop) for stop in stop), default=0)
        self._ids = list(context)
        self._window = 0  # decoding starts here: at the beginning of the last released piece
        self._read = len(self._ids)  # ids before this one are in the text
        self._text = ""
        self._released = 0
        self._text_end: list[
            int
        ] = []  # per output id, the length of the text after it; -1 inside a character

    @property
    def text(self) -> str:
        """All text decoded so far, unreleased text included."""
        return self._text

    def push(self, ids: Sequence[int]) -> Released:
        """Append output `ids`. When a stop string completes, the text ends right before it."""
        searched = max(0, len(self._text) - self._longest_stop + 1)
        for token in ids:
            self._ids.append(token)
            self._text_end.append(len(self._text) if self._decode_pending() else -1)
        if self._stop and (match := self._find_stop(searched)) is not None:
            position, matched = match
            self._text = self._text[:position]
            return Released(self._release(position), matched)
        return Released(self._release(len(self._text) - self._held_back()), None)

    @property
    def may_stop(self) -> bool:
        """It has stop strings."""
        return bool(self._stop)

    def pieces(self, pushed: int, ids: int, characters: int) -> tuple[tuple[int, int], ...]:
        """Of the last `ids` ids and `characters` characters, how they go together, as `TextChunk` says.

        All of the ids but for a stop token at the end were `pushed` last, without stop strings.
        """
        first = len(self._text_end) - pushed
        before = next((end for end in reversed(self._text_end[:first]) if end >= 0), 0)
        found: list[tuple[int, int]] = []
        told = 0
        for count, end in enumerate(self._text_end[first:], 1):
            if end >= 0:
                found.append((count - told, end - before))
                told, before = count, end
                characters -= found[-1][1]
        if ids > told or characters:
            found.append((ids - told, characters))
        return tuple(found)

    def flush(self) -> str:
        """The rest: an unfinished character becomes the replacement character."""
        if self._read < len(self._ids):
            self._append(self._pending_text())
            self._read = len(self._ids)
        return self._release(len(self._text))

    def cut(self) -> tuple[int, str]:
        """After a stop string: `(kept_ids, tail)` of `TextChunk`."""
        end = len(self._text)
        kept = len(self._text_end)
        while kept > 0 and not 0 <= self._text_end[kept - 1] <= end:
            kept -= 1
        start = self._text_end[kept - 1] if kept else 0
        return kept, self._text[start:end]

    def _decode_pending(self) -> bool:
        """Add the text of the pending ids unless it ends inside a character; True when it was added."""
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < LONGEST_UNFINISHED:
            return False
        self._append(text)
        self._window, self._read = self._read, len(self._ids)
        return True

    def _append(self, text: str) -> None:
        self._text += text[self._skip :]
        self._skip = max(0, self._skip - len(text))

    def _pending_text(self) -> str:
        before = self._decode(self._ids[self._window : self._read])
        return self._decode(self._ids[self._window :])[len(before) :]

    def _find_stop(self, start: int) -> tuple[int, str] | None:
        found = [(position, stop) for stop in self._stop if (position := self._text.find(stop, start)) >= 0]
        return min(found, key=lambda match: match[0]) if found else None

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._text) - self._released), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _release(self, end: int) -> str:
        text = self._text[self._released : end]
        self._released = max(self._released, end)
        return text
