"""Skipping the rows of the head that no mask allows changes no token and no log-probability."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ramify import constraint
from ramify.grammar.compile.child_jobs import answer
from ramify.grammar.retokenize import Retokenizer, encode
from ramify.kernels.cpu import linear_masked
from ramify.kernels.registry import ops
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.loading.load import dummy_model
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.scheduler.grammars import GrammarStore
from ramify.runtime.scheduler.requests.constrained import Healer
from tests.grammar.vocabularies import STOP, tiny, tiny_tokenizer
from tests.runtime.local import LocalScheduler, Result

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    None,
    constraint.json_schema(PERSON),
    constraint.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3}),
    constraint.json_schema({"enum": ["north", "south", "much further south", 12, None]}),
    constraint.regex("[ab]{3,20}(c|d)"),
    constraint.regex(".{4,30}"),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 13},
    {"temperature": 1.3, "seed": 14, "top_k": 5},
    {"temperature": 0.9, "seed": 15, "top_p": 0.7, "min_p": 0.05},
    {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"logit_bias": {65: 5.0, 97: -100.0, 300: 100.0}, "temperature": 1.0, "seed": 16},
    {"logprobs": 3},
    {"min_tokens": 8},
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Model:
    config = ModelConfig(
        family="llama",
        vocab_size=tiny().size,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        context_length=512,
        norm_eps=1e-5,
        windows=(0, 0),
        eos_token_ids=(STOP,),
    )
    dtype = getattr(torch, request.param)
    made = dummy_model(config, dtype=dtype, packed=True, deterministic=True)
    assert made.head is not None
    assert made.head.packed
    return made


def outputs(model: Model, count: Callable[[int], None] | None) -> list[Result]:
    """Run a mix of requests to the end. For each call of the head, `count` gets the number of rows for which
    panels were skipped. None: the whole head is computed."""
    jobs: list[Any] = []
    vocabulary = tiny()
    local = LocalScheduler(
        model,
        dtype="float32" if model.embedding.dtype == torch.float32 else "bfloat16",
        num_pages=1024,
        page_size=4,
        grammars=GrammarStore(vocabulary, send=jobs.append, restart=lambda: None),
        retokenizer=Retokenizer(lambda text: encode(tiny_tokenizer(), text), vocabulary),
        healer=Healer(vocabulary),
    )
    runner: Runner = local.runner
    whole = ops("cpu").masked_linear

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        assert count is not None
        assert whole is not None
        result = whole(*args, **options)
        count(linear_masked.arena.call.few)
        return result

    runner.ops = dataclasses.replace(runner.ops, masked_linear=None if count is None else counting)
    if count is not None:
        model.use_kernels(runner.ops)
    rids = []
    for number, held in enumerate(CONSTRAINTS):
        for place, options in enumerate(OPTIONS):
            prompt = tiny_tokenizer().encode(f"An answer {number}{place}: ").ids
            open_end = place % 2 == 0
            rids.append(local.submit(prompt, constraint=held, open_end=open_end, max_tokens=24, **options))
    for job in jobs:
        local.scheduler.receive(answer(job, vocabulary))
    local.run()
    return [local.results[rid] for rid in rids]


def test_a_hostile_mix_says_the_same(model: Model) -> None:
    left_out: list[int] = []
    found = outputs(model, left_out.append)
    expected = outputs(model, None)
    assert sum(rows > 0 for rows in left_out) > 10  # 18 with AVX2
    for one, other in zip(found, expected, strict=True):
        assert one.error is None
        assert one.ids == other.ids
        assert one.logprobs == other.logprobs
        assert one.finish == other.finish
