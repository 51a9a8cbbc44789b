"""A gpt-oss of random weights in a running scheduler: its turns keep to their channels where they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.grammar.compile.job import answer
from ramify.ring_messages import CompileGrammar
from ramify.runtime.model.tokenizer.chat_format import chat_format
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.model.tokenizer.vocabulary import load_vocabulary
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.runtime.scheduler.constraints.grammars import GrammarStore
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.openai.chat import CHAT_COMPLETIONS, Chat, take_chat
from ramify.runtime.server.openai.turn_parser import Turn, parse_turn
from ramify.sampling_params import SamplingParams
from tests.model.architectures import save_tiny, tiny_config
from tests.model.harmony import write_harmony_tokenizer
from tests.runtime.local import LocalScheduler, Result

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


class Local(LocalScheduler):
    """Chats with `model`, whose grammars compile at once."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.prompts = PromptTokenizer(self.tokenizer)
        self.vocabulary = load_vocabulary(folder, vocab_size=320, stop_ids=[256])
        self.jobs: list[CompileGrammar] = []
        store = GrammarStore(self.vocabulary, send=self.jobs.append, restart=lambda: None)
        super().__init__(folder, grammars=store)
        self.format = chat_format(self.tokenizer)

    def chat(self, **fields: Any) -> tuple[str, Turn]:
        raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
        parsed: Chat = take_chat(Fields(raw), self.format, CHAT_COMPLETIONS)
        rid = f"c{len(self.results)}"
        sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=120).check()
        submit = self.prompts.submit(msgspec.structs.replace(parsed.generation(rid), sampling=sampling))
        self.results[rid] = Result()
        self.scheduler.receive(submit)
        for job in self.jobs:
            self.scheduler.receive(answer(job, self.vocabulary))
        self.jobs.clear()
        self.run()
        result = self.results[rid]
        assert result.error is None
        ids = [token for token in result.ids if token != 256]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
        return text, parse_turn(parsed.turn_format, text)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    folder = tmp_path_factory.mktemp("harmony")
    save_tiny(tiny_config("gpt_oss"), folder)
    write_harmony_tokenizer(folder)
    return Local(folder)


MESSAGES = [{"role": "user", "content": "Pick one."}]


def test_a_format_is_that_of_the_final_channel(local: Local) -> None:
    text, turn = local.chat(messages=MESSAGES, response_format=FORMAT, thinking_budget=10)
    start, _, rest = text.partition("<|message|>")
    assert start == "<|channel|>analysis"
    assert "<|end|><|start|>assistant<|channel|>final<|message|>" in rest
    assert json.loads(turn.content)["n"] in (1, 22, 333)
    assert 0 < len(turn.reasoning.encode()) <= 30, "10 tokens of one byte; what is no text has three"
    assert not turn.calls


@pytest.mark.parametrize("effort", [None, "none"])
def test_a_call_that_must_be_made(local: Local, effort: str | None) -> None:
    """Its arguments keep to their schema, with thoughts before it and without."""
    more = {} if effort is None else {"reasoning_effort": effort}
    text, turn = local.chat(
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        **({"thinking_budget": 5} if effort is None else {}),
        **more,
    )
    (call,) = turn.calls
    assert (call.name, turn.content) == ("pick", "")
    assert turn.called
    assert json.loads(call.arguments)["n"] in (1, 22, 333)
    assert text.count("<|start|>assistant") == (effort is None)
    assert (turn.reasoning != "") == (effort is None)
