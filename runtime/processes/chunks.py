"""Joins consecutive chunks of one request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.messages import TextChunk, concatenated


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """One chunk in place of `chunks`, with the finish and the usage of the last."""
    if len(chunks) == 1:
        return chunks[0]
    forced: list[int] = []
    pieces: list[tuple[int, int]] = []
    controls: list[int] = []
    count = characters = 0
    for chunk in chunks:
        forced += [count + index for index in chunk.forced]
        pieces += chunk.pieces or ((len(chunk.ids), len(chunk.text)),)
        controls += [characters + place for place in chunk.controls]
        count += len(chunk.ids)
        characters += len(chunk.text)
    return msgspec.structs.replace(
        chunks[-1],
        text="".join([chunk.text for chunk in chunks]),
        ids=tuple([token for chunk in chunks for token in chunk.ids]),
        forced=tuple(forced),
        pieces=tuple(pieces),
        controls=tuple(controls),
        logprobs=concatenated([chunk.logprobs for chunk in chunks]),
        prompt_logprobs=concatenated([chunk.prompt_logprobs for chunk in chunks]),
        replaced=chunks[0].replaced,
        enforcement=chunks[0].enforcement,
    )
