"""The headline ratio: a step of torch's own kernels in one CUDA graph, against our engine's.

The library's step has the shapes and the weights' sizes of the model: products, norms, attention by the
fastest of torch's backends over contiguous keys and values, gated activations, residuals, the head and a
greedy choice. It has no rotation, no store of keys and values, no pages and no scheduler, so it does less
than a real step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.engine import ROUNDS, Sizes, prefills
from benchmarks.gpu_timing import Timer
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.engines import TINY, add_decodes, add_row, build, shape_of
from benchmarks.gpu_visit.figures import Figures
from benchmarks.roofline import ceilings
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.shape.hf_config import config_from_hf
from tests.kernels.kernel_cases.attention import BACKENDS
from tests.kernels.kernel_cases.base import difference, reason

SIZES = Sizes(batches=(1, 32, 256), prompt=4096, chunk=8192, branches=0, prefixes=(), steps=16)
MOST_ERROR = 0.05
"""Largest relative error of a backend, ‖out - other‖ / ‖other‖. `other` is torch's plain backend, which
itself rounds more often. A backend with a larger error is wrong and is not timed."""


@dataclasses.dataclass(frozen=True)
class Ours:
    """The time of our engine's step.

    context : positions of each request when the step was timed
    """

    seconds: float
    context: int


@torch.inference_mode()
def run(figures: Figures) -> None:
    sizes, device = TINY if figures.tiny else SIZES, device_of(figures)
    dtype = torch.float32 if figures.tiny else torch.bfloat16
    ours: dict[str, Ours] = {}
    with figures.attempt("ours"):
        measure_ours(figures, sizes, device, dtype, ours)
    free(device)
    config = config_from_hf(json.loads(shape_of(figures).read_text()))
    library, timer = Library(config, device, dtype), Timer(device)
    cases = {f"decode {batch} x {sizes.context}": batch for batch in sizes.batches}
    cases[f"prefill {sizes.prompt}"] = 0
    for case, batch in cases.items():
        with figures.attempt(case):
            measure_library(figures, case, batch, library, timer, ours.get(case), sizes)
        free(device)


def measure_library(
    figures: Figures, case: str, batch: int, library: Library, timer: Timer, our: Ours | None, sizes: Sizes
) -> None:
    """Add a row for a decode of `batch` requests, or for a prefill if `batch` is 0. Keys and values are freed
    at the end."""
    config, device, dtype = library.config, library.device, library.dtype
    context = our.context if our is not None else sizes.context
    if batch:
        attention: Attention = Cached(config, batch, context, device, dtype)
    else:
        attention = Causal(config, sizes.prompt, device, dtype)
    layers, unavailable = backends(attention, timer)
    if not layers:
        raise RuntimeError(f"no backend computes attention: {unavailable}")
    best = min(layers, key=layers.__getitem__)
    x = torch.randn(batch or sizes.prompt, config.hidden_size, device=device).to(dtype)
    step = partial(library.step, x, attention, BACKENDS[best], rows=batch or 1)
    found, failed = timer.timings({"library": step}, seconds=0.5)
    if failed:
        raise RuntimeError(failed["library"])
    timing = found["library"]
    row = {"library_s": timing.seconds, "spread": timing.spread, "captured": timing.captured}
    if our is not None:
        row |= {"ours_s": our.seconds, "ratio": timing.seconds / our.seconds, "of": "the library's speed"}
    figures.add(case, **row, context=context, backend=best, layer_s=layers, unavailable=unavailable)


def measure_ours(
    figures: Figures, sizes: Sizes, device: torch.device, dtype: torch.dtype, ours: dict[str, Ours]
) -> None:
    """Put the times of our engine into `ours`, by case. The engine is deleted at the end, even after a
    failure: the library has no room beside its 59 GB."""
    engine = build(figures, "ours", sizes)
    bandwidth, flops = ceilings(device, dtype)
    for row in add_decodes(figures, engine, sizes, bandwidth, of="ours: "):
        ours[row["case"]] = Ours(row["device_s"], sizes.context + row["warm"] + ROUNDS * sizes.steps)
    with figures.attempt(f"ours: prefill {sizes.prompt}"):
        for row in prefills(engine, sizes, flops):
            add_row(figures, row, of="ours: ")
            ours[row["case"]] = Ours(row["seconds"], sizes.prompt)


class Library:
    """Random weights of a model's sizes, and its step by torch's kernels."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        def weight(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)

        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        fused = attended + 2 * config.num_kv_heads * config.head_dim
        self.config, self.device, self.dtype = config, device, dtype
        self._norm = torch.ones(hidden, dtype=dtype, device=device)
        self._layers = [
            (
                weight(fused, hidden),
                weight(hidden, attended),
                weight(2 * inner, hidden),
                weight(hidden, inner),
            )
            for _ in range(config.num_layers)
        ]
        self._head = weight(config.vocab_size, hidden)

    def step(self, x: Tensor, attention: Attention, backend: SDPBackend, *, rows: int) -> Tensor:
        """The greedy tokens of the last `rows` of x, (tokens, hidden)."""
        with sdpa_kernel(backend):
            for layer, (qkv, o, gate_up, down) in enumerate(self._layers):
                mixed = attention.attend(layer, F.linear(self._normed(x), qkv))
                x = x + F.linear(mixed, o)
                gate, up = F.linear(self._normed(x), gate_up).chunk(2, dim=-1)
                x = x + F.linear(F.silu(gate) * up, down)
        return torch.argmax(F.linear(self._normed(x[-rows:]), self._head), dim=-1)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._norm.shape, self._norm, 1e-5)


class Attention:
    """The attention of one step: from a layer's fused queries, keys and values, (tokens, all heads), to
    (tokens, heads).

    compared : number of first tokens for which backends are compared with the plain one; None: all
    """

    compared: int | None = None

    def __init__(self, config: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        heads = config.num_heads + 2 * config.num_kv_heads
        self.example = torch.randn(tokens, heads * config.head_dim, device=device).to(dtype)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        raise NotImplementedError

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of `qkv`: (tokens, heads, head_dim) each."""
        config = self.config
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = qkv.view(len(qkv), sum(sizes), config.head_dim).split(sizes, dim=1)
        return q, k, v


class Cached(Attention):
    """The attention of a decode, over contiguous keys and values, which each layer has for itself."""

    compared = 8

    def __init__(
        self, config: ModelConfig, batch: int, context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(config, batch, device, dtype)
        shape = (2, batch, config.num_kv_heads, context, config.head_dim)
        self._kv = [
            torch.empty(shape, dtype=dtype, device=device).normal_() for _ in range(config.num_layers)
        ]

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        q, _, _ = self._split(qkv)
        keys, values = self._kv[layer][:, : len(q)]
        out = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        return out.flatten(1)


class Causal(Attention):
    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1)[None] for each in self._split(qkv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def backends(attention: Attention, timer: Timer) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of one layer with each backend that is right, and the reason why each other backend is not
    timed.

    The plain backend is timed only if no other runs: it widens keys and values, and may need all the memory.
    """

    def layer(backend: SDPBackend, rows: int | None = None) -> Tensor:
        with sdpa_kernel(backend):
            return attention.attend(0, attention.example[:rows])

    plain = layer(SDPBackend.MATH, attention.compared)
    calls: dict[str, Callable[[], Any]] = {}
    refused: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        if backend == SDPBackend.MATH:
            continue
        try:
            error = difference(layer(backend, attention.compared), plain)
        except Exception as failure:  # libraries fail with types of their own
            refused[name] = reason(failure)
            continue
        if error <= MOST_ERROR:
            calls[name] = partial(layer, backend)
        else:
            refused[name] = f"differs by {error:.2g}"
    del plain
    times, failed = timer.medians(calls, seconds=0.05)
    if not times:
        times, plainly = timer.medians({"math": partial(layer, SDPBackend.MATH)}, seconds=0.05)
        failed |= plainly
    return times, refused | failed
