"""A toy engine in deterministic mode: no feature changes a bit of a token or a log-probability.

For each of graphs, overlap, cascade and shared prefixes, an engine with this feature on is compared with an
engine with all of them off. In a rehearsal, steps run eagerly, padded as for graphs. Its prompts are shorter
than 512 positions, and a deterministic cascade shares multiples of 512, so a rehearsal has no cascade.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

from benchmarks.gpu_visit.device import free
from benchmarks.gpu_visit.figures import Figures
from tests.gpu.toy import PROMPTS, SHAPE, TOKENS, Local

OFF: dict[str, Any] = {
    "deterministic": True,
    "page_size": 64,
    "cuda_graphs": False,
    "overlap": False,
    "cascade": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "pages of 64": {},
    "pages of 16": {"page_size": 16},
    "graphs": {"cuda_graphs": True},
    "overlap": {"overlap": True},
    "cascade": {"cascade": True},
    "all of them": {"cuda_graphs": True, "overlap": True, "cascade": True},
}
TINY_SHAPE = SHAPE | {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
TINY_PROMPTS = [[*range(1, 20)], [*range(1, 18), 7], [5]]
TINY: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "triton",
    "dtype": "float32",
    "num_pages": 40,
    "max_running": 4,
    "shape": TINY_SHAPE,
}

Answers = list[tuple[list[int], list[float]]]


class Differs(Exception):
    """Answers that differ in a bit from those of the plain engine."""


@torch.inference_mode()
def run(figures: Figures) -> None:
    device: Literal["cpu", "cuda"] = "cpu" if figures.tiny else "cuda"
    given: dict[str, Any] = {}
    prompts, tokens, times = PROMPTS, TOKENS, 2
    if figures.tiny:
        given, prompts, tokens, times = TINY, TINY_PROMPTS, 2, 1
        _multiply_by_value_alone()
    expected: Answers | None = None
    local: Local | None = None
    with figures.attempt("all off"):
        local = Local(**given, **OFF, prefix_cache="naive")
        expected = local.complete(prompts, tokens)
        figures.add("all off", prompts=len(prompts), tokens=sum(len(ids) for ids, _ in expected))
    for case, options in FEATURES.items() if expected is not None else ():
        local = None  # two engines may not fit
        free(torch.device(device))
        with figures.attempt(case):
            began = time.monotonic()
            local = Local(**given, **OFF | options)
            ready = time.monotonic()
            for _ in range(times):  # computed, and from the cache
                _check(local.complete(prompts, tokens), expected)
            figures.add(
                case, equal=True, start_s=ready - began, seconds=time.monotonic() - ready,
                graphs=local.runner.captured.graphs,
            )  # fmt: skip


def _check(found: Answers, expected: Answers | None) -> None:
    assert expected is not None
    wrong = [index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    if not wrong:
        return
    (ids, logprobs), (wanted, theirs) = found[wrong[0]], expected[wrong[0]]
    pairs = zip(ids, wanted, logprobs, theirs, strict=False)
    place = next((at for at, (a, b, c, d) in enumerate(pairs) if (a, c) != (b, d)), len(wanted))
    raise Differs(
        f"{len(wrong)} of {len(found)} prompts: {wrong[:10]}; the first from output token {place} on: "
        f"{ids[place : place + 3]} {logprobs[place : place + 3]}, not {wanted[place : place + 3]} "
        f"{theirs[place : place + 3]}"
    )


def _multiply_by_value_alone() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.kernels.interpreter_products import create_dot

    InterpreterBuilder.create_dot = create_dot
