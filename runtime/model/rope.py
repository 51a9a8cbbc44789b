"""Rotary position embedding (RoFormer, arXiv 2104.09864) as a complex multiplication, in place.

The two elements of a rotary pair are neighbours, as in the paper. So a head is a row of complex numbers, and
rotating it is one multiplication. In Hugging Face checkpoints the two elements are half a head apart;
`weights.py` reorders the rows of the projections at load. Attention scores stay the same, because queries and
keys are reordered alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ramify.runtime.model.shape.config import Rope


def rotations(rope: Rope, head_dim: int, length: int) -> Tensor:
    """exp(i · position · frequency) as (length, head_dim / 2) complex64; 1 for pairs that do not rotate."""
    rotated = rope.rotated(head_dim)
    radians, scale = frequencies(rope, rotated, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), radians)
    rotating = torch.complex(angles.cos() * scale, angles.sin() * scale)
    still = torch.ones(length, (head_dim - rotated) // 2, dtype=rotating.dtype)
    return torch.cat((rotating, still), 1)


def rotate_(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads in place. x: (T, heads, head_dim), rotation: (T, head_dim / 2) complex64.

    Narrower dtypes are multiplied in float32 and rounded once.
    """
    pairs = (x.shape[0], x.shape[1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(pairs)).mul_(rotation[:, None])
        return x
    exact = x.float()
    torch.view_as_complex(exact.view(pairs)).mul_(rotation[:, None])
    return x.copy_(exact)


def frequencies(rope: Rope, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Radians per position, (head_dim / 2,) float32, and the factor of cos and sin.

    Keys are cached after the rotation, so longrope's factors are chosen by `length`, the engine's context. By
    default this is at most the original context (`ModelShape.default_context_length`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32), 1.0
    if rope.kind == "longrope":
        factors = rope.long_factors if length > rope.original_context_length else rope.factors
        scale = rope.attention_factor
        if scale is None:
            stretched = rope.factor > 1.0
            scale = (
                math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context_length))
                if stretched
                else 1.0
            )
        return plain / torch.tensor(factors, dtype=torch.float32), scale
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        scale = rope.attention_factor
        if scale is None:
            scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0
        return _yarn(rope, plain, head_dim), scale
    return plain, 1.0


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    rotations = rope.original_context_length * plain / (2 * math.pi)  # within the original context
    ramp = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, ramp.clamp(0.0, 1.0))


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """The (fractional) index of the frequency that makes `rotations` full turns within the original
        context."""
        return (
            head_dim
            * math.log(rope.original_context_length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0.0, 1.0))
