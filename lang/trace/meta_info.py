"""The dictionary with SGLang's ``meta_info`` of an output, as `get_meta_info` returns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.messages import Finish, TokenLogprobs, Usage

USAGE_FIELDS = Usage.__struct_fields__
SUMMED = tuple(name for name in USAGE_FIELDS if name != "evicted_by")
SPELLINGS = {"retractions": "num_retractions"}
"""Field of `Usage` → SGLang's name for it, for fields with different names."""


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
    `evicted_by` is taken from the usage with more evicted tokens.
    """
    sums = {name: getattr(first, name) + getattr(second, name) for name in SUMMED}
    larger = first if first.evicted_tokens >= second.evicted_tokens else second
    return Usage(**sums, evicted_by=larger.evicted_by)
