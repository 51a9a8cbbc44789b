"""Parses the reasoning options of a chat request: on or off, the token budget, and how reasoning is returned.

- ``reasoning`` {enabled, effort, max_tokens, exclude} is OpenRouter's; OpenAI's Responses API has the effort.
  Its `start` and `end`, the texts around the reasoning, are Ramify's own.
- ``chat_template_kwargs`` and `include_reasoning` are vLLM's and SGLang's, `separate_reasoning` SGLang's,
  `thinking_token_budget` vLLM's, `enable_thinking` and `thinking_budget` Qwen's.
- `reasoning_effort` is OpenAI's. It is taken where the chat template reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatFormat, Preamble, ThinkingFormat
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.server.fields import Fields

START, END = "<think>", "</think>"
"""The marks of DeepSeek R1, Qwen 3 and most later models: for templates that have none of their own."""

_NO_SUMMARY = "Leave it out: the reasoning itself is answered."
_UNSUPPORTED = {"summary": _NO_SUMMARY, "generate_summary": _NO_SUMMARY, "context": "", "mode": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningUse:
    """How a request reasons."""

    preamble: Preamble | None
    """None: the prompt does not ask for reasoning."""
    wanted: bool | None
    """Whether to reason, where the request says so."""
    apart: bool
    """Reasoning is returned in a field of its own, not in the content."""
    shown: bool
    """Reasoning is returned at all."""
    end: str | None
    """The text that ends the reasoning; None where reasoning is not told apart."""
    template_kwargs: str
    """JSON text of the variables for the chat template, or ""."""


class _ReasoningSwitch:
    """Whether to reason. Several fields may say so; they must agree."""

    def __init__(self) -> None:
        self.wanted: bool | None = None
        self._field = ""

    def set(self, field: str, wanted: bool) -> None:
        if self.wanted is not None and self.wanted != wanted:
            raise InvalidRequest(
                f"{self._field} and {field} contradict each other: one asks for reasoning, one for none.",
                field=field,
            )
        self.wanted, self._field = wanted, field


def take_reasoning(fields: Fields, chat_format: ChatFormat) -> ReasoningUse:
    """The reasoning options, and all variables for the chat template."""
    switch = _ReasoningSwitch()
    variables = _take_variables(fields, chat_format, switch)
    marks = chat_format.thinking
    start, end = (START, END) if marks is None else (marks.start, marks.end)
    limit = None
    shown = True
    own = fields.take_object("reasoning")
    if own is not None:
        effort: str | None = own.take("effort", str)
        switch.set("reasoning", own.take("enabled", bool, effort != "none"))
        _apply_effort(own.path("effort"), effort, chat_format, switch, variables)
        start, end = own.take("start", str, start), own.take("end", str, end)
        if not end:
            raise InvalidRequest("reasoning.end is empty.", field="reasoning.end")
        limit = _take_limit(own, "max_tokens")
        shown = not own.take("exclude", bool, False)
        own.refuse_rest(_UNSUPPORTED)
    for field in ("thinking_token_budget", "thinking_budget"):
        budget = _take_limit(fields, field)
        if budget is not None:
            if limit is not None:
                raise InvalidRequest(f"{field} and another budget are both given; give one.", field=field)
            limit = budget
            switch.set(field, True)
    apart: bool | None = fields.take("separate_reasoning", bool)
    if apart:
        switch.set("separate_reasoning", True)
    shown = fields.take("include_reasoning", bool, True) and shown
    if not fields.take("stream_reasoning", bool, True):
        raise UnsupportedField("stream_reasoning: false is not supported.", field="stream_reasoning")
    if switch.wanted is not None:
        known = [name for name in SWITCHES if name in chat_format.variables]
        variables |= dict.fromkeys(known, switch.wanted)
    return ReasoningUse(
        preamble=Preamble(start=start, end=end, max_tokens=limit, apart=True, counted=True)
        if switch.wanted
        else None,
        wanted=switch.wanted,
        apart=apart is not False,
        shown=shown,
        end=end if apart is not False and (switch.wanted or (marks is not None and marks.channels)) else None,
        template_kwargs=msgspec.json.encode(variables).decode() if variables else "",
    )


def channel_preambles(
    marks: ThinkingFormat, reasoning: ReasoningUse, *, bound: bool, resumed: bool, whole: bool
) -> tuple[Preamble, ...]:
    """What comes before the answer of a model that thinks in a channel (`ThinkingFormat.channels`).

    `bound`: the answer has a constraint, which must not begin in the reasoning. With `resumed` the constraint
    itself leads from the reasoning to the answer. `whole`: tokens are kept for the answer, which must be
    complete; otherwise the turn may end in the reasoning.
    """

    def written(text: str) -> Preamble:
        return Preamble(end=text, max_tokens=0, apart=True, counted=True)

    if reasoning.wanted is False:
        return () if resumed else (written(marks.off),)
    limit = None if reasoning.preamble is None else reasoning.preamble.max_tokens
    if limit is None and not bound:
        return ()  # the model chooses its channels
    thoughts = Preamble(end=marks.end, max_tokens=limit, apart=True, counted=True, optional=not whole)
    return (written(marks.on), thoughts) if resumed else (written(marks.on), thoughts, written(marks.gap))


def _take_variables(fields: Fields, chat_format: ChatFormat, switch: _ReasoningSwitch) -> dict[str, Any]:
    """The variables for the template, without those that switch thinking."""
    variables: dict[str, Any] = fields.take("chat_template_kwargs", dict[str, Any], {})
    for field, value in variables.items():
        path = f"chat_template_kwargs.{field}"
        if field in SWITCHES and isinstance(value, bool):
            switch.set(path, value)
        elif field not in chat_format.variables:
            known = ", ".join(chat_format.variables)
            raise UnsupportedField(
                f"This model's chat template does not read {field}.",
                field=path,
                remedy=f"It reads {known}." if known else "It reads no variables.",
            )
    for name in SWITCHES:
        variables.pop(name, None)
    thinking: bool | None = fields.take("enable_thinking", bool)
    if thinking is not None:
        switch.set("enable_thinking", thinking)
    _apply_effort("reasoning_effort", fields.take("reasoning_effort", str), chat_format, switch, variables)
    return variables


def _apply_effort(
    field: str,
    effort: str | None,
    chat_format: ChatFormat,
    switch: _ReasoningSwitch,
    variables: dict[str, Any],
) -> None:
    """Pass the `effort` in `field` to the template; "none" switches reasoning off."""
    if effort == "none":
        switch.set(field, False)
    elif effort is not None:
        if "reasoning_effort" not in chat_format.variables:
            raise UnsupportedField(
                "This model's chat template does not read reasoning_effort.",
                field=field,
                remedy="Use reasoning with max_tokens, or the effort none.",
            )
        if variables.setdefault("reasoning_effort", effort) != effort:
            raise InvalidRequest(f"{field} and another effort are both given; give one.", field=field)


def _take_limit(fields: Fields, field: str) -> int | None:
    limit: int | None = fields.take(field, int)
    if limit is not None and limit < 0:
        path = fields.path(field)
        raise InvalidRequest(f"{path} is {limit}; it must be 0 or more.", field=path)
    return limit
