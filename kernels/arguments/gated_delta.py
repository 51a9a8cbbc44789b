"""The weights of a gated delta-net layer's kernel, and the argument checks that all backends share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ramify.kernels.arguments.checks import DTYPES

HEAD_MULTIPLE = 16
"""key_dim and value_dim must be multiples of this: the lanes of an AVX-512 vector, and the least side of a
GPU's tile."""
L2_EPS = 1e-6
"""Added to the sum of squares of queries and keys before the square root (flash-linear-attention,
`l2norm`)."""


class DeltaWeights(NamedTuple):
    """The weights of a gated delta-net layer, all float32 and contiguous.

    conv : (width, channels)
        Weights of the causal depthwise convolution over queries, keys and values; the last row is for the
        newest token.
    a_log, dt_bias : (heads,)
        A token's decay is exp(-exp(a_log) · softplus(a + dt_bias)).
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


class DeltaSizes(NamedTuple):
    tokens: int
    channels: int
    width: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int


def check_gated_delta(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    out: Tensor | None,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> tuple[DeltaSizes, Tensor]:
    """Check the arguments of `gated_delta_rule`. Returns the sizes, and `out` or newly allocated memory."""
    if qkv.dim() != 2 or qkv.dtype not in dtypes or qkv.stride(1) != 1:
        raise ValueError(f"qkv is {tuple(qkv.shape)} {qkv.dtype}; it must be (T, channels), rows contiguous.")
    tokens, channels = qkv.shape
    if recurrent.dim() != 4 or recurrent.dtype != torch.float32 or not recurrent[0].is_contiguous():
        raise ValueError(
            f"recurrent is {tuple(recurrent.shape)} {recurrent.dtype}; it must be (slots, heads, key_dim, "
            "value_dim) float32, slots contiguous."
        )
    _, heads, key_dim, value_dim = recurrent.shape
    key_heads = (channels - heads * value_dim) // (2 * key_dim)
    if 2 * key_heads * key_dim + heads * value_dim != channels or not key_heads or heads % key_heads:
        raise ValueError(
            f"recurrent {tuple(recurrent.shape)} does not fit qkv {tuple(qkv.shape)}: its columns must be "
            "queries and keys of all key heads, then values of all heads, a multiple of the key heads."
        )
    if key_dim % HEAD_MULTIPLE or value_dim % HEAD_MULTIPLE:
        raise ValueError(
            f"key_dim is {key_dim} and value_dim {value_dim}; both must be multiples of {HEAD_MULTIPLE}."
        )
    for name, gate in (("b", b), ("a", a)):
        if gate.shape != (tokens, heads) or gate.dtype != qkv.dtype or gate.stride(1) != 1:
            raise ValueError(f"{name} is {tuple(gate.shape)} {gate.dtype}; it must be ({tokens}, {heads}).")
    width = len(weights.conv)
    for name, weight, shape in (
        ("conv", weights.conv, (width, channels)),
        ("a_log", weights.a_log, (heads,)),
        ("dt_bias", weights.dt_bias, (heads,)),
    ):
        if weight.shape != shape or weight.dtype != torch.float32 or not weight.is_contiguous():
            raise ValueError(f"weights.{name} is {tuple(weight.shape)}; it must be {shape} float32.")
    if width < 2 or conv.shape[1:] != (channels, width - 1) or conv.dtype != torch.float32:
        raise ValueError(
            f"conv is {tuple(conv.shape)} {conv.dtype}; it must be (slots, {channels}, {width} - 1) float32."
        )
    sequences = len(slots)
    if slots.dtype != torch.int64 or not slots.is_contiguous() or len(conv) != len(recurrent):
        raise ValueError("slots must be contiguous int64, and conv and recurrent have as many slots.")
    for name, indices, count in (
        ("query_starts", query_starts, sequences + 1),
        ("kv_lens", kv_lens, sequences),
    ):
        if indices.dtype != torch.int32 or not indices.is_contiguous() or len(indices) != count:
            raise ValueError(f"{name} must be contiguous int32; {sequences} slots need {count} of them.")
    sizes = DeltaSizes(tokens, channels, width, key_heads, heads, key_dim, value_dim)
    result = (tokens, heads, value_dim)
    if out is None:
        return sizes, torch.empty(result, dtype=qkv.dtype, device=qkv.device)
    if out.shape != result or out.dtype != qkv.dtype or not out.is_contiguous():
        raise ValueError(f"out must be {result} {qkv.dtype}, contiguous.")
    return sizes, out


def check_output_gate(
    x: Tensor,
    gate: Tensor,
    norm: tuple[Tensor, float] | None,
    out: Tensor | None,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Tensor:
    if x.dim() != 3 or x.dtype not in dtypes or x.stride()[1:] != (x.shape[2], 1):
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}; it must be (T, heads, size) with contiguous tokens."
        )
    if gate.shape != x.shape or gate.dtype != x.dtype or gate.stride()[1:] != (x.shape[2], 1):
        raise ValueError(f"gate is {tuple(gate.shape)} {gate.dtype}; it must be like x, {tuple(x.shape)}.")
    if norm is not None and (norm[0].shape != x.shape[2:] or norm[0].dtype not in (x.dtype, torch.float32)):
        raise ValueError(f"norm's weight is {tuple(norm[0].shape)} {norm[0].dtype}; x is {tuple(x.shape)}.")
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype != x.dtype or out.stride()[1:] != (x.shape[2], 1):
        raise ValueError(f"out must be {tuple(x.shape)} {x.dtype} with contiguous tokens.")
    return out
