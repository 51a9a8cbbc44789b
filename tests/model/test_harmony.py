"""gpt-oss's chat format: the pieces of its template, and the prompts made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify.messages import (
    ChatMessage,
    Generate,
    Preamble,
    ToolCall,
)
from ramify.model_info import ChatFormat, ThinkingFormat
from ramify.runtime.model.tokenizer.chat_format import chat_format, compose
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.tool_calls.grammar import Tool, tools_json
from tests.model.harmony import SPECIAL, write_harmony_tokenizer

FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
THOUGHT = ChatMessage(role="assistant", content="Four.", reasoning="2 + 2.")
ASKED = ChatMessage(role="user", content="2 + 2?")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("harmony")
    write_harmony_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def pieces(tokenizer: Any) -> ChatFormat:
    found = chat_format(tokenizer)
    assert found is not None
    return found


def prompt(tokenizer: Any, *chat: ChatMessage, **fields: Any) -> str:
    submit = PromptTokenizer(tokenizer).submit(Generate(rid="r", chat=chat, **fields))
    return str(tokenizer.decode(submit.ids))


def test_what_is_learned_of_the_template(pieces: ChatFormat) -> None:
    assert pieces.tool_format == "harmony"
    assert "reasoning_effort" in pieces.variables
    assert pieces.thinking == ThinkingFormat(
        start=ANALYSIS,
        end="<|end|>",
        gap="<|start|>assistant" + FINAL,
        default=FINAL,
        on=ANALYSIS,
        off=FINAL,
        past=FINAL,
        channels=True,
        kept="user",
    )


def test_turns_of_programs_are_answers_in_the_final_channel(tokenizer: Any, pieces: ChatFormat) -> None:
    turns = [("system", "Be kind."), ("user", "Hi."), ("assistant", "Ho."), ("user", "So?")]
    chat = tuple(ChatMessage(role=role, content=content) for role, content in turns)
    assert compose(pieces, turns, generation=True) == prompt(tokenizer, *chat) + FINAL


def test_thoughts_leave_the_prompt_as_the_template_says(tokenizer: Any) -> None:
    later = prompt(tokenizer, ASKED, THOUGHT, ASKED)
    assert "2 + 2." not in later
    assert f"<|start|>assistant{FINAL}Four.<|end|>" in later
    call = ToolCall(id="c", name="add", arguments='{"a": 2}')
    called = ChatMessage(role="assistant", content="", reasoning="I add.", tool_calls=(call,))
    result = ChatMessage(role="tool", content="4", tool_call_id="c", name="add")
    within = prompt(tokenizer, ASKED, called, result)
    assert f"<|start|>assistant{ANALYSIS}I add.<|end|><|start|>assistant to=functions.add" in within
    assert "I add." not in prompt(tokenizer, ASKED, called, result, THOUGHT, ASKED)


def test_effort_and_tools_are_the_templates(tokenizer: Any) -> None:
    tool = Tool(name="add", description="Add.", parameters='{"type":"object","properties":{}}')
    text = prompt(tokenizer, ASKED, tools=tools_json([tool]), template_kwargs='{"reasoning_effort": "high"}')
    assert "Reasoning: high" in text
    assert "type add = (_: {" in text


def test_a_forced_text_with_control_tokens_becomes_several(tokenizer: Any) -> None:
    gap = Preamble(end="<|start|>assistant" + FINAL, max_tokens=0, apart=True)
    request = Generate(rid="r", chat=(ASKED,), preambles=(gap,))
    submit = PromptTokenizer(tokenizer).submit(request)
    assert [one.end for one in submit.preambles] == [
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "<|message|>",
    ]
    assert all(one.max_tokens == 0 and one.apart for one in submit.preambles)
    assert submit.preambles[0].end_ids == (256 + SPECIAL.index("<|start|>"),)
    assert len(submit.preambles[1].end_ids) == len("assistant")


def test_channels_stay_in_the_text_of_an_answer(tokenizer: Any) -> None:
    submit = PromptTokenizer(tokenizer).submit
    assert not submit(Generate(rid="r", chat=(ASKED,))).sampling.skip_special_tokens
    assert submit(Generate(rid="r", prompt=("Hi",))).sampling.skip_special_tokens
