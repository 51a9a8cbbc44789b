"""Marks of thinking that are learned from the templates of well-known families."""

from __future__ import annotations

import pytest

from ramify.model_info import ThinkingFormat
from ramify.runtime.model.tokenizer.chat_format import chat_format
from tests.lang.chat_templates import TEMPLATES, THINKING
from tests.model.test_chat_format import tokenizer

LEARNED = {
    "qwen3": ThinkingFormat(off="<think>\n\n</think>\n\n", kept="user"),
    "deepseek-r1": ThinkingFormat(default="<think>\n", off="<think>\n\n</think>\n\n"),
    "deepseek-v3.1": ThinkingFormat(
        start="<think>", gap="", default="</think>", on="<think>", off="</think>", past="</think>"
    ),
    "glm-4.5": ThinkingFormat(
        start="<think>",
        gap="\n",
        on="\n<think>",
        off="\n<think></think>\n",
        past="\n<think></think>\n",
        kept="user",
    ),
    "gpt-oss": ThinkingFormat(
        start="<|channel|>analysis<|message|>",
        end="<|end|>",
        gap="<|start|>assistant<|channel|>final<|message|>",
        default="<|channel|>final<|message|>",
        on="<|channel|>analysis<|message|>",
        off="<|channel|>final<|message|>",
        past="<|channel|>final<|message|>",
        channels=True,
    ),
    "keeping": ThinkingFormat(start="[THINK]", end="[/THINK]", gap="", on="[THINK]", kept="always"),
}


@pytest.mark.parametrize("name", THINKING)
def test_what_is_learned(name: str) -> None:
    found = chat_format(tokenizer(THINKING[name]))
    assert found.thinking == LEARNED[name]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in THINKING])
def test_templates_without_a_sign_of_thinking(name: str) -> None:
    found = chat_format(tokenizer(TEMPLATES[name]))
    assert found.thinking is None


def test_a_template_that_only_strips_thoughts() -> None:
    """Templates without a switch: their models begin thoughts by themselves."""
    source = TEMPLATES["smollm2"].replace("message['content']", "message['content'].split('</think>')[-1]")
    found = chat_format(tokenizer(source))
    assert found.thinking == ThinkingFormat()
