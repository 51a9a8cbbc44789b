"""The default on the CPU: bits of an output depend on the request alone, in eight families and eight formats.

Requests of seven kinds come one after the other while others run. The pages are few, the chunks short,
prefixes shared, some requests aborted, others retracted, and speculation drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.engine_messages import Abort, ChoiceTokens, LoadLora
from ramify.kernels.cpu.linear import tiles_allowed
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from ramify.runtime.model.quantization import Quantization
from tests.runtime.local import LocalScheduler, Result
from tests.runtime.test_decisions import decide

from .adapters import write_adapter
from .own_families import FAMILIES, SCHEMES, reference_of, write_gguf_of
from .quantised_files import write, write_mxfp4

Write = Callable[[Any, Path], Path]
"""Writes the model of a family, and returns the path to load."""


def as_folder(family: Any, folder: Path) -> Path:
    reference_of(family, folder)
    return folder


def as_gguf(family: Any, folder: Path) -> Path:
    write_gguf_of(family, folder / "tiny.gguf")
    return folder / "tiny.gguf"


def as_mxfp4(family: Any, folder: Path) -> Path:
    write_mxfp4(reference_of(family), folder)
    return folder


def as_scheme(place: int) -> Write:
    def make(family: Any, folder: Path) -> Path:
        config, quantise, _ = SCHEMES[place]
        write(reference_of(family), folder, config, quantise)
        return folder

    return make


CASES: dict[str, tuple[str, Write, str, Quantization]] = {
    "llama float32": ("llama", as_folder, "float32", "none"),
    "gemma2 int4": ("gemma2", as_folder, "bfloat16", "int4"),
    "gemma3 gguf in float32": ("gemma3", as_gguf, "float32", "gguf"),
    "gpt_oss mxfp4": ("gpt_oss", as_mxfp4, "bfloat16", "checkpoint"),
    "glm4_moe fp8": ("glm4_moe", as_scheme(0), "float32", "checkpoint"),
    "qwen3_next int8": ("qwen3_next", as_folder, "bfloat16", "int8"),
    "qwen3_5 packed by four bits": ("qwen3_5", as_scheme(1), "float32", "checkpoint"),
    "granitemoeshared bfloat16": ("granitemoeshared", as_folder, "bfloat16", "none"),
}


def requests() -> list[dict[str, Any]]:
    """Requests of seven kinds, over prompts that share beginnings; some repeat themselves, for prompt
    lookup."""
    rng = random.Random(3)

    def ids(count: int) -> list[int]:
        return [rng.randrange(256) for _ in range(count)]

    trunk = ids(9) * 3 + ids(14)
    found: list[dict[str, Any]] = []
    for turn in range(3):
        prompts = [trunk[: 11 + 9 * turn] + ids(3 + turn), trunk + ids(2), ids(5 + 7 * turn), trunk[:26] * 2]
        for seed, prompt in enumerate(prompts):
            found.append({"ids": prompt, "max_tokens": 9, "logprobs": 2})
            found.append({"ids": prompt, "max_tokens": 7, "temperature": 1.2, "seed": seed, "top_p": 0.9})
        found.append({"ids": prompts[0], "max_tokens": 6, "repetition_penalty": 1.3, "temperature": 0.7})
        found.append({"ids": prompts[1], "max_tokens": 2, "logprobs": 1, "prompt_logprobs_start": 1})
        choices = [ChoiceTokens(shared=len(prompts[2]), ids=tuple(ids(2 + n))) for n in range(3)]
        found.append({"ids": prompts[2], "max_tokens": 0, "choices": choices})
        found.append({"ids": prompts[3], "max_tokens": 0, "pooling": "mean"})
        asked = [(ids(4 + n), [ids(1 + place) for place in range(3)]) for n in range(4)]
        found.append({"ids": prompts[turn], "max_tokens": 0, "decide": decide(*asked)})
    for place, request in enumerate(found):
        request.setdefault("seed", place)
        request.setdefault("temperature", 0.0)
        request["ignore_eos"] = request["max_tokens"] > 0
    return found


def bits(result: Result) -> tuple[Any, ...]:
    assert result.error is None
    scores = result.choices, result.decisions, result.embedding
    return result.ids, result.logprobs, result.prompt_logprobs, *scores


def together(local: LocalScheduler, wanted: list[dict[str, Any]], seed: int) -> list[Result]:
    """Answers to all requests, six at a time; every sixth is aborted soon after, and submitted once more."""
    rng = random.Random(seed)
    order = list(range(len(wanted)))
    rng.shuffle(order)
    where: dict[int, str] = {}
    for count, place in enumerate(order):
        request = dict(wanted[place])
        rid = local.submit(request.pop("ids"), **request)
        where[place] = rid
        local.step(rng.randrange(4))
        running = local.scheduler.requests.running
        if count % 4 == 3 and running:  # as where pages run out
            local.scheduler.requests.retract(running[-1])
        if count % 6 == 5 and not local.results[rid].ended:
            local.scheduler.receive(Abort(rid=rid, silent=False))
            request = dict(wanted[place])
            where[place] = local.submit(request.pop("ids"), **request)
    local.run()
    return [local.results[where[place]] for place in range(len(wanted))]


def check(name: str, family: str, write_model: Write, dtype: str, form: Quantization, folder: Path) -> None:
    path = write_model(family, folder)
    files = ModelFiles(name=name, weights=path, tokenizer=path)
    options: dict[str, Any] = {"dtype": dtype, "page_size": 4}
    if dtype == "bfloat16" and tiles_allowed():  # with AMX it is not the default
        options["deterministic"] = True
    adapted = family == "llama"
    if adapted:
        write_adapter(folder / "adapter", folder, seed=1, targets=FAMILIES["llama"].adapted)

    def made(**more: Any) -> LocalScheduler:
        model = load_model(
            files, dtype=getattr(torch, dtype), quantization=form, packed=True, deterministic=True
        )
        local = LocalScheduler(model, **options | more)
        assert local.runner.ops.deterministic, "the default"
        if adapted:
            local.scheduler.receive(LoadLora(rid="one", name="one", path=str(folder / "adapter")))
        return local

    wanted = requests()
    if adapted:
        for request in wanted[::3]:
            request["lora"] = "one"
    one = made(num_pages=200, speculation=False, cascade=False)
    alone = []
    for request in wanted:
        each = dict(request)
        rid = one.submit(each.pop("ids"), **each)
        one.run()
        alone.append(bits(one.results[rid]))
        one.cache.flush()
    drafts = one.runner.model.config.states is None
    busy = made(num_pages=34, max_running=6, chunk_tokens=9, speculation=drafts or None)
    found = [bits(result) for result in together(busy, wanted, seed=1)]
    differing = [place for place in range(len(wanted)) if found[place] != alone[place]]
    assert not differing, [(wanted[place], found[place], alone[place]) for place in differing[:1]]
    counters = busy.scheduler.counters
    assert counters.retractions > 0
    assert counters.cached_tokens > 0
    assert bool(counters.accepted_tokens) == drafts


@pytest.mark.parametrize("name", CASES)
def test_what_runs_beside_changes_no_bit(name: str, tmp_path: Path) -> None:
    check(name, *CASES[name], tmp_path)
