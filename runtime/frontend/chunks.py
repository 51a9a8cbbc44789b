"""Consecutive chunks of one request, put together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.messages import TextChunk, TokenLogprobs


def joined(chunks: Sequence[TextChunk]) -> TextChunk:
    """All of them as one, which ends as the last does."""
    if len(chunks) == 1:
        return chunks[0]
    forced: list[int] = []
    pieces: list[tuple[int, int]] = []
    before = 0
    for chunk in chunks:
        forced += [before + place for place in chunk.forced]
        pieces += chunk.pieces or ((len(chunk.ids), len(chunk.text)),)
        before += len(chunk.ids)
    return msgspec.structs.replace(
        chunks[-1],
        text="".join([chunk.text for chunk in chunks]),
        ids=tuple([token for chunk in chunks for token in chunk.ids]),
        forced=tuple(forced),
        pieces=tuple(pieces),
        logprobs=concatenated([chunk.logprobs for chunk in chunks]),
        prompt_logprobs=concatenated([chunk.prompt_logprobs for chunk in chunks]),
        unenforced=chunks[0].unenforced,
    )


def concatenated(parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    """One run of tokens from consecutive ones; None where there is none."""
    there = [part for part in parts if part is not None]
    if len(there) <= 1:
        return there[0] if there else None
    return TokenLogprobs(
        **{
            field: tuple([entry for part in there for entry in getattr(part, field)])
            for field in TokenLogprobs.__struct_fields__
        }
    )
