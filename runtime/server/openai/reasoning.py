"""Parses the reasoning options of a chat request: on or off, the token budget, and how reasoning is returned.

The fields are OpenRouter's, OpenAI's, vLLM's, SGLang's and Qwen's. `start` and `end`, the texts around the
reasoning, are Ramify's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Preamble
from ramify.model_info import ChatFormat, ThinkingFormat
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.tables.openai import REASONING_OBJECT
from ramify.text import shortened

START, END = "<think>", "</think>"
"""The marks of DeepSeek R1, Qwen 3 and most later models, used for templates without marks of their own."""

BOUND = 1024
"""Default reasoning budget, in tokens, for a model that is not a reasoning model: such a model seldom writes
the end mark. `gen(thinking=True)` has the same default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningUse:
    """The reasoning that a request asks for."""

    preamble: Preamble | None
    """The preamble (free text before the answer) for the reasoning; None if no reasoning is asked for."""
    wanted: bool | None
    """Whether the request asks for reasoning; None if it leaves that to the model."""
    apart: bool
    """Whether reasoning is returned in a field of its own, not in the content."""
    shown: bool
    """Whether reasoning is returned at all."""
    end: str | None
    """The text that ends the reasoning; None if reasoning is not separated from the content."""
    template_kwargs: str
    """JSON text of the variables for the chat template; "" if there are none."""


class ReasoningSwitch:
    """The decision whether to reason. Fields that set it must agree; other fields only suggest reasoning."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self.thinks = chat_format.thinking is not None or any(
            name in chat_format.variables for name in SWITCHES
        )
        """Whether the model is a reasoning model: its chat template has marks or a switch for reasoning."""
        self._said: bool | None = None
        self._path = ""
        self._asked: list[tuple[Fields, str]] = []
        self._suggested = False

    def set(self, fields: Fields, field: str, wanted: bool) -> None:
        """Record that `field` asks for reasoning or for none. Raises `InvalidRequest` if another field asks
        for the opposite."""
        path = fields.path(field)
        if self._said is not None and self._said != wanted:
            raise InvalidRequest(
                f"{self._path} and {path} contradict each other: one asks for reasoning, one for none.",
                field=path,
            )
        self._said, self._path = wanted, path
        if wanted:
            self._asked.append((fields, field))

    def suggest(self) -> None:
        self._suggested = True

    def wanted(self) -> bool | None:
        """The decision; None leaves it to the model's default.

        A model that is not a reasoning model would never end its reasoning, and the answer would suffer. Such
        a model reasons only if the request gives a budget or marks; a switch alone has no effect.
        """
        if self._said and not self.thinks and not self._suggested:
            for fields, field in self._asked:
                fields.ignore({field: None})
            return None
        return True if self._said is None and self._suggested else self._said


def take_reasoning(fields: Fields, chat_format: ChatFormat) -> ReasoningUse:
    """Take the reasoning options, and all variables for the chat template.

    A budget, or marks in the request, switch reasoning on. For a reasoning model ``enabled``,
    ``enable_thinking``, ``separate_reasoning`` and an effort other than none also switch it on. Otherwise the
    model's default holds.
    """
    switch = ReasoningSwitch(chat_format)
    variables = _take_variables(fields, chat_format, switch)
    marks = chat_format.thinking
    start, end = (START, END) if marks is None else (marks.start, marks.end)
    limit = None
    shown = True
    own = fields.take_object("reasoning")
    if own is not None:
        enabled: bool | None = own.take("enabled", bool)
        if enabled is not None:
            switch.set(own, "enabled", enabled)
        take_effort(own, "effort", chat_format, switch, variables)
        own_start, own_end = own.take("start", str), own.take("end", str)
        if own_end == "":
            raise InvalidRequest("reasoning.end is empty.", field="reasoning.end")
        start, end = start if own_start is None else own_start, own_end or end
        limit = take_limit(own, "max_tokens")
        if (own_start, own_end, limit) != (None, None, None):
            switch.suggest()
        shown = not own.take("exclude", bool, False)
        own.finish(REASONING_OBJECT)
    for field in ("thinking_token_budget", "thinking_budget"):
        budget = take_limit(fields, field)
        if budget is not None:
            if limit is not None:
                raise InvalidRequest(f"{field} and another budget are both given; give one.", field=field)
            limit = budget
            switch.suggest()
    apart: bool | None = fields.take("separate_reasoning", bool)
    if apart and switch.thinks:
        switch.suggest()
    shown = fields.take("include_reasoning", bool, True) and shown
    if not fields.take("stream_reasoning", bool, True):
        raise UnsupportedField("stream_reasoning: false is not supported.", field="stream_reasoning")
    wanted = switch.wanted()
    if wanted is not None:
        known = [name for name in SWITCHES if name in chat_format.variables]
        variables |= dict.fromkeys(known, wanted)
    if limit is None and not switch.thinks:
        limit = BOUND
    return ReasoningUse(
        preamble=Preamble(start=start, end=end, max_tokens=limit, apart=True, counted=True)
        if wanted
        else None,
        wanted=wanted,
        apart=apart is not False,
        shown=shown,
        end=end if apart is not False and (wanted or (marks is not None and marks.channels)) else None,
        template_kwargs=msgspec.json.encode(variables).decode() if variables else "",
    )


def channel_preambles(
    marks: ThinkingFormat, reasoning: ReasoningUse, *, bound: bool, resumed: bool, whole: bool
) -> tuple[Preamble, ...]:
    """The preambles before the answer, for a model that reasons in a channel (`ThinkingFormat.channels`).

    bound : the answer has a constraint, which must not apply to the reasoning
    resumed : the constraint itself includes the transition from the reasoning to the answer
    whole : tokens are reserved for the answer, which must be complete; otherwise the turn may end within the
        reasoning
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


def _take_variables(fields: Fields, chat_format: ChatFormat, switch: ReasoningSwitch) -> dict[str, Any]:
    """The variables for the chat template, without the reasoning switches, which are passed to `switch`.
    Variables that are null are left out."""
    given: dict[str, Any] = fields.take("chat_template_kwargs", dict[str, Any], {})
    inner = fields.take_object("chat_template_kwargs")
    variables: dict[str, Any] = {}
    for field, value in given.items():
        path = f"chat_template_kwargs.{field}"
        if value is None:
            continue
        if field in SWITCHES:
            if not isinstance(value, bool):
                raise InvalidRequest(
                    f"{path} is {shortened(repr(value), 100)}; it must be true or false.", field=path
                )
            assert inner is not None
            switch.set(inner, field, value)
        elif field in chat_format.variables:
            variables[field] = value
        else:
            known = ", ".join(chat_format.variables)
            raise UnsupportedField(
                f"This model's chat template does not read {field}.",
                field=path,
                remedy=f"It reads {known}." if known else "It reads no variables.",
            )
    thinking: bool | None = fields.take("enable_thinking", bool)
    if thinking is not None:
        switch.set(fields, "enable_thinking", thinking)
    take_effort(fields, "reasoning_effort", chat_format, switch, variables)
    return variables


def take_effort(
    fields: Fields, field: str, chat_format: ChatFormat, switch: ReasoningSwitch, variables: dict[str, Any]
) -> None:
    """Take the effort in `field`, and pass it on to a chat template that reads it. The effort "none" switches
    reasoning off.

    Any other effort suggests reasoning for a reasoning model, and does not switch it on for other models.
    """
    effort: str | None = fields.take(field, str)
    if effort is None:
        return
    path = fields.path(field)
    if effort == "none":
        switch.set(fields, field, False)
        return
    if "reasoning_effort" in chat_format.variables:
        if variables.setdefault("reasoning_effort", effort) != effort:
            raise InvalidRequest(f"{path} and another effort are both given; give one.", field=path)
    elif not switch.thinks:
        fields.ignore({field: None})
    if switch.thinks:
        switch.suggest()


def take_limit(fields: Fields, field: str) -> int | None:
    limit: int | None = fields.take(field, int)
    if limit is not None and limit < 0:
        path = fields.path(field)
        raise InvalidRequest(f"{path} is {limit}; it must be 0 or more.", field=path)
    return limit
