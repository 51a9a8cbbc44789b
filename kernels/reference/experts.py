"""Mixtures of experts (arXiv 1701.06538, 2401.04088), in torch. Only chosen experts are read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.arguments.checks import check_experts, check_packed_experts
from ramify.kernels.reference.activation import expert_gate
from ramify.kernels.reference.linear import linear
from ramify.kernels.reference.norm import rms_norm
from ramify.kernels.weights.packed import PackedWeight
from ramify.kernels.weights.routing import LEAST_SUM, Routing
from ramify.kernels.weights.stack import ExpertMatrices, PackedExperts


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The chosen experts, (T, top_k) int32, and their weights, (T, top_k) float32, both in descending order
    of score. No value is copied to the host.

    Parameters
    ----------
    logits : (T, E) float32
    correction : (E,) float32; optional
    """
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = choice.unflatten(1, (routing.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(routing.top_groups, -1).indices
        out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, value=False)
        choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
    chosen = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen.int(), weights * routing.scale


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: ExpertMatrices,
    *,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Σ weight · down(gate(gate_up(x))) over each token's chosen experts.

    The intermediate activations of an expert are rounded to the dtype of x; the sum is float32, rounded once.
    In a kernel the bits of a row depend on that row, its choice and the matrices alone, and the launch grid
    does not depend on the choice.

    Parameters
    ----------
    x : (T, hidden), the dtype of the matrices; rows contiguous
    chosen : (T, top_k) int32, contiguous; no row has an expert twice
    weights : (T, top_k) float32, contiguous
    out : (T, hidden), dtype of x, rows contiguous; optional
        Receives the result. Must not overlap x.
    add : bool
        Add the result to `out`, before rounding.
    """
    out = check_experts(x, chosen, weights, experts, out, add)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, place = torch.where(chosen == expert)
        up_bias, down_bias = (
            None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias)
        )
        inner = expert_gate(F.linear(x[rows], experts.gate_up[expert], up_bias), experts.clamp)
        y = F.linear(inner, experts.down[expert], down_bias)
        total.index_add_(0, rows, y.float() * weights[rows, place, None])
    return out.copy_(total + out.float() if add else total)


def expert_block(
    x: Tensor,
    experts: PackedExperts,
    *,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """A mixture of packed experts with its router and its shared expert.

    Intermediate activations have the dtype of x; logits and sums are float32, and the result is rounded once.

    Parameters
    ----------
    x : (T, hidden) float32 or bfloat16; rows contiguous
    norm, out, add : as in `linear`; `out` has the dtype of x, and may be x where `add` is set
    """
    out = check_packed_experts(x, experts, norm, out, add)
    count = len(experts.gate_up)
    if norm is not None:
        x = rms_norm(x, *norm)

    def product(x: Tensor, weight: PackedWeight) -> Tensor:
        out = torch.empty((len(x), weight.results), dtype=torch.float32, device=x.device)
        return linear(x, weight, out=out)

    logits = product(x, experts.router)
    chosen, weights = route(logits[:, :count], experts.routing, experts.correction)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, place = torch.where(chosen == expert)
        y = product(linear(x[rows], experts.gate_up[expert]), experts.down[expert])
        total.index_add_(0, rows, y * weights[rows, place, None])
    if experts.shared is not None:
        gate_up, down = experts.shared
        y = product(linear(x, gate_up), down)
        total += y * logits[:, count:].sigmoid() if experts.router.outputs > count else y
    return out.copy_(total + out.float() if add else total)
