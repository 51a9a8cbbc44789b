"""Outputs as SGLang's ``meta_info`` dictionary: the form of `get_meta_info` and of native HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.messages import Finish, TokenLogprobs, Usage

USAGE_FIELDS = Usage.__struct_fields__
SUMMED = tuple(name for name in USAGE_FIELDS if name != "evicted_by")
SPELLINGS = {"retractions": "num_retractions"}
"""Fields of `Usage` → SGLang's names; the others are the same, or are not SGLang's."""


def meta_info(
    rid: str,
    usage: Usage,
    finish: Finish | None,
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: TokenLogprobs | None = None,
) -> dict[str, Any]:
    """SGLang's ``meta_info`` of one generation, with all fields of our `Usage` beside its own."""
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
    """``[[logprob, id, text], …]``"""
    texts = found.texts or (None,) * len(found.ids)
    return [list(row) for row in zip(found.logprobs, found.ids, texts, strict=True)]


def _top_logprobs(found: TokenLogprobs) -> list[list[list[Any]]]:
    texts: Sequence[Sequence[str | None]] = found.top_texts or [(None,) * len(row) for row in found.top]
    return [
        [[logprob, token, text] for (token, logprob), text in zip(row, names, strict=True)]
        for row, names in zip(found.top, texts, strict=True)
    ]


def add_logprobs(first: TokenLogprobs | None, second: TokenLogprobs | None) -> TokenLogprobs | None:
    """One run of tokens after another."""
    if first is None or second is None:
        return first or second
    return TokenLogprobs(
        **{name: getattr(first, name) + getattr(second, name) for name in TokenLogprobs.__struct_fields__}
    )


def add_usage(first: Usage, second: Usage) -> Usage:
    """The sum, field by field; times add up over concurrent requests as well.

    Of two that say who evicted something, the one stays that lost more.
    """
    sums = {name: getattr(first, name) + getattr(second, name) for name in SUMMED}
    loser = first if first.evicted_tokens >= second.evicted_tokens else second
    return Usage(**sums, evicted_by=loser.evicted_by)
