"""The outputs of requests: their tokens, which are read as spans of text, and SGLang's ``meta_info``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.messages import Finish, TextChunk, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Span:
    """A span of an output's text: the text of one token, or of several tokens whose borders in the text are
    not known."""

    text: str
    ids: tuple[int, ...]
    forced: int | None
    """Number of tokens in the span that were forced, because the grammar allowed no other token; None if the
    backend does not report forced tokens."""
    logprob: float | None = None
    """Log-probability of a single token (natural logarithm); None for several tokens, or if log-probabilities
    were not requested."""
    top: tuple[tuple[str, float], ...] = ()
    """The most likely tokens in the place of the span's token and their log-probabilities, best first."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The output of one request, chunk by chunk."""

    ids: tuple[int, ...]
    counts: array[int]
    chars: array[int]
    forced: array[int]
    """Indices into `ids` of the forced tokens."""
    forced_told: bool
    """Whether the backend reports the forced tokens."""
    logprobs: tuple[TokenLogprobs, ...]

    def spans(self, text: str, known: Mapping[int, str]) -> Iterator[Span]:
        """Yield the spans of the output `text`. With `known` (token id → text), chunks of several tokens are
        split into single tokens where possible."""
        places = set(self.forced)
        scores = [score for run in self.logprobs for score in scores_of(run)]
        end = char = 0
        for count, length in zip(self.counts, self.chars, strict=True):
            start, end = end, end + count
            part, char = text[char : char + length], char + length
            if not count and not part:
                continue
            ids = self.ids[start:end]
            texts = _texts(part, ids, scores[start:end] if end <= len(scores) else (), known)
            if texts is None:
                within = sum(place in places for place in range(start, end))
                yield Span(part, ids, within if self.forced_told else None)
                continue
            for place, (token, piece) in enumerate(zip(ids, texts, strict=True), start):
                forced = int(place in places) if self.forced_told else None
                _, logprob, top = scores[place] if end <= len(scores) else ("", None, ())
                yield Span(piece, (token,), forced, logprob, top)


Score = tuple[str, float | None, tuple[tuple[str, float], ...]]
"""The text of a token, the token's log-probability, and the most likely tokens in its place with their
log-probabilities."""


def tokens_of(chunks: Sequence[TextChunk]) -> Tokens:
    """The tokens of `chunks`."""
    forced, start, total = array("I"), 0, 0
    counts, chars = array("I"), array("I")
    for chunk in chunks:
        for ids, characters in chunk.pieces or ((len(chunk.ids), len(chunk.text)),):
            counts.append(ids)
            chars.append(characters)
        forced.extend(start + place for place in chunk.forced)
        start += len(chunk.ids)
        total = chunk.usage.forced_tokens if chunk.usage is not None else total
    return Tokens(
        ids=tuple([token for chunk in chunks for token in chunk.ids]),
        counts=counts,
        chars=chars,
        forced=forced,
        forced_told=len(forced) >= total,
        logprobs=tuple([chunk.logprobs for chunk in chunks if chunk.logprobs is not None]),
    )


def scores_of(found: TokenLogprobs) -> list[Score]:
    """The scores of the tokens in `found`, one for each token."""
    texts = found.texts or ("",) * len(found.ids)
    tops: list[tuple[tuple[str, float], ...]] = [()] * len(found.ids)
    if found.top:
        names = found.top_texts or [[f"#{token}" for token, _ in row] for row in found.top]
        tops = [
            tuple((name, value) for name, (_, value) in zip(row_names, row, strict=True))
            for row_names, row in zip(names, found.top, strict=True)
        ]
    return list(zip(texts, found.logprobs, tops, strict=True))


def _texts(
    part: str, ids: Sequence[int], scores: Sequence[Score], known: Mapping[int, str]
) -> list[str] | None:
    """The texts of the tokens `ids`, whose concatenation is `part`; None if the texts are not known."""
    if len(ids) == 1:
        return [part]
    for texts in ([text for text, _, _ in scores], [known.get(token, "") for token in ids]):
        if len(texts) == len(ids) and all(texts) and "".join(texts) == part:
            return texts
    return None


USAGE_FIELDS = Usage.__struct_fields__
SUMMED = tuple(name for name in USAGE_FIELDS if name != "evicted_by")
SPELLINGS = {"retractions": "num_retractions"}
"""Field of `Usage` → SGLang's name of the field, for fields that SGLang names differently."""


def meta_info(
    rid: str,
    usage: Usage,
    finish: Finish | None,
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: TokenLogprobs | None = None,
) -> dict[str, Any]:
    """SGLang's ``meta_info`` of one generation, and all fields of `Usage`."""
    meta: dict[str, Any] = {"id": rid}
    meta.update((SPELLINGS.get(name, name), getattr(usage, name)) for name in USAGE_FIELDS)
    meta["finish_reason"] = None
    if finish is not None:
        meta["finish_reason"] = {"type": finish.reason}
        if finish.matched is not None:
            meta["finish_reason"]["matched"] = finish.matched
        if finish.reason == "length":
            meta["finish_reason"]["length"] = usage.completion_tokens
    for side, found in (("input", prompt_logprobs), ("output", logprobs)):
        if found is not None:
            meta[f"{side}_token_logprobs"] = token_logprobs(found)
            if found.top:
                meta[f"{side}_top_logprobs"] = _top_logprobs(found)
    return meta


def token_logprobs(found: TokenLogprobs) -> list[list[Any]]:
    """The log-probabilities in SGLang's form: ``[[logprob, id, text], …]``."""
    texts = found.texts or (None,) * len(found.ids)
    return [list(row) for row in zip(found.logprobs, found.ids, texts, strict=True)]


def _top_logprobs(found: TokenLogprobs) -> list[list[list[Any]]]:
    texts: Sequence[Sequence[str | None]] = found.top_texts or [(None,) * len(row) for row in found.top]
    return [
        [[logprob, token, text] for (token, logprob), text in zip(row, names, strict=True)]
        for row, names in zip(found.top, texts, strict=True)
    ]


def add_usage(first: Usage, second: Usage) -> Usage:
    """The sum of two usages, field by field. Times are added even if the requests were concurrent.
    `evicted_by` is taken from the usage with more evicted tokens."""
    sums = {name: getattr(first, name) + getattr(second, name) for name in SUMMED}
    larger = first if first.evicted_tokens >= second.evicted_tokens else second
    return Usage(**sums, evicted_by=larger.evicted_by)
