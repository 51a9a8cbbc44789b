"""Kernels of trials in Triton's interpreter: their twins' results, and what each changes in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.kernels.reference import float8 as reference
from ramify.kernels.reference import gated_delta as reference_delta
from ramify.kernels.reference import matmul as plain
from ramify.kernels.registry import ops
from ramify.kernels.triton import float8
from ramify.kernels.triton.activation import gelu_mul, silu_mul
from ramify.kernels.triton.norm import add_rms_norm, rms_norm
from ramify.kernels.triton.trials import chunked_delta, prompts, rounding, skinny
from ramify.kernels.triton.trials.chunked_delta import CHUNK
from ramify.kernels.weights.quantised import Rounded
from ramify.kernels.weights.rows import Rows
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.model.layers import Linear
from tests.kernels.delta_cases import NARROW, Heads, Layer
from tests.kernels.float8_cases import activations, weight_of
from tests.kernels.interpreted.test_layers import IDS, LAYERS, PAGE, runner_of

HALF = torch.float16
LLAMA = {"model_type": "llama"}
STEP = [Extension(IDS[0], 0, 3, range(5)), Extension(IDS[1], 0, 1, range(5, 10))]


def assert_equal(found: Rounded, wanted: Rounded) -> None:
    assert torch.equal(found.factors, wanted.factors)
    assert torch.equal(found.numbers.float(), wanted.numbers.float())
    assert found.dtype == wanted.dtype


@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("size", [300, 2100])
def test_norms_round_to_the_numbers_of_two_launches(group: int, size: int) -> None:
    matrix, x = weight_of(3, size, group), activations(5, size, HALF)
    weight = torch.rand(size) + 0.5
    assert_equal(
        rounding.norm_float8(x, weight, 1e-5, matrix), float8.rounded(rms_norm(x, weight, 1e-5), matrix)
    )
    residual = activations(5, size, HALF).roll(1, 0)
    other = residual.clone()
    found = rounding.norm_float8(x, weight, 1e-5, matrix, residual=residual)
    assert_equal(found, float8.rounded(add_rms_norm(x, other, weight, 1e-5), matrix))
    assert torch.equal(residual, other), "the sum is stored"


@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("size", [300, 4200])
def test_gates_round_to_the_numbers_of_two_launches(group: int, size: int) -> None:
    matrix, x = weight_of(3, size, group), activations(3, 2 * size, HALF)
    assert_equal(rounding.gate_float8(x, matrix), float8.rounded(silu_mul(x), matrix))
    assert_equal(rounding.gate_float8(x, matrix, gelu=True), float8.rounded(gelu_mul(x), matrix))


def test_the_twins_round_what_the_kernels_round() -> None:
    matrix, x, weight = weight_of(3, 96, 32), activations(3, 96, torch.float32), torch.ones(96)
    for found, wanted in (
        (rounding.norm_float8(x, weight, 1e-5, matrix), reference.norm_float8(x, weight, 1e-5, matrix)),
        (rounding.gate_float8(x.repeat(1, 2), matrix), reference.gate_float8(x.repeat(1, 2), matrix)),
    ):
        apart = (found.numbers.float() - wanted.numbers.float()).abs()
        assert (apart <= wanted.numbers.float().abs() / 8).all(), "one step of three bits"
        torch.testing.assert_close(found.factors, wanted.factors)
    out = torch.empty(3, 3)
    assert torch.equal(
        reference.multiply_float8(reference.rounded(x, matrix), matrix, out=out),
        reference.float8_matmul(x, matrix),
    )


def step(shape: dict[str, Any], launches: Any, *, float8: bool = False, **given: Any) -> Tensor:
    """The hidden states of `STEP`, by a model whose matrices are float8 if `float8`."""
    runner = runner_of(shape, ops("triton", float8=float8, **given))
    if float8:
        for layer in runner.model.layers:
            for module in layer.modules():
                if isinstance(module, Linear):
                    module.lay_out(as_float8, "cpu")
    launches.clear()
    return runner.forward(pack(STEP, PAGE))


def as_float8(weight: Tensor) -> Rows:
    factors = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / factors).to(torch.float8_e4m3fn)
    return Rows(numbers, factors, group=0, float8_activations=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_step_of_a_float8_model_rounds_in_its_norms_and_gates(family: str, launches: Any) -> None:
    shape = {"model_type": family, "sliding_window": 5}
    wanted = step(shape, launches, float8=True)
    assert [launch.kernel for launch in launches].count("_round") == 4 * LAYERS
    found = step(shape, launches, float8=True, trials=("fused-rounding",))
    names = [launch.kernel for launch in launches]
    assert names.count("_round") == LAYERS, "the attention's output alone"
    assert (names.count("_norm_float8"), names.count("_gate_float8")) == (2 * LAYERS, LAYERS)
    assert torch.equal(found, wanted)


SPANS = [
    [(0, 0, 33), (1, 0, 0), (2, 0, 5)],
    [(1, 0, 1), (0, 33, 67), (2, 5, 6)],  # behind states of chunks, and decodes beside
]


@pytest.mark.parametrize(
    ("heads", "alike"),
    [(Heads(1, 2, 16, 16), False), (NARROW, True)],
    ids=["random", "one token, long memory"],
)
def test_prompts_in_chunks_give_what_the_reference_gives(heads: Heads, alike: bool, launches: Any) -> None:
    """Of one repeated token whose state hardly fades, powers of A would grow to 1e8: T is no series of
    them."""
    layers = [Layer(heads, (67, 1, 6)) for _ in range(2)]
    for layer in layers:
        layer.reset()
        if alike:
            layer.qkv[0][:] = layer.qkv[0][0]
            layer.gates[0][:] = torch.tensor([4.0, -9.0])  # beta and decay near 1
    for spans in SPANS:
        slots = [tape + 2 for tape, _, _ in spans]
        found = layers[0].step(chunked_delta.gated_delta_rule, spans, slots)
        wanted = layers[1].step(reference_delta.gated_delta_rule, spans, slots)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
        for state in ("conv", "recurrent"):
            one, other = (getattr(layer, state) for layer in layers)
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4, equal_nan=True)
    assert [launch.kernel for launch in launches] == 2 * ["_convolve", "_solve", "_scan"]


def test_steps_of_few_tokens_take_the_kernel_that_goes_token_by_token(launches: Any) -> None:
    rule = ops("triton", trials=("chunked-delta",)).gated_delta_rule
    Layer(NARROW, (CHUNK,)).step(rule, [(0, 0, CHUNK)], [0])
    assert [launch.kernel for launch in launches] == ["_convolve", "_recur"]
    Layer(NARROW, (CHUNK + 1,)).step(rule, [(0, 0, CHUNK + 1)], [0])
    assert launches[-1].kernel == "_scan"


@pytest.mark.parametrize("rows", [1, 16, 17, 32])
@pytest.mark.parametrize(("bias", "add"), [(False, False), (True, True)])
def test_skinny_products(rows: int, bias: bool, add: bool, launches: Any) -> None:
    x, weight = torch.randn(rows, 303, dtype=HALF)[:, :300], torch.randn(70, 300, dtype=HALF)
    shift, before = torch.randn(70, dtype=HALF) if bias else None, torch.randn(rows, 70, dtype=HALF)
    out = before.clone()
    assert skinny.matmul(x, weight, shift, out=out, add=add) is out
    wanted = plain.matmul(x, weight, shift, out=before, add=add)
    torch.testing.assert_close(out, wanted, atol=2e-3, rtol=2e-3)
    assert [launch.kernel for launch in launches] == ["_skinny_product"]


def test_few_rows_of_small_matrices_alone_are_skinny(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny, "MOST_WEIGHTS", 48 * 160 - 1)  # all matrices of the model but gate_up
    found, wanted = (step(LLAMA, launches, trials=trials) for trials in ((), ("skinny-products",)))
    assert [launch.kernel for launch in launches].count("_skinny_product") == 3 * LAYERS
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    launches.clear()
    skinny.matmul(torch.ones(33, 8), torch.ones(8, 8))
    assert not launches


def test_whole_prompts_take_the_librarys_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of two has a window, shorter than one prompt. The other steps: behind a prefix, and beside a
    prompt that is too short."""
    windows = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    calls: list[Any] = []
    right = prompts.prompt_attention
    recorded = lambda *given, **options: (calls.append(given[4]), right(*given, **options))[1]  # noqa: E731
    monkeypatch.setattr(prompts, "prompt_attention", recorded)
    monkeypatch.setattr(prompts, "LEAST_TOKENS", 2)
    found, wanted = (
        runner_of(windows, ops("triton", trials=trials)) for trials in (("library-prompts",), ())
    )
    prompt = Extension(IDS[0], 0, 6, range(5))
    for extensions, lens in (
        ([prompt, Extension(IDS[1], 0, 2, range(5, 10))], [[6, 2]]),
        ([Extension(IDS[0], 6, 8, range(5))], []),
        ([prompt, Extension(IDS[1], 0, 1, range(5, 10))], []),
    ):
        calls.clear()
        hidden = found.forward(pack(extensions, PAGE))
        assert calls == lens
        torch.testing.assert_close(hidden, wanted.forward(pack(extensions, PAGE)), atol=1e-4, rtol=0)
