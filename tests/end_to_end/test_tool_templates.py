"""Tool calls through the templates of model families, whole engine core, on a tiny random model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.end_to_end.served import serve
from tests.model.tool_templates import LLAMA3, MISTRAL, QWEN
from tests.runtime.tiny import write_model, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRIGGER_ID = 260
"""The id of [TOOL_CALLS], the special token after those that every tiny model has."""

LIGHT: Any = {
    "type": "function",
    "function": {
        "name": "light",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = {
    "model": "default",
    "messages": [{"role": "user", "content": "Light!"}],
    "tools": [LIGHT],
    "temperature": 0,
    "max_tokens": 120,
}


@contextlib.contextmanager
def client_of(folder: Path, template: str) -> Iterator[openai.OpenAI]:
    """A server of a tiny model with this template; [TOOL_CALLS] is one of its control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, context_length=2048)
    write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = tokenizer["added_tokens"][-1] | {"id": TRIGGER_ID, "content": "[TOOL_CALLS]"}
    tokenizer["added_tokens"].append(special)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    with (
        serve("--model", str(folder), "--dtype", "float32", "--num-pages", "256") as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def called(choice: Any) -> list[Any]:
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.function.name == "light"
    return [json.loads(call.function.arguments) for call in choice.message.tool_calls]


@pytest.mark.parametrize(
    ("template", "id_length"),
    [
        pytest.param(QWEN, 29, id="hermes"),
        pytest.param(LLAMA3, 29, id="llama3", marks=pytest.mark.long),
        pytest.param(MISTRAL, 9, id="mistral", marks=pytest.mark.long),
    ],
)
def test_calls_and_results(tmp_path: Path, template: str, id_length: int) -> None:
    with client_of(tmp_path / "model", template) as client:
        (choice,) = client.chat.completions.create(
            **ASK, tool_choice="required", parallel_tool_calls=False
        ).choices
        (arguments,) = called(choice)
        assert arguments in ({"on": True}, {"on": False})
        (call,) = choice.message.tool_calls or []
        assert len(call.id) == id_length
        messages = [
            *ASK["messages"],
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
            *ASK["messages"],
        ]
        again = client.chat.completions.create(**ASK | {"messages": messages, "max_tokens": 4})
        first = client.chat.completions.create(**ASK | {"max_tokens": 4})
        assert again.usage is not None
        assert first.usage is not None
        assert again.usage.prompt_tokens > first.usage.prompt_tokens + 30, "the call and its result"


def test_a_control_token_as_the_trigger(tmp_path: Path) -> None:
    """Free text may end in [TOOL_CALLS] the token, and then only calls follow; the token never shows."""
    with client_of(tmp_path / "model", MISTRAL) as client:
        pushed = client.chat.completions.create(
            **ASK | {"logit_bias": {str(TRIGGER_ID): 100}, "parallel_tool_calls": False}
        )
        assert called(pushed.choices[0])
        assert pushed.choices[0].message.content is None
        text = client.chat.completions.create(
            **ASK | {"logit_bias": {str(TRIGGER_ID): -100}, "max_tokens": 20}
        )
        assert text.choices[0].message.tool_calls is None
        stream = client.chat.completions.create(**ASK, tool_choice="required", stream=True)
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
        assert any(delta.tool_calls for delta in deltas)
        assert not "".join(delta.content or "" for delta in deltas)
