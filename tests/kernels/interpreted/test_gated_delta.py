"""The gated delta rule and output gates in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.reference import gated_delta as reference
from ramify.kernels.triton import gated_delta
from tests.kernels.delta_cases import NARROW, SMALL, Layer, steps_equal


@pytest.mark.parametrize("heads", [SMALL, NARROW], ids=["small", "narrow"])
def test_steps_give_what_the_reference_gives(heads):
    layers = [Layer(heads, (7, 26, 2)) for _ in range(2)]
    for layer in layers:
        layer.reset()
    assert steps_equal(gated_delta.gated_delta_rule, reference.gated_delta_rule, *layers) < 2e-5
    assert layers[0].recurrent[[0, 1, 5]].isnan().all(), "slots without a sequence stay as they were"


def test_bits_do_not_depend_on_chunks_or_on_the_batch():
    layer = Layer(NARROW, (20, 6))
    whole = layer.step(gated_delta.gated_delta_rule, [(0, 0, 20)], [0])[0]
    first = layer.step(gated_delta.gated_delta_rule, [(1, 0, 6), (0, 0, 7)], [3, 1])[1]
    rest = layer.step(gated_delta.gated_delta_rule, [(0, 7, 20)], [1])[0]
    assert torch.equal(torch.cat([first, rest]), whole)
    assert torch.equal(layer.recurrent[1], layer.recurrent[0])


@pytest.mark.parametrize("norm", [False, True])
def test_output_gates(norm):
    wide = 4 * torch.randn(5, 9, 48)
    weight = (torch.randn(48), 1e-5) if norm else None
    gate = gated_delta.output_gate(wide[:, :4], wide[:, 4:8], norm=weight)
    torch.testing.assert_close(gate, reference.output_gate(wide[:, :4], wide[:, 4:8], norm=weight))
