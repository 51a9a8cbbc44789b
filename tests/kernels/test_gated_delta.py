"""The compiled gated delta rule beside its reference, and the bits of its results."""

from __future__ import annotations

import itertools

import pytest
import torch

from ramify.kernels.registry import ops
from tests.kernels.backends import CPU
from tests.kernels.delta_cases import NARROW, WIDE, Layer, steps_equal

TORCH = ops("torch")
LENGTHS = (7, 26, 2)


@pytest.mark.parametrize("heads", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_give_what_the_reference_gives(heads, dtype):
    layers = [Layer(heads, LENGTHS, dtype) for _ in range(2)]
    for layer in layers:
        layer.reset()
    # Sums of at most 48 products in float32; outputs in bfloat16 are rounded to 8 bits.
    bound = 2e-5 if dtype == torch.float32 else 2**-6
    assert steps_equal(CPU.gated_delta_rule, TORCH.gated_delta_rule, *layers) < bound
    assert layers[0].recurrent[[0, 1, 5]].isnan().all(), "slots without a sequence stay as they were"


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_chunks_or_on_the_batch(threads):
    layer = Layer(WIDE, (150, 30))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = layer.step(CPU.gated_delta_rule, [(0, 0, 150)], [0])[0]
        state, conv = layer.recurrent[0].clone(), layer.conv[0].clone()
        parts = []
        for start, stop in itertools.pairwise([0, 1, 3, 20, 36, 37, 100, 150]):
            other = (1, 0, 30) if start == 3 else (1, min(start, 29), min(start, 29) + 1)
            parts.append(layer.step(CPU.gated_delta_rule, [other, (0, start, stop)], [3, 1])[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(layer.recurrent[1], state)
    assert torch.equal(layer.conv[1], conv)


def test_a_copied_state_goes_on_where_the_other_did():
    layer = Layer(WIDE, (20,))
    whole = layer.step(CPU.gated_delta_rule, [(0, 0, 20)], [0])[0]
    layer.step(CPU.gated_delta_rule, [(0, 0, 12)], [1])
    layer.conv[4], layer.recurrent[4] = layer.conv[1], layer.recurrent[1]
    layer.step(CPU.gated_delta_rule, [(0, 12, 15)], [1])
    assert torch.equal(layer.step(CPU.gated_delta_rule, [(0, 12, 20)], [4])[0], whole[12:])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_gates(dtype, norm):
    wide = 4 * torch.randn(5, 9, 32).to(dtype)
    x, gate = wide[:, :4], wide[:, 4:8]
    weight = (torch.randn(32), 1e-5) if norm else None
    exact, factor = x.double(), gate.double().sigmoid()
    if weight is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight[0].double()
        factor = factor * gate.double()
    for backend in (CPU, TORCH):
        out = backend.output_gate(x, gate, norm=weight)
        # Half a unit in the last place, and the roundings of the factors.
        bound = 1e-6 if dtype == torch.float32 else 2**-8
        assert ((out.double() - exact * factor).abs() <= bound * (exact * factor).abs() + 1e-9).all()
    assert backend.output_gate(x, gate, norm=weight, out=x) is x


@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])
def test_refusals_name_the_argument(backend):
    layer = Layer(WIDE, (4,))
    for name, value, words in (
        ("recurrent", layer.recurrent[:, :3], "recurrent"),
        ("conv", layer.conv[:, :, :2], "conv is"),
        ("recurrent", layer.recurrent[:, :, :, :40].contiguous(), "recurrent"),
    ):
        before = getattr(layer, name)
        setattr(layer, name, value)
        with pytest.raises(ValueError, match=words):
            layer.step(backend.gated_delta_rule, [(0, 0, 4)], [0])
        setattr(layer, name, before)
    with pytest.raises(ValueError, match="gate is"):
        backend.output_gate(layer.recurrent[0], layer.recurrent[0, :, :8])


def test_a_wrong_slot_is_refused():
    layer = Layer(WIDE, (4,))
    with pytest.raises(ValueError, match="slot"):
        layer.step(CPU.gated_delta_rule, [(0, 0, 4)], [6])
