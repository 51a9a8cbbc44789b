"""Every output under a schema is whole, whatever the model prefers and however small max_tokens is."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from ramify import constraint
from ramify.constraint import Constraint
from ramify.engine_messages import Failed, Submit
from ramify.errors import InvalidRequest, from_info
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.retokenize import Retokenizer, encode
from ramify.grammar.rules.gbnf import grammar_rules
from ramify.grammar.rules.left_recursion import without_left_recursion
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Finish
from ramify.radix.cache import PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.memory import with_defaults
from ramify.runtime.scheduler.grammars import GrammarStore
from ramify.runtime.scheduler.requests.constrained import Healer
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.sampling import RequestSampler, Sampled
from ramify.runtime.scheduler.requests.slots import RunningSlots
from ramify.runtime.scheduler.scheduler import Scheduler
from ramify.sampling_params import SamplingParams
from tests.grammar.naive_grammar import NaiveGrammar
from tests.grammar.vocabularies import STOP, tiny, tiny_tokenizer

pytestmark = pytest.mark.slow

CLOSED = {"additionalProperties": False}
SCHEMAS: dict[str, Any] = {
    "string": {"type": "string"},
    "number": {"type": "number"},
    "integer": {"type": "integer", "minimum": 7},
    "enum": {"enum": ["a", "much longer than a", 12, None, {"deep": [1, 2]}]},
    "array": {"type": "array", "items": {"type": "integer"}},
    "rows": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}, "minItems": 1},
    "min-items": {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 9},
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["name", "age"],
        **CLOSED,
    },
    "open-object": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    "any-object": {"type": "object"},
    "optional": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "null"}}, **CLOSED},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
    "tree": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["value"],
        **CLOSED,
    },
    "list": {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": {
                "anyOf": [
                    {"type": "null"},
                    {
                        "type": "object",
                        "properties": {"head": {"type": "string"}, "tail": {"$ref": "#/$defs/list"}},
                        "required": ["head", "tail"],
                        **CLOSED,
                    },
                ]
            }
        },
    },
    "choice": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "long"}, "text": {"type": "string", "minLength": 30}},
                "required": ["kind", "text"],
                **CLOSED,
            },
            {"type": "object", "properties": {"kind": {"const": "short"}}, "required": ["kind"], **CLOSED},
        ]
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,12}$"},
    "date": {"type": "string", "format": "date-time"},
    "unicode": {
        "type": "object",
        "properties": {"日本": {"type": "string", "minLength": 3}},
        "required": ["日本"],
        **CLOSED,
    },
    "tree-or-any": {
        "type": "object",
        "anyOf": [
            {"properties": {"child": {"$ref": "#"}, "tree": {}}, "required": ["tree"]},
            {"properties": {"child": {}, "leaf": {"type": "integer"}}, "required": ["child", "leaf"]},
        ],
    },
    "different-or-any": {
        "type": "object",
        "anyOf": [
            {"properties": {"tags": {"items": {"type": "integer"}, "uniqueItems": True}}, "required": ["a"]},
            {"properties": {"tags": {"type": "array"}}, "required": ["tags", "b"]},
        ],
    },
    "anything": True,
}


class Prolongs(RequestSampler):
    """A sampler of the allowed token after which the most tokens are needed; random at a tie."""

    def __init__(self, limits: Limits, seed: int) -> None:
        super().__init__(None, limits, RunningSlots())  # type: ignore[arg-type]
        self._random = random.Random(seed)

    def next_tokens(
        self, places: Sequence[tuple[Request, int]], logits: torch.Tensor, meanwhile: object = None
    ) -> list[Sampled]:
        return [(self._worst(request), None) for request, _ in places]

    def _worst(self, request: Request) -> int:
        held = request.constrained
        assert held is not None
        assert held.mask is not None
        mask = held.mask
        if request.healing is not None and request.next_ahead is not None:
            mask = request.healing.mask(request.next_ahead, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token != STOP] or [STOP]

        def needed(token: int) -> int:
            output = held.fork()
            output.accept(token)
            return output.needed

        some = self._random.sample(allowed, min(len(allowed), 24))
        return max(some, key=needed)


class NoModel:
    device = torch.device("cpu")
    adapters = None
    pool = None

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.zeros(len(batch.ids), 1)

    def logits(self, hidden: torch.Tensor, masks: object = ()) -> torch.Tensor:
        return torch.zeros(len(hidden), tiny().size)


class Hostile:
    """A scheduler whose sampler avoids ending the output."""

    def __init__(self, seed: int, *, jump: bool) -> None:
        config = EngineConfig(num_pages=256, page_size=4, jump_forward=jump, check_pages=True)
        config = with_defaults(config, None)
        limits = Limits(context_length=900, vocab_size=tiny().size, eos_token_ids=(STOP,), kv_tokens=1000)
        self.jobs: list[Any] = []
        self.failed: list[Failed] = []
        store = GrammarStore(tiny(), send=self.jobs.append, restart=lambda: None)
        runner: Any = NoModel()
        self.scheduler = Scheduler(
            config,
            limits,
            runner,
            PrefixCache(256, 4),
            store,
            self.failed.append,  # type: ignore[arg-type]
            retokenizer=Retokenizer(lambda text: encode(tiny_tokenizer(), text), tiny()),
            healer=Healer(tiny()),
            sampler=Prolongs(limits, seed),
        )

    def run(self, held: Constraint, max_tokens: int, **options: Any) -> tuple[bytes, Finish, list[int]]:
        vocabulary: Vocabulary = tiny()
        sampling = SamplingParams(max_tokens=max_tokens)
        self.scheduler.receive(
            Submit(rid="r", ids=tuple(tiny_tokenizer().encode("An answer: ").ids), sampling=sampling,
                   constraint=held, **options)
        )  # fmt: skip
        for job in self.jobs:
            self.scheduler.receive(answer(job, vocabulary))
        self.jobs.clear()
        ids: list[int] = []
        overlap = ""
        for _ in range(10 * max_tokens + 10):
            output = self.scheduler.step()
            if self.failed:
                raise from_info(self.failed.pop().error)
            for chunk in output.chunks if output is not None else ():
                ids += chunk.ids
                overlap += chunk.overlap
                if chunk.finish is not None:
                    text = b"".join(vocabulary.tokens[token] for token in ids)
                    return text.removeprefix(overlap.encode()), chunk.finish, ids
        raise AssertionError("it does not end")


def least(hostile: Hostile, held: Constraint) -> int:
    """The smallest max_tokens that is accepted."""
    with pytest.raises(InvalidRequest, match=r"has [0-9]+ tokens") as refused:
        hostile.run(held, 1)
    assert refused.value.field == "max_tokens"
    return int(refused.value.message.split(" has ")[1].split()[0])


@pytest.mark.parametrize("open_end", [False, True], ids=["", "healed"])
@pytest.mark.parametrize("jump", [True, False], ids=["jump", "no-jump"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_whole_at_every_budget(name: str, jump: bool, open_end: bool) -> None:
    held = constraint.json_schema(SCHEMAS[name])
    hostile = Hostile(seed=1, jump=jump)
    try:
        needed = least(hostile, held)
    except pytest.fail.Exception:
        needed = 1  # one token is enough
    for budget in (*range(needed, needed + 9), needed + 20, needed + 45):
        text, finish, ids = hostile.run(held, budget, open_end=open_end)
        assert finish.reason == "stop", (budget, text)
        assert len([token for token in ids if token != STOP]) <= budget
        jsonschema.validate(json.loads(text), SCHEMAS[name])


@pytest.mark.parametrize("jump", [True, False], ids=["jump", "no-jump"])
@pytest.mark.parametrize(
    "source",
    [
        'root ::= "(" root ")" | "[" root "]" | [a-z]+',
        'root ::= root "+" term | term\nterm ::= "(" root ")" | [0-9]{1,3}',
        'root ::= "a" root "a" | "b" root "b" | "ab"',
    ],
    ids=["brackets", "left-recursive", "ambiguous"],
)
def test_whole_sentences_of_grammars_at_every_budget(source: str, jump: bool) -> None:
    held = constraint.ebnf(source)
    hostile = Hostile(seed=1, jump=jump)
    naive = NaiveGrammar(without_left_recursion(grammar_rules(source)))
    for budget in (*range(2, 12), 25):
        text, finish, _ = hostile.run(held, budget)
        assert finish.reason == "stop", (budget, text)
        assert naive.accepts(text.removesuffix(b"<stop>")), text


def test_too_few_tokens_are_refused_with_the_number_that_is_enough() -> None:
    held = constraint.json_schema(SCHEMAS["object"])
    hostile = Hostile(seed=1, jump=True)
    needed = least(hostile, held)
    for budget in range(1, needed):
        with pytest.raises(InvalidRequest, match=f"has {needed} tokens"):
            hostile.run(held, budget)


def test_free_text_that_is_cut_is_not_called_whole() -> None:
    """Output of [a-z]* is whole at any length. Output without a constraint is cut."""
    text, finish, _ = Hostile(seed=3, jump=True).run(constraint.regex("[a-z]*"), 5)
    assert finish.reason == "stop"
    assert text.isalpha()


@pytest.mark.parametrize("strict", [False, "validate"])
def test_what_is_left_out_is_told_with_the_first_chunk(strict: Any) -> None:
    schema = {"type": "string", "pattern": "(?<=a)b", "maxLength": 3}
    hostile = Hostile(seed=1, jump=True)
    held = constraint.json_schema(schema, strict=strict)
    chunks = []
    step = hostile.scheduler.step

    def watched() -> Any:
        output = step()
        chunks.extend(output.chunks if output is not None else ())
        return output

    hostile.scheduler.step = watched  # type: ignore[method-assign]
    hostile.run(held, 9)
    assert chunks[0].enforcement is not None
    assert [left.schema for left in chunks[0].enforcement.unenforced] == ["/pattern"]
    assert "lookbehind" in chunks[0].enforcement.unenforced[0].message
    assert not any(chunk.enforcement for chunk in chunks[1:])
