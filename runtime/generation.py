"""The output of one generation, put together from its chunks."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.messages import ChoiceScore, Enforcement, Finish, TextChunk, TokenLogprobs, Usage, Violation
from ramify.questions import DecisionScores


class GenerationResult:
    """The output of one generation so far."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.pieces: list[tuple[int, int]] = []
        """The concatenated `TextChunk.pieces` of all chunks: (ids, characters) of each piece of `text`."""
        self.controls: list[int] = []
        """Positions in `text` at which control tokens begin (`TextChunk.controls`)."""
        self.forced: list[int] = []
        """Indices in `ids` of the forced tokens."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.choices: tuple[ChoiceScore, ...] = ()
        self.decisions: DecisionScores | None = None
        self.embedding = b""
        self.usage = Usage()
        self.finish: Finish | None = None
        self.kept_ids = 0
        self.tail = ""
        self.enforcement: Enforcement | None = None
        self.violations: tuple[Violation, ...] | None = None

    def add_chunk(self, chunk: TextChunk) -> None:
        self.controls.extend(len(self.text) + place for place in chunk.controls)
        self.text += chunk.text
        self.forced.extend(len(self.ids) + index for index in chunk.forced)
        self.ids.extend(chunk.ids)
        self.pieces += pieces_of(chunk)
        if chunk.logprobs is not None:
            self.logprobs.append(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs.append(chunk.prompt_logprobs)
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.enforcement = chunk.enforcement or self.enforcement
        if chunk.finish is not None:
            self.finish, self.kept_ids, self.tail = chunk.finish, chunk.kept_ids, chunk.tail
            self.violations, self.choices = chunk.violations, chunk.choices
            self.decisions, self.embedding = chunk.decisions, chunk.embedding


def pieces_of(chunk: TextChunk) -> Sequence[tuple[int, int]]:
    return chunk.pieces or ((len(chunk.ids), len(chunk.text)),)


def ids_in(pieces: Sequence[tuple[int, int]], characters: int) -> int:
    """The number of ids in the first `characters` characters of a text. `pieces` has (ids, characters) for
    each piece of the text."""
    count = 0
    for ids, length in pieces:
        if length > characters:
            # The borders of tokens within a piece are unknown.
            return count + round(ids * characters / length)
        count += ids
        characters -= length
    return count
