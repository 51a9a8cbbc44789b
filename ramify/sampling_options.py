"""Sampling options under the names that users give, mapped to fields of `SamplingParams`.

Accepted are the names of the fields, and the names of SGLang in `SPELLINGS` and `LOGPROB_OPTIONS`. Any other
name is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.priority import checked_priority
from ramify.sampling_params import SamplingParams
from ramify.spelling import nearest

DEFAULT_MAX_TOKENS = 128
"""``max_tokens`` of a `gen` if neither the `gen` nor the run sets it, as in SGLang."""

SPELLINGS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}

LOGPROB_OPTIONS = ("return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs")

OF_REQUESTS = ("priority", "lora")
"""Options of requests that are accepted beside sampling options."""

NAMES = frozenset(
    (*SamplingParams.__struct_fields__, *SPELLINGS, *LOGPROB_OPTIONS, *OF_REQUESTS),
)
"""The names of all known options."""


class SamplingKeywords(TypedDict, total=False):
    """Keyword arguments of functions that take sampling options, for type checkers. None leaves the option
    out.

    `max_tokens` is missing because `gen` and `call_tools` have it as a parameter, `n` because it decides the
    type of a `gen`'s value.
    """

    max_new_tokens: int | None
    min_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    sampling_seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs_start: int | None
    return_logprob: bool | None
    top_logprobs_num: int | None
    logprob_start_len: int | None
    return_text_in_logprobs: bool | None
    skip_special_tokens: bool | None
    token_healing: bool | None


ELSEWHERE = {
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "stop_regex": "There is no stop_regex; a regex as constraint ends by itself.",
    "response_format": "schema",
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "return_logprobs": "logprobs",
    "system_prompt": "Append rm.system(...) to the state.",
}
"""Names in SGLang, vLLM, OpenAI and transformers → Ramify's name, or a sentence with advice."""


def check_names(given: Iterable[str], *, of: str, beside: Iterable[str] = ()) -> None:
    """Raise `UnsupportedField` for a name that is not an option.

    `of`: name of the function that was given the options. `beside`: its other arguments, which may be
    suggested.
    """
    for name in given:
        if name not in NAMES:
            known = sorted({*NAMES, *beside})
            raise UnsupportedField(
                f"{of} has no option {name!r}.", field=name, remedy=nearest(name, known, ELSEWHERE)
            )


def read_options(given: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Convert `given` to fields of `SamplingParams` and the options in `OF_REQUESTS`, checked for type and
    range. Options that are None are left out.

    Raises `UnsupportedField` for an unknown name and `InvalidRequest` for a wrong value. `of` names the
    function that was given the options, for error messages.
    """
    check_names(given, of=of)
    options: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None and name not in LOGPROB_OPTIONS:
            options[SPELLINGS.get(name, name)] = value
    options.update(_logprob_fields(given))
    if isinstance(options.get("stop"), str):
        options["stop"] = (options["stop"],)
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if "priority" in options:
        checked_priority(options["priority"])
    if not isinstance(options.get("lora", ""), str):
        raise InvalidRequest(f"lora is {options['lora']!r}; it must be the name of an adapter.", field="lora")
    resolve_options(options)
    return options


def resolve_options(*layers: Mapping[str, Any]) -> SamplingParams:
    """Merge `layers` to the sampling options of one call.

    Later layers win; the options in `OF_REQUESTS` are left out.

    Raises `InvalidRequest` with the name of the wrong field.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    for name in OF_REQUESTS:
        merged.pop(name, None)
    try:
        return msgspec.convert(merged, SamplingParams, str_keys=True).check()
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`").partition("[")[0] if "$." in str(error) else None
        raise InvalidRequest(f"A sampling option is of the wrong type: {error}.", field=field) from None


def _logprob_fields(given: Mapping[str, Any]) -> dict[str, int]:
    """``logprobs`` and ``prompt_logprobs_start``, from SGLang's four log-probability options."""
    wanted, top, start, text = (given.get(name) for name in LOGPROB_OPTIONS)
    if text is False:
        raise UnsupportedField(
            "return_text_in_logprobs=False: log-probabilities always carry their text.",
            field="return_text_in_logprobs",
        )
    if not wanted:
        for name in ("top_logprobs_num", "logprob_start_len"):
            if given.get(name) not in (None, 0, -1):
                raise InvalidRequest(f"{name} needs return_logprob=True.", field=name)
        return {}
    fields = {"logprobs": top or 0}
    if start is not None and start != -1:
        fields["prompt_logprobs_start"] = start
    return fields
