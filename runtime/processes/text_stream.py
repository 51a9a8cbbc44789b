"""Incremental detokenisation: text in whole characters only, and stop strings across token borders.

`TextStream` holds one request's output. Text is released as soon as it can no longer change. It is held back
while its last bytes are an unfinished UTF-8 character, and while its end may begin a stop string.

Example, with the stop string "END" ("é" has the bytes C3 A9, here one token each):

    ids pushed   text decoded   released   held back
    "caf"        "caf"          "caf"
    C3           "caf"          ""         C3, an unfinished character
    A9           "café"         "é"
    " E"         "café E"       " "        "E", with which "END" begins
    "ND of"      "café END of"  ""         the text ends before "END"; `matched` is "END"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

REPLACEMENT = "�"
LONGEST_UNFINISHED = 16
"""Maximum number of ids that wait for the rest of a character. UTF-8 has at most 4 bytes per character, so 16
ids without a whole character are not valid UTF-8."""

Decode = Callable[[Sequence[int]], str]


class Released(NamedTuple):
    """Text to be sent, and the stop string that ended the output, if one did."""

    text: str
    matched: str | None
    behind: int = 0
    """Number of pushed ids after the one that completed the stop string."""


class TextStream:
    """The text of one output.

    `decode` turns token ids into text. `context` holds the last ids of the prompt: some tokenizers decode a
    token differently at the start of a text. `overlap` is the end of the prompt if the output begins by
    spelling it again (token healing). This repetition is cut off. Stop strings count only after all texts in
    `stop_after` have appeared, in that order. `special` has the spelling of each special token.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stop: Sequence[str] = (),
        stop_after: Sequence[str] = (),
        context: Sequence[int] = (),
        overlap: str = "",
        special: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._decode = decode
        self._special = special
        self._controls: list[int] = []  # places in the text, not before `_told`
        self._told = 0
        self._stop_after = list(stop_after)
        self._stop_from = 0  # place in the text from which stop strings count, once `_stop_after` is empty
        self._skip = len(overlap)
        self.healed = bool(overlap)
        self._stop = tuple(stop)
        self._longest_stop = max((len(stop) for stop in stop), default=0)
        self._ids = list(context)
        self._window = 0  # decoding starts at this id, one piece of text before the first unread id
        self._read = len(self._ids)  # ids before this one are in the text
        self._text = ""
        self._released = 0
        self._text_end: list[int] = []
        """For each output id, the length of the text up to and including its token; -1 if the token ends
        inside a character."""
        self._starts: list[int] = []
        """For each output id, the place in the text of the first character that the token is a part of."""
        self._whole = 0  # number of whole characters in the text of the pending ids

    @property
    def text(self) -> str:
        """All text decoded so far, unreleased text included."""
        return self._text

    def push(self, ids: Sequence[int]) -> Released:
        """Append output `ids`. If a stop string is completed, the text ends right before it, and later ids
        are ignored. So the text does not depend on how the ids are divided among calls."""
        for place, token in enumerate(ids):
            searched = max(0, len(self._text) - self._longest_stop + 1)
            self._ids.append(token)
            self._starts.append(len(self._text) + max(0, self._whole - self._skip))
            self._text_end.append(len(self._text) if self._decode_pending() else -1)
            if self._stop and self._may_stop_here() and (match := self._find_stop(searched)) is not None:
                position, matched = match
                self._text = self._text[:position]
                return Released(self._release(position), matched, len(ids) - place - 1)
        return Released(self._release(len(self._text) - self._held_back()), None)

    def controls(self) -> tuple[int, ...]:
        """The value of `TextChunk.controls` for the text released since the last call."""
        start, self._told = self._told, self._released
        found = tuple([place - start for place in self._controls if place < self._told])
        del self._controls[: len(found)]
        return found

    @property
    def may_stop(self) -> bool:
        """Whether the output has stop strings."""
        return bool(self._stop)

    def pieces(self, pushed: int, ids: int, characters: int) -> tuple[tuple[int, int], ...]:
        """The value of `TextChunk.pieces` for the last `ids` ids and the last `characters` characters.

        `pushed` is the number of ids of the last push: `ids`, or one fewer if a stop token follows that was
        not pushed. Only for outputs without stop strings.
        """
        first = len(self._text_end) - pushed
        before = next((end for end in reversed(self._text_end[:first]) if end >= 0), 0)
        found: list[tuple[int, int]] = []
        counted = 0
        for count, end in enumerate(self._text_end[first:], 1):
            if end >= 0:
                found.append((count - counted, end - before))
                counted, before = count, end
                characters -= found[-1][1]
        if ids > counted or characters:
            found.append((ids - counted, characters))
        return tuple(found)

    def starts(self, ids: int) -> list[int]:
        """The value of `TokenLogprobs.offsets` for the last `ids` ids. If a stop string has cut off the text
        of a token, its offset is the length of the text."""
        return [min(start, len(self._text)) for start in self._starts[len(self._starts) - ids :]]

    def flush(self) -> str:
        """Release the rest of the text. An unfinished character becomes the replacement character."""
        if self._read < len(self._ids):
            self._append(self._pending_text())
            self._read = len(self._ids)
        return self._release(len(self._text))

    def cut(self) -> tuple[int, str]:
        """The values `(kept_ids, tail)` of `TextChunk` after a stop string."""
        end = len(self._text)
        kept = len(self._text_end)
        while kept > 0 and not 0 <= self._text_end[kept - 1] <= end:
            kept -= 1
        start = self._text_end[kept - 1] if kept else 0
        return kept, self._text[start:end]

    def _decode_pending(self) -> bool:
        """Append the text of the pending ids, if it is of whole characters. Returns whether it was
        appended."""
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < LONGEST_UNFINISHED:
            self._whole = len(text.rstrip(REPLACEMENT))
            return False
        self._append(text)
        self._whole = 0
        # With skip_special_tokens the spelling is not in the text.
        spelling = self._special.get(self._ids[-1])
        if spelling and text.endswith(spelling):
            self._controls.append(len(self._text) - len(spelling))
        self._window, self._read = self._read, len(self._ids)
        return True

    def _append(self, text: str) -> None:
        self._text += text[self._skip :]
        self._skip = max(0, self._skip - len(text))

    def _pending_text(self) -> str:
        before = self._decode(self._ids[self._window : self._read])
        return self._decode(self._ids[self._window :])[len(before) :]

    def _may_stop_here(self) -> bool:
        while self._stop_after:
            end = self._stop_after[0]
            position = self._text.find(end, self._stop_from)
            if position < 0:
                # The next search begins where the end may begin.
                self._stop_from = max(self._stop_from, len(self._text) - len(end) + 1)
                return False
            self._stop_from = position + len(end)
            del self._stop_after[0]
        return True

    def _find_stop(self, start: int) -> tuple[int, str] | None:
        start = max(start, self._stop_from)
        found = [(position, stop) for stop in self._stop if (position := self._text.find(stop, start)) >= 0]
        return min(found, key=lambda match: match[0]) if found else None

    def _held_back(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        if self._stop_after:
            return 0
        unread = len(self._text) - max(self._released, self._stop_from)
        longest = 0
        for stop in self._stop:
            start = len(self._text) - min(len(stop) - 1, unread)
            while (start := self._text.find(stop[0], start)) >= 0 and len(self._text) - start > longest:
                if stop.startswith(self._text[start:]):
                    longest = len(self._text) - start
                start += 1
        return longest

    def _release(self, end: int) -> str:
        text = self._text[self._released : end]
        self._released = max(self._released, end)
        return text
