"""What a chat request says of reasoning: whether, for how long, and how it is answered.

``reasoning`` {enabled, effort, max_tokens, exclude} is spelled as OpenRouter has it, effort as OpenAI's
Responses API has it as well; `start` and `end` are ours.
Also taken: ``chat_template_kwargs`` and `include_reasoning` (vLLM, SGLang), `separate_reasoning` (SGLang),
`thinking_token_budget` (vLLM), `enable_thinking` and `thinking_budget` (Qwen), `reasoning_effort` (OpenAI)
where the chat template reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatFormat, Preamble
from ramify.runtime.server.fields import Fields

START, END = "<think>", "</think>"
"""As DeepSeek R1, Qwen 3 and most models since write it."""

_NO_SUMMARY = "Leave it out: the reasoning itself is answered."
_UNSUPPORTED = {"summary": _NO_SUMMARY, "generate_summary": _NO_SUMMARY, "context": "", "mode": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningUse:
    """`preamble` is None where the turn is not made to reason; `apart` and `shown` say how the reasoning is
    answered; `template_kwargs` is JSON text."""

    preamble: Preamble | None
    apart: bool
    shown: bool
    template_kwargs: str


class _ReasoningSwitch:
    """Whether to reason, as said by several fields, which must not contradict each other."""

    def __init__(self) -> None:
        self.wanted: bool | None = None
        self._field = ""

    def say(self, field: str, wanted: bool) -> None:
        if self.wanted is not None and self.wanted != wanted:
            raise InvalidRequest(
                f"{self._field} and {field} contradict each other: one asks for reasoning, one for none.",
                field=field,
            )
        self.wanted, self._field = wanted, field


def take_reasoning(fields: Fields, chat_format: ChatFormat) -> ReasoningUse:
    """What the request says of reasoning, and all that it gives to the chat template."""
    wish = _ReasoningSwitch()
    variables = _take_variables(fields, chat_format, wish)
    start, end, limit = START, END, None
    shown = True
    own = fields.take_object("reasoning")
    if own is not None:
        effort: str | None = own.take("effort", str)
        wish.say("reasoning", own.take("enabled", bool, effort != "none"))
        _say_effort(own.path("effort"), effort, chat_format, wish, variables)
        start, end = own.take("start", str, START), own.take("end", str, END)
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
            wish.say(field, True)
    apart: bool | None = fields.take("separate_reasoning", bool)
    if apart:
        wish.say("separate_reasoning", True)
    shown = fields.take("include_reasoning", bool, True) and shown
    if not fields.take("stream_reasoning", bool, True):
        raise UnsupportedField("stream_reasoning: false is not supported.", field="stream_reasoning")
    if "enable_thinking" in chat_format.variables and wish.wanted is not None:
        variables["enable_thinking"] = wish.wanted
    return ReasoningUse(
        preamble=Preamble(start=start, end=end, max_tokens=limit) if wish.wanted else None,
        apart=apart is not False,
        shown=shown,
        template_kwargs=msgspec.json.encode(variables).decode() if variables else "",
    )


def _take_variables(fields: Fields, chat_format: ChatFormat, wish: _ReasoningSwitch) -> dict[str, Any]:
    """What goes to the template, but for enable_thinking."""
    variables: dict[str, Any] = fields.take("chat_template_kwargs", dict[str, Any], {})
    for field, value in variables.items():
        path = f"chat_template_kwargs.{field}"
        if field == "enable_thinking" and isinstance(value, bool):
            wish.say(path, value)
        elif field not in chat_format.variables:
            known = ", ".join(chat_format.variables)
            raise UnsupportedField(
                f"This model's chat template does not read {field}.",
                field=path,
                remedy=f"It reads {known}." if known else "It reads no variables.",
            )
    variables.pop("enable_thinking", None)
    thinking: bool | None = fields.take("enable_thinking", bool)
    if thinking is not None:
        wish.say("enable_thinking", thinking)
    _say_effort("reasoning_effort", fields.take("reasoning_effort", str), chat_format, wish, variables)
    return variables


def _say_effort(
    field: str, effort: str | None, chat_format: ChatFormat, wish: _ReasoningSwitch, variables: dict[str, Any]
) -> None:
    """Let the template know of the `effort` in `field`."""
    if effort == "none":
        wish.say(field, False)
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
