"""Gated activations of SwiGLU and GEGLU, and gpt-oss's, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.arguments.checks import check_gated
from ramify.kernels.weights.routing import ClampedGate


def silu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) · up for x = [gate, up] (arXiv 2002.05202): float32 inside, rounded once.

    Parameters
    ----------
    x : (T, 2 size) float32, float16 or bfloat16; rows contiguous
    out : (T, size), dtype of x, rows contiguous; optional
        Receives the result. Must not overlap x.
    """
    out = check_gated(x, out)
    gate, up = x.float().chunk(2, dim=-1)
    return out.copy_(F.silu(gate) * up)


def gelu_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """As `silu_mul`, with the tanh approximation of gelu (arXiv 1606.08415)."""
    out = check_gated(x, out)
    gate, up = x.float().chunk(2, dim=-1)
    return out.copy_(F.gelu(gate, approximate="tanh") * up)


def expert_gate(y: Tensor, clamp: ClampedGate | None) -> Tensor:
    """The gated activation of experts, (…, 2 size) to (…, size), in the dtype of y. `clamp` None: SwiGLU."""
    gate, up = y.chunk(2, dim=-1)
    if clamp is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * gate * torch.sigmoid(clamp.alpha * gate)
