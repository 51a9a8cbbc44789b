"""Each trial (docs/decisions/0098) on against off: `ratio` is its speed, and above 1.05 it is worth its code.

Kernels are timed in turns in one process, and only if their results agree: `error_rel` is their relative
difference. Whole engines differ in the one option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.engine import Row, Sizes, compared, prefills
from benchmarks.gpu_timing import Timer
from benchmarks.gpu_visit.device import device_of, free
from benchmarks.gpu_visit.engines import add_decodes, add_row, build
from benchmarks.gpu_visit.figures import Figures
from benchmarks.kernels import Wrong
from benchmarks.roofline import ceilings
from ramify.kernels.trials import Trial
from ramify.kernels.triton import activation, float8, gated_delta, norm
from ramify.kernels.triton.ahead import fix_cache_keys
from ramify.kernels.triton.trials import chunked_delta, rounding, skinny
from ramify.runtime.executor.device import FLOAT8, capability_of
from tests.kernels.delta_cases import NARROW, Heads, Layer
from tests.kernels.float8_cases import weight_of
from tests.kernels.kernel_cases.base import difference, half

MOST_ERROR = 1e-2
"""Largest relative difference of results that round to bfloat16, or multiply in TF32."""
SIZES = Sizes(batches=(1, 32), prompt=8192, chunk=8192, branches=0, prefixes=(), steps=16)
TINY = Sizes(batches=(1,), context=20, steps=1, prompt=24, chunk=16, branches=0, prefixes=())
WHOLE: tuple[Trial, ...] = ("skinny-products", "dependent-launch", "library-prompts")
"""Trials whose figure is that of a whole engine."""

Call = Callable[[], Tensor]


@torch.inference_mode()
def run(figures: Figures) -> None:
    device = device_of(figures)
    fix_cache_keys()
    torch.manual_seed(0)
    timer = Timer(device)
    for name, make in kernels(device, tiny=figures.tiny):
        with figures.attempt(name):
            add_pair(figures, name, timer, *make())
        free(device)
    with figures.attempt("engines"):
        engines(figures, device)


def add_pair(figures: Figures, name: str, timer: Timer, on: Call, off: Call) -> None:
    """Add a row for two calls that compute the same."""
    error = difference(on(), off())
    if not error < MOST_ERROR:
        raise Wrong(f"the results differ by {error:.2g} of their size")
    found, failed = timer.timings({"on": on, "off": off}, seconds=0.2)
    if failed:
        raise RuntimeError(failed)
    seconds = {f"{each}_s": timing.seconds for each, timing in found.items()}
    ratio = seconds["off_s"] / seconds["on_s"]
    spread = max(timing.spread for timing in found.values())
    figures.add(name, **seconds, spread=spread, error_rel=error, ratio=ratio, of="the speed without it")


def kernels(device: torch.device, *, tiny: bool) -> Iterator[tuple[str, Callable[[], tuple[Call, Call]]]]:
    """The name of each case, and a function that makes its two calls."""
    hidden, inner, outputs = (64, 96, 80) if tiny else (4096, 14336, 6144)
    for rows in (2,) if tiny else (1, 32, 256):
        if (capability_of(device) or FLOAT8) >= FLOAT8:
            for group in (0, 128):
                about = f"{rows} rows, " + ("blocks of 128" if group else "a factor a row")
                yield (
                    f"fused-rounding: norm + qkv, {about}",
                    partial(_norm, device, rows, outputs, hidden, group),
                )
                yield (
                    f"fused-rounding: gate + down, {about}",
                    partial(_gate, device, rows, hidden, inner, group),
                )
        for name, shape in (("qkv", (outputs, hidden)), ("o", (hidden, hidden))):
            if rows <= skinny.MOST_ROWS:
                yield f"skinny-products: {name}, {rows} rows", partial(_skinny, device, rows, *shape)
    for tokens in (40,) if tiny else (512, 4096):
        yield f"chunked-delta: a prompt of {tokens}", partial(_delta, device, tokens, tiny)


def _norm(device: torch.device, rows: int, outputs: int, inputs: int, group: int) -> tuple[Call, Call]:
    matrix, x = weight_of(outputs, inputs, group, str(device)), _random(device, rows, inputs)
    weight, residual, out = torch.ones_like(x[0]), torch.zeros_like(x), _random(device, rows, outputs)

    def on() -> Tensor:
        found = rounding.norm_float8(x, weight, 1e-5, matrix, residual=residual.zero_())
        return float8.multiply_float8(found, matrix, out=out).clone()

    def off() -> Tensor:
        return float8.float8_matmul(
            norm.add_rms_norm(x, residual.zero_(), weight, 1e-5), matrix, out=out
        ).clone()

    return on, off


def _gate(device: torch.device, rows: int, outputs: int, inputs: int, group: int) -> tuple[Call, Call]:
    matrix, x = weight_of(outputs, inputs, group, str(device)), _random(device, rows, 2 * inputs)
    out = _random(device, rows, outputs)

    def on() -> Tensor:
        return float8.multiply_float8(rounding.gate_float8(x, matrix), matrix, out=out).clone()

    def off() -> Tensor:
        return float8.float8_matmul(activation.silu_mul(x), matrix, out=out).clone()

    return on, off


def _skinny(device: torch.device, rows: int, outputs: int, inputs: int) -> tuple[Call, Call]:
    x, weight = _random(device, rows, inputs), _random(device, outputs, inputs) / inputs**0.5
    return partial(skinny.matmul, x, weight), partial(F.linear, x, weight)


def _delta(device: torch.device, tokens: int, tiny: bool) -> tuple[Call, Call]:
    heads = NARROW if tiny else Heads(16, 48, 128, 128)  # of Qwen3.5 27B
    layer = Layer(heads, (tokens,), half(device), str(device))
    slots, starts = torch.zeros(1, dtype=torch.int64), torch.tensor([0, tokens], dtype=torch.int32)
    b, a = layer.gates[0].chunk(2, dim=1)
    tensors = (each.to(device) for each in (slots, starts, starts[1:].clone()))
    given = layer.qkv[0], b, a, layer.weights, layer.conv, layer.recurrent, *tensors
    return partial(chunked_delta.gated_delta_rule, *given), partial(gated_delta.gated_delta_rule, *given)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(half(device))


def engines(figures: Figures, device: torch.device) -> None:
    """Decodes and a prompt of an engine without trials, then of one with each of `WHOLE`."""
    sizes = TINY if figures.tiny else SIZES
    bandwidth, flops = ceilings(device, torch.float32 if figures.tiny else torch.bfloat16)
    plain = {row["case"]: row for row in measured(figures, sizes, (), bandwidth, flops)}
    free(device)
    for trial in WHOLE:
        if trial == "dependent-launch" and (capability_of(device) or 0) < 90:
            figures.add(trial, skipped="it needs compute capability 9.0")
            continue
        with figures.attempt(trial):
            prompt = trial == "library-prompts"
            part = dataclasses.replace(sizes, **({"batches": (), "branches": 1} if prompt else {"prompt": 0}))
            for row in measured(figures, part, (trial,), bandwidth, flops):
                add_row(figures, compared(row, plain[row["case"]], "the speed without it"), of=f"{trial}: ")
        free(device)


def measured(
    figures: Figures, sizes: Sizes, trials: tuple[Trial, ...], bandwidth: float, flops: float
) -> list[Row]:
    name = "".join(trials) or "without trials"
    engine = build(figures, name, sizes, trial=trials)
    rows = add_decodes(figures, engine, sizes, bandwidth, of=f"{name}, alone: ")
    if sizes.prompt:
        rows += prefills(engine, sizes, flops)
    return rows
