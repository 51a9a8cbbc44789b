"""Prompts, sampling options and constraints, which all dialects share.

Types, defaults and ranges are those of `ramify.sampling_params` and `ramify.constraint`. A dialect adds only
its own names for them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest
from ramify.messages import Enforcement, ProgramHint, Segment, TextChunk
from ramify.priority import checked_priority
from ramify.runtime.server.fields import Fields
from ramify.sampling_params import SamplingParams
from ramify.text import quoted

_KINDS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
_KINDS["stop"] = str | tuple[str, ...]

PRIORITY_HEADER = "x-ramify-priority"

_OWN = ("n", "max_tokens", "logprobs", "prompt_logprobs_start")
COMMON = {name: name for name in _KINDS if name not in _OWN}
"""Sampling options that every dialect takes under our names, including new fields of `SamplingParams`."""

OPENAI_SPELLING = COMMON | {"repeat_penalty": "repetition_penalty"}
"""`COMMON`, with the spelling of llama.cpp and Ollama."""

UNLIMITED = -1
"""The value of max_tokens that llama.cpp and LM Studio read as "as many as fit into the context"."""

_ALL_TOKENS = -1
"""The value of top_k that means "no top-k" in vLLM and SGLang."""


def take_sampling(
    fields: Fields,
    spelling: Mapping[str, str],
    *,
    unset: Mapping[str, Sequence[int]] | None = None,
    least_tokens: int = 0,
    unlimited: str | None = "Leave it out for as many as fit into the context.",
    **values: Any,
) -> SamplingParams:
    """Take the sampling options from `fields`, and check them.

    `spelling` maps the dialect's name of an option to ours. `values` are further options, under our names. An
    error names the field as the client spelled it. `unset` maps the dialect's name of an option to values
    that stand for the option left out. `least_tokens` is the smallest allowed max_tokens; for a
    chat it is 1, since an empty answer is useless. A max_tokens of `UNLIMITED` is refused with the remedy
    `unlimited`; with None it means no limit.
    """
    spelled: dict[str, str] = {}
    for theirs, ours in spelling.items():
        if unset and theirs in unset and fields.take(theirs, Any) in unset[theirs]:
            continue
        value = fields.take(theirs, _KINDS[ours])
        if value is None:
            continue
        if ours in spelled:
            both = f"{spelled[ours]} and {fields.path(theirs)}"
            raise InvalidRequest(f"{both} mean the same; give one.", field=fields.path(theirs))
        spelled[ours] = fields.path(theirs)
        values[ours] = value
    if unlimited is None and values.get("max_tokens") == UNLIMITED:
        values["max_tokens"] = None
    limit = values.get("max_tokens")
    if limit is not None and limit < least_tokens:
        field = spelled.get("max_tokens", "max_tokens")
        raise InvalidRequest(
            f"{field} is {limit}; it must be {least_tokens} or more.",
            field=field,
            remedy=unlimited if limit else "Use /v1/completions to compute a prompt alone.",
        )
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if values.get("top_k") == _ALL_TOKENS:
        values["top_k"] = 0
    return check_sampling(SamplingParams(**values), spelled)


def check_sampling(sampling: SamplingParams, spelled: Mapping[str, str]) -> SamplingParams:
    """Call `sampling.check()`, with the client's names of fields in its errors."""
    try:
        return sampling.check()
    except InvalidRequest as error:
        ours = error.field or ""
        theirs = spelled.get(ours, ours)
        message = error.message.replace(ours, theirs, 1)
        raise InvalidRequest(message, field=theirs, remedy=error.remedy) from None


def take_priority(fields: Fields, default: int = 0) -> int:
    """The value of SGLang's field ``priority``; if it is not given, of `PRIORITY_HEADER`, or `default`."""
    given: int | None = fields.take("priority", int)
    if given is not None:
        return checked_priority(given, fields.path("priority"))
    header = fields.body.headers.get(PRIORITY_HEADER)
    if header is None:
        return default
    if re.fullmatch(r"-?\d{1,4}", header) is None:
        raise InvalidRequest(
            f"{PRIORITY_HEADER} is {quoted(header)}; it must be a whole number.",
            field=PRIORITY_HEADER,
        )
    return checked_priority(int(header), PRIORITY_HEADER)


BESIDE = ("whitespace", "any_order", "strict", "definitions")
"""Fields beside a JSON schema: options of its enforcement, and the schemas that its references point to."""

FieldConstraint = tuple[str, Constraint]
"""(path of the field, the constraint in it)."""

JSON_TEXT = object()
"""A type for `Makers`: a field of this type is taken by `Fields.take_json`."""

Makers = Mapping[str, tuple[Any, Callable[[Any], Constraint]]]
"""Field → (its type, function that makes a constraint of its value)."""


def take_constraints(fields: Fields, makers: Makers) -> list[FieldConstraint]:
    """Take all constraints that are given in the fields of `makers`."""
    found = []
    for field, (kind, make) in makers.items():
        value = fields.take_json(field) if kind is JSON_TEXT else fields.take(field, kind)
        if value is not None:
            path = fields.path(field)
            found.append((path, make_constraint(path, make, value)))
    return found


def take_definitions(fields: Fields) -> dict[str, str] | None:
    """The value of the field ``definitions``: URI → JSON text of a schema; None if not given."""
    given: dict[str, msgspec.Raw] | None = fields.take("definitions", dict[str, msgspec.Raw])
    return None if given is None else {uri: bytes(raw).decode() for uri, raw in given.items()}


def only_constraint(found: Sequence[FieldConstraint]) -> FieldConstraint | None:
    """The only entry of `found`; None if there is none. Raises `InvalidRequest` if there are several."""
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise InvalidRequest(f"{first} and {second} are both given; give one constraint.", field=second)
    return found[0] if found else None


def make_constraint(path: str, make: Callable[[Any], Constraint], value: Any) -> Constraint:
    """Return `make(value)`. Errors name the field `path`, or the wrong field of `BESIDE` next to `path`."""
    try:
        return make(value)
    except InvalidConstraint as error:
        if error.field in BESIDE and error.message.startswith(error.field):
            error.message = error.message.removeprefix(error.field)
            error.field = f"{path.rpartition('.')[0]}.{error.field}".lstrip(".")
            error.message = error.field + error.message
        else:
            error.field = path
            error.message = f"{path}: {error.message}"
        raise


def take_prompts(fields: Fields, field: str, vocab_size: int) -> tuple[list[Segment], bool]:
    """(prompts in `field`, whether `field` holds a list of prompts).

    A prompt is a string or a list of token ids. Raises `InvalidRequest` if `field` is missing, empty or of
    another form.
    """
    raw = fields.take(field, msgspec.Raw)
    path = fields.path(field)
    if raw is None:
        raise InvalidRequest(f"{path} is missing.", field=path)
    again = Fields({field: raw})
    prompts: list[Segment]
    match _nesting(raw):
        case "string":
            prompts, batch = [again.take(field, str)], False
        case "list of strings":
            prompts, batch = again.take(field, list[str]), True
        case "list of ids":
            prompts, batch = [again.take(field, tuple[int, ...])], False
        case "list of lists":
            prompts, batch = again.take(field, list[tuple[int, ...]]), True
        case "empty list":
            raise InvalidRequest(f"{path} is empty.", field=path)
        case _:
            raise InvalidRequest(
                f"{path} must be a string, a list of strings, a list of token ids, or a list of such lists.",
                field=path,
            )
    for index, prompt in enumerate(prompts):
        check_segments((prompt,), f"{path}[{index}]" if batch else path, vocab_size)
    return prompts, batch


def check_segments(prompt: tuple[Segment, ...], path: str, vocab_size: int) -> None:
    """Raise `InvalidRequest` for an empty prompt or a token id that the model does not have."""
    if not any(prompt):
        raise InvalidRequest(f"{path} is empty.", field=path)
    for segment in prompt:
        if isinstance(segment, str) or not segment:
            continue
        for worst in (min(segment), max(segment)):
            if not 0 <= worst < vocab_size:
                raise InvalidRequest(
                    f"{path} has token id {worst}; the vocabulary is 0 … {vocab_size - 1}.", field=path
                )


def check_hint(hint: ProgramHint, path: str) -> None:
    """Raise `InvalidRequest` for a hint with invalid values. `path` is the full name of the hint's field."""
    if not hint.program:
        raise InvalidRequest(f"{path}.program is missing.", field=f"{path}.program")
    ids: set[str] = set()
    for index, limit in enumerate(hint.limits):
        field = f"{path}.limits[{index}].id"
        if not limit.id:
            raise InvalidRequest(f"{field} is empty.", field=field)
        if limit.id in ids:
            raise InvalidRequest(f"{field} is that of an earlier limit.", field=field)
        ids.add(limit.id)
    least = min((number for part in hint.parts for number in part), default=0)
    for name, value in (("lease_s", hint.lease_s), ("calls_left", hint.calls_left or 0), ("parts", least)):
        if value < 0:
            raise InvalidRequest(f"{path}.{name} is {value}; it must be 0 or more.", field=f"{path}.{name}")


def _nesting(raw: msgspec.Raw) -> str:
    text = bytes(memoryview(raw)[:64]).lstrip()
    if text.startswith(b'"'):
        return "string"
    if not text.startswith(b"["):
        return "other"
    inner = bytes(memoryview(raw)).lstrip()[1:].lstrip()[:1]
    return {b'"': "list of strings", b"[": "list of lists", b"]": "empty list"}.get(inner, "list of ids")


Explain = Callable[[InvalidConstraint], None]
"""Function that changes the field of an error to the field that the client wrote the constraint in."""

Tell = Callable[[Enforcement], Enforcement]
"""Function that rewrites an enforcement in the client's terms."""


def explain_by_field(path: str | None) -> Explain:
    """An `Explain` that sets the field of an error to `path`. With None the error keeps its field."""

    def explain(error: InvalidConstraint) -> None:
        error.field = path or error.field

    return explain


async def explained(
    stream: AsyncGenerator[TextChunk, None],
    explain: Explain,
    spelled: Mapping[str, str],
    tell: Tell | None = None,
) -> AsyncGenerator[TextChunk, None]:
    """The chunks of `stream`, in the client's terms. `explain` is applied to errors in constraints, and
    `tell` to the enforcement of the grammar. In other errors the field is replaced by means of `spelled`: our
    name → the client's."""
    async with aclosing(stream):
        try:
            async for chunk in stream:
                if chunk.enforcement is not None and tell is not None:
                    chunk = msgspec.structs.replace(chunk, enforcement=tell(chunk.enforcement))
                yield chunk
        except InvalidConstraint as error:
            explain(error)
            raise
        except InvalidRequest as error:
            error.field = spelled.get(error.field or "", error.field)
            raise


def split_choices(sampling: SamplingParams) -> list[SamplingParams]:
    """The options of each of the n choices, with n = 1. If a seed is given, choice i gets `seed + i`."""
    one = msgspec.structs.replace(sampling, n=1)
    if sampling.seed is None:
        return [one] * sampling.n
    return [
        msgspec.structs.replace(one, seed=sampling.seed + i if sampling.seed + i < 2**64 else i)
        for i in range(sampling.n)
    ]
