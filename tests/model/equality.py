"""Checks that a model on our KV pages computes what transformers computes itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ramify.engine_messages import LoadLora
from ramify.kernels.registry import Ops, ops
from ramify.kernels.weights.packed import PackedWeight
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.kv_pool import KvPool, StatePool
from ramify.runtime.executor.runner import Runner
from ramify.runtime.model.causal_lm import CausalLM
from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.loading.load import load_model, read_shape
from tests.runtime.local import LocalScheduler
from tests.runtime.oracle import assert_same, greedy

TOKENS = 12
PAGE = 4
STOPS = [0, 11, 12, 17, 18, 30]
"""Prefill, chunks, and single tokens."""
TOLERANCE = 2e-4
"""Tolerance of float32 logits whose standard deviation is about 1.6."""


def prompts() -> list[list[int]]:
    """Forks of a prefix at odd lengths, one a prefix of another, and one that is apart."""
    rng = random.Random(3)
    base = [rng.randrange(3, 250) for _ in range(40)]
    tails = [base[:length] + [rng.randrange(3, 250) for _ in range(4)] for length in (13, 22, 37)]
    return [*tails, base[:30], base, [rng.randrange(3, 250) for _ in range(21)]]


PROMPTS = prompts()


def loaded(folder: Path) -> CausalLM:
    """The checkpoint in `folder`, by transformers' code."""
    files = ModelFiles(name="tiny", weights=folder, tokenizer=folder)
    return load_model(files, shape=read_shape(folder, "transformers"), dtype=torch.float32)


def native(weights: Path, **options: Any) -> Model:
    """The checkpoint or GGUF file at `weights`, by our own code."""
    files = ModelFiles(name="tiny", weights=weights, tokenizer=weights)
    return load_model(files, **{"dtype": torch.float32, **options})


def compiled(weights: Path, quantization: str, **options: Any) -> Model:
    """`native` with the compiled kernels for packed weights."""
    model = native(weights, quantization=quantization, **options)
    model.use_kernels(ops("cpu"))
    return model


def packed_head(model: Model) -> PackedWeight | None:
    """The packed head; None if the head is not packed."""
    return model.head.packed[0] if model.head is not None and model.head.packed else None


def paged_logits(
    model: CausalLM,
    prompts: Sequence[torch.Tensor],
    kernels: Ops,
    cuts: Sequence[Sequence[int]],
    *,
    batched: bool = True,
) -> list[torch.Tensor]:
    """Logits of every position, from pages and states that begin as NaN.

    cuts : for each prompt the borders of its steps. The prompts have equally many.
    batched : whether the prompts' steps are computed together
    """
    room = -(-max(map(len, prompts)) // PAGE)
    pool = KvPool(model.config, num_pages=room * len(prompts), page_size=PAGE, dtype=torch.float32)
    states = None if model.config.states is None else StatePool(model.config.states, num_slots=4)
    for tensor in (pool.k, pool.v, *(() if states is None else (states.conv, states.recurrent))):
        tensor.fill_(torch.nan)
    runner = Runner(model, pool, kernels, states=states)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for spans in zip(*(itertools.pairwise(each) for each in cuts), strict=True):
        for places in [range(len(prompts))] if batched else [[place] for place in range(len(prompts))]:
            extensions = [
                Extension(
                    prompts[place].int().numpy(),
                    *spans[place],
                    range(room * place, room * (place + 1)),
                    None if states is None else 3 - place,
                )
                for place in places
            ]
            logits = runner.logits(runner.forward(pack(extensions, PAGE)))
            sizes = [extension.stop - extension.start for extension in extensions]
            for place, part in zip(places, logits.split(sizes), strict=True):
                rows[place].append(part.clone())
    return [torch.cat(each) for each in rows]


def assert_logits_equal(reference: Any, model: CausalLM) -> None:
    """Compare all logits of two packed requests in chunks."""
    ids = torch.tensor([prompt[: STOPS[-1]] for prompt in (PROMPTS[2], PROMPTS[5] * 2)])
    found = paged_logits(model, list(ids), ops("cpu", deterministic=True), [STOPS, STOPS])
    with torch.no_grad():
        wanted = [reference(input_ids=row[None], use_cache=False).logits[0] for row in ids]
    for rows, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(rows, want, atol=TOLERANCE, rtol=0)


def assert_engine_equal(reference: Any, model: CausalLM, *, adapter: Path | None = None) -> None:
    """Compare tokens of cold, chunked, forked, retracted and cached requests with the library's own lone run.
    With an `adapter`, which is loaded then, all requests are its own."""
    # A state is kept where it saves 64 tokens or more. The pages are few enough for a retraction.
    start, pages = ([], 28) if model.config.states is None else (PROMPTS[4] * 2, 36)
    prompts = [start + prompt for prompt in PROMPTS]
    expected = [greedy(reference, prompt, TOKENS) for prompt in prompts]
    local = LocalScheduler(model, page_size=PAGE, num_pages=pages, chunk_tokens=17)
    lora = "" if adapter is None else "adapter"
    if adapter is not None:
        local.scheduler.receive(LoadLora(rid=lora, name=lora, path=str(adapter)))
        assert all(reply.lora for reply in local.replies)
    for _ in "cold", "cached":
        results = local.complete(prompts, max_tokens=TOKENS, ignore_eos=True, lora=lora)
        same = [assert_same(want, have.ids) for want, have in zip(expected, results, strict=True)]
        assert sum(same) >= len(same) - 1, "ties are the exception"
    assert local.scheduler.counters.retractions > 0
    assert sum(result.usage.cached_tokens for result in results if result.usage) > 20
    assert sum(len(set(one.ids)) > 3 for one in expected) > len(expected) / 2, "the model says too little"
