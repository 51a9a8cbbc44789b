"""Inputs of the gated delta rule, for every backend's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.kernels.arguments.gated_delta import DeltaWeights
from ramify.kernels.registry import GatedDeltaRule


@dataclasses.dataclass(frozen=True)
class Heads:
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


class Layer:
    """Random weights and states of six slots, and a tape of random tokens for each of `lengths`."""

    def __init__(
        self, heads: Heads, lengths: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.heads, self.device = heads, device
        conv = random(heads.width, heads.channels) / heads.width**0.5
        rates = (random(heads.heads), random(heads.heads))
        self.weights = DeltaWeights(*(each.to(device) for each in (conv, *rates)))
        self.qkv = [random(length, heads.channels).to(device, dtype) for length in lengths]
        self.gates = [random(length, 2 * heads.heads).to(device, dtype) for length in lengths]
        # As a pool may lay it out: channels next to each other.
        self.conv = random(6, heads.width - 1, heads.channels).to(device).transpose(1, 2)
        self.recurrent = random(6, heads.heads, heads.key_dim, heads.value_dim).to(device)

    def reset(self) -> None:
        """Fill the states with NaN: slots that nobody has written must not matter."""
        self.conv.fill_(torch.nan)
        self.recurrent.fill_(torch.nan)

    def step(
        self, rule: GatedDeltaRule, spans: Sequence[tuple[int, int, int]], slots: Sequence[int]
    ) -> list[Tensor]:
        """The outputs of (tape, start, stop) spans as one packed batch, on `slots`."""
        counts = torch.tensor([0] + [stop - start for _, start, stop in spans])
        pad = self.qkv[0].new_full((counts.sum(), 3), torch.nan)  # rows are views of a wider buffer
        rows = torch.cat([self.qkv[tape][start:stop] for tape, start, stop in spans])
        gates = torch.cat([self.gates[tape][start:stop] for tape, start, stop in spans])
        wide = torch.cat([rows, pad, gates], dim=1)
        b, a = wide[:, -2 * self.heads.heads :].chunk(2, dim=1)
        out = rule(
            wide[:, : self.heads.channels],
            b,
            a,
            self.weights,
            self.conv,
            self.recurrent,
            torch.tensor(slots).to(self.device),
            counts.cumsum(0).int().to(self.device),
            torch.tensor([stop for _, _, stop in spans], dtype=torch.int32).to(self.device),
        )
        return list(out.split(counts[1:].tolist()))


WIDE, SMALL, NARROW = Heads(2, 4, 32, 48), Heads(1, 2, 32, 16), Heads(1, 1, 16, 16, width=2)


def steps_equal(rule: GatedDeltaRule, reference: GatedDeltaRule, layer: Layer, other: Layer) -> float:
    """The largest difference of outputs and states in a prefill, chunks and decodes of three tapes."""
    worst = 0.0
    for spans in (
        [(0, 0, 5), (1, 0, 18), (2, 0, 0)],
        [(0, 5, 6), (1, 18, 20), (2, 0, 1)],
        [(0, 6, 7), (1, 20, 21), (2, 1, 2)],
        [(1, 21, 26), (0, 7, 7)],
    ):
        slots = [tape + 2 for tape, _, _ in spans]
        for got, want in zip(
            layer.step(rule, spans, slots), other.step(reference, spans, slots), strict=True
        ):
            if len(want):
                worst = max(worst, (got.float() - want.float()).abs().max().item())
        for got, want in ((layer.conv, other.conv), (layer.recurrent, other.recurrent)):
            torch.testing.assert_close(got.isnan(), want.isnan())
            worst = max(worst, (got - want).nan_to_num().abs().max().item())
    return worst
