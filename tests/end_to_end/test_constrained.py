"""Constraints in a running engine: mixed batches, forced tokens, refusals, and a compiler that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from ramify.constraint import choices, ebnf, json_object, json_schema, regex
from ramify.errors import InvalidConstraint
from ramify.grammar.retokenize import encode
from ramify.loop import wait
from ramify.messages import ChatMessage
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.engine.engine import Engine
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.tokenizer.tokenizer import load_backend
from tests.runtime.test_engine_processes import children

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#"}},
    "required": ["leaf"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32") as engine:
        yield engine


async def ask(engine: Engine, text: str, **options: Any) -> Any:
    options = {"temperature": 0.0, "max_tokens": 60} | options
    return await engine.acomplete(chat=[ChatMessage(role="user", content=text)], **options)


def test_a_mixed_batch_gives_each_its_own(engine: Engine) -> None:
    alone = wait(ask(engine, "Tell me a story.", max_tokens=30))

    async def together() -> list[Any]:
        return list(
            await asyncio.gather(
                ask(engine, "Tell me a story.", max_tokens=30),
                ask(engine, "Name a city.", constraint=json_schema(SCHEMA)),
                ask(engine, "Give a date.", constraint=regex(r"\d{4}-\d{2}-\d{2}")),
                ask(engine, "Yes or no?", constraint=choices(["yes", "no", "perhaps — wer weiß"])),
                ask(engine, "Count.", constraint=ebnf('root ::= "one" (", " ("two" | "three")){2}')),
                ask(engine, "A tree.", constraint=json_schema(TREE), temperature=1.0, seed=5),
                ask(engine, "An object.", constraint=json_object(), max_tokens=12),
                ask(engine, "Bad.", constraint=json_schema({"type": "strin"})),
                return_exceptions=True,
            )
        )

    free, city, date, answer, count, tree, anything, bad = wait(together())
    assert free.ids == alone.ids, "a neighbour's mask must not touch it"
    jsonschema.validate(json.loads(city.text), SCHEMA)
    assert city.usage.forced_tokens > 0
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date.text)
    assert answer.text in ("yes", "no", "perhaps — wer weiß")
    assert re.fullmatch(r"one(, (two|three)){2}", count.text)
    if tree.finish.reason == "stop":
        jsonschema.validate(json.loads(tree.text), TREE)
    assert anything.text.startswith("{")
    assert isinstance(bad, InvalidConstraint)
    assert bad.pointer == "/type"


PROMPTS = ["Name a city.", "Name a person, as JSON.", "Tell me of a very small village in the mountains."]


def test_forced_text_is_spelled_as_the_tokenizer_does(engine: Engine) -> None:
    tokenizer = load_backend(resolve(DEFAULT_MODEL, progress=False).tokenizer)
    for prompt in PROMPTS:
        answer = wait(ask(engine, prompt, constraint=json_schema(SCHEMA)))
        assert answer.usage.forced_tokens >= len(answer.ids) // 3
        opening, between = encode(tokenizer, '{"city": "'), encode(tokenizer, '", "people": ')
        ids = list(answer.ids)
        assert ids[: len(opening)] == opening
        assert any(ids[i : i + len(between)] == between for i in range(len(ids)))


def test_without_jumps_the_model_chooses_every_token() -> None:
    with Engine(dtype="float32", jump_forward=False, num_pages=256) as plain:
        answer = wait(ask(plain, PROMPTS[0], constraint=json_schema(SCHEMA)))
        assert answer.usage.forced_tokens == 0
        jsonschema.validate(json.loads(answer.text), SCHEMA)


def test_forced_tokens_have_log_probabilities(engine: Engine) -> None:
    for prompt in PROMPTS:
        options: dict[str, Any] = {"temperature": 0.0, "logprobs": 1}
        fast = engine.complete(prompt, max_tokens=60, constraint=json_schema(SCHEMA), **options)
        assert fast.usage.forced_tokens > 0
        assert fast.logprobs is not None
        assert fast.logprobs.ids == fast.ids
        # The same tokens as a prompt: their log-probabilities from one prefill.
        start = fast.usage.prompt_tokens
        again = engine.complete([prompt, fast.ids], max_tokens=1, prompt_logprobs_start=start, **options)
        assert again.prompt_logprobs is not None
        assert again.prompt_logprobs.ids == fast.ids
        assert fast.logprobs.logprobs == pytest.approx(again.prompt_logprobs.logprobs, abs=1e-3)


def test_a_killed_compiler_costs_its_own_request_at_most(engine: Engine) -> None:
    def compilers() -> list[int]:
        return children(engine.pids["scheduler"])

    async def busy() -> Any:
        free = asyncio.create_task(ask(engine, "Tell me a long story.", max_tokens=40))
        for pid in compilers():
            os.kill(pid, signal.SIGKILL)
        for attempt in range(3):  # the one that was being compiled may fail; the next ones do not
            try:
                pattern = regex(f"[a-f]{{{attempt + 3}}}")
                return await free, await ask(engine, "Letters.", constraint=pattern)
            except InvalidConstraint:
                continue
        raise AssertionError("the compiler did not come back")

    before = engine.pids
    story, letters = wait(busy())
    assert len(story.ids) > 10
    assert re.fullmatch("[a-f]+", letters.text)
    assert engine.pids == before, "the engine core itself went on"
