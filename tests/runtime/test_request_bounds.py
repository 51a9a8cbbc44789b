"""Requests are bounded in size before anything is computed from them, and chat templates in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.engine_messages import Submit
from ramify.errors import InvalidRequest, PromptTooLong
from ramify.messages import ChatMessage, Choices, Generate, Preamble, ProgramHint, ToolCall
from ramify.runtime.frontend.prompts import MAX_CHOICE_CHARACTERS, MAX_PARTS, MAX_PREAMBLES, check_prompt
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.sampling_params import MAX_STOP_CHARACTERS, MAX_TOKEN_IDS, SamplingParams

MOST_TOKENS = 10
LONG = "x" * 1281
"""A text with more characters than 10 tokens can have."""


def user(**fields: Any) -> ChatMessage:
    return ChatMessage(**({"role": "user", "content": "hi"} | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": (LONG,)},
        {"prompt": ("x" * 700, (1,), "x" * 700)},
        {"chat": (user(content=LONG),)},
        {"chat": (user(role=LONG),)},
        {"chat": (user(role="assistant", reasoning=LONG),)},
        {"chat": (user(role="tool", name=LONG),)},
        {"chat": (user(role="tool", tool_call_id=LONG),)},
        {"chat": (user(tool_calls=(ToolCall(id="1", name="f", arguments=LONG),)),)},
        {"chat": (user(),), "tools": LONG},
        {"chat": (user(),), "template_kwargs": LONG},
        {"prompt": ("a",), "preambles": (Preamble(start=LONG, end="b"),)},
        {"prompt": ("a",), "preambles": (Preamble(end=LONG),)},
        {"prompt": ((1,) * 12,)},
        {"prompt": ((1,) * 6, "a", (1,) * 6)},
    ],
)
def test_a_prompt_that_cannot_fit_is_not_tokenised(fields: dict[str, Any]) -> None:
    with pytest.raises(PromptTooLong, match="maximum context length is 11 tokens") as refused:
        check_prompt(Generate(rid="r", **fields), MOST_TOKENS)
    assert refused.value.remedy
    check_prompt(Generate(rid="r", **fields), 1000 * MOST_TOKENS)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("preambles", {"preambles": (Preamble(end="a"),) * (MAX_PREAMBLES + 1)}),
        ("hint.parts", {"hint": ProgramHint(program="p", parts=((0, 0),) * (MAX_PARTS + 1))}),
        ("choices.texts", {"choices": Choices(texts=("x" * MAX_CHOICE_CHARACTERS, "y"))}),
    ],
)
def test_what_is_tokenised_beside_the_prompt_is_bounded(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_prompt(Generate(rid="r", prompt=("a",), **fields), 100_000)
    assert refused.value.field == field
    assert refused.value.remedy


@pytest.mark.parametrize(
    "options",
    [
        {"stop": ("x" * (MAX_STOP_CHARACTERS + 1),)},
        {"stop": ("x" * MAX_STOP_CHARACTERS, "y")},
        {"stop": ("x",) * 65},
        {"stop_token_ids": tuple(range(MAX_TOKEN_IDS + 1))},
        {"logit_bias": dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1.0)},
    ],
)
def test_options_that_cost_with_every_token_are_bounded(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="at most") as refused:
        SamplingParams(**options).check()
    assert [refused.value.field] == list(options)
    assert len(str(refused.value)) < 200
    (field,) = options
    one_less = {key: options[field][key] for key in range(9)} if field == "logit_bias" else options[field][:1]
    SamplingParams(**{field: one_less if field != "stop" else ("x" * MAX_STOP_CHARACTERS,)}).check()


def test_a_chat_template_that_goes_on_for_ever_ends(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.chat_template = (
        "{% for a in range(n) %}{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}"
        "{% endfor %}{{ messages[0].content }}"
    )
    prompts = PromptTokenizer(tokenizer, template_s=0.05)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.05 s") as refused:
        prompts.submit(Generate(rid="r", chat=(user(),), template_kwargs=json.dumps({"n": 99_999})))
    assert refused.value.field == "messages"
    assert prompts.submit(Generate(rid="r", chat=(user(),), template_kwargs='{"n": 1}')).ids


@pytest.mark.parametrize("field", ["tools", "template_kwargs"])
def test_json_that_python_does_not_read_is_refused(tiny_folder: Path, field: str) -> None:
    prompts = PromptTokenizer(load_tokenizer(tiny_folder))
    for source in ('{"n": ' + "9" * 5000 + "}", '{"n": ' + "[" * 100_000):
        with pytest.raises(InvalidRequest, match="chat template refuses"):
            prompts.submit(Generate(rid="r", chat=(user(),), **{field: source}))  # type: ignore[arg-type]


def test_a_limit_can_be_cut_to_the_room_in_the_context() -> None:
    limits = Limits(context_length=20, vocab_size=9, eos_token_ids=(), kv_tokens=100)

    def submit(cut: bool, **fields: Any) -> Submit:
        sampling = SamplingParams(max_tokens=30)
        return Submit(rid="r", ids=(1,) * 15, sampling=sampling, cut_to_fit=cut, **fields)

    assert limits.max_tokens(submit(True)) == 5
    thought = Preamble(end="x", max_tokens=2, apart=True)
    assert limits.max_tokens(submit(True, preambles=(thought,))) == 5
    with pytest.raises(PromptTooLong):
        limits.max_tokens(submit(False))
