"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) with its short convolution, and output gates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.arguments.gated_delta import L2_EPS, DeltaWeights, check_gated_delta, check_output_gate


def gated_delta_rule(
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaWeights,
    conv: Tensor,
    recurrent: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """One layer's linear attention over a packed ragged batch; reads and writes the states of its sequences.

    For each token: the causal convolution over the last `width` rows of qkv, then SiLU; q and k are divided
    by their L2 norms, and q by sqrt(key_dim). With the state S, (key_dim, value_dim), of a head:

        S ← exp(-exp(a_log) · softplus(a + dt_bias)) · S
        S ← S + sigmoid(b) · k ⊗ (v - kᵀS)
        result: qᵀS

    All in float32, the result rounded once. A sequence whose first new token is at position 0 starts from
    zeros, whatever its slot holds. A sequence without new tokens keeps its state.

    Parameters
    ----------
    qkv : (T, channels) float32 or bfloat16; rows contiguous
        Queries of all key heads, keys of all key heads, values of all heads. Consecutive heads share a key
        head.
    b, a : (T, heads), dtype of qkv; rows contiguous
    weights : DeltaWeights
    conv : (slots, channels, width - 1) float32, of any strides, changed in place
    recurrent : (slots, heads, key_dim, value_dim) float32, each slot contiguous, changed in place
    slots : (S,) int64
        The slot of each sequence. No two sequences with new tokens may have the same slot.
    query_starts : (S + 1,) int32
        The new tokens of sequence s are rows query_starts[s] to query_starts[s + 1] of qkv.
    kv_lens : (S,) int32
        Tokens of each sequence, new ones included.
    out : (T, heads, value_dim), dtype of qkv, contiguous, optional

    Returns
    -------
    (T, heads, value_dim), dtype of qkv
    """
    sizes, out = check_gated_delta(qkv, b, a, weights, conv, recurrent, slots, query_starts, kv_lens, out)
    taps, group = sizes.width - 1, sizes.heads // sizes.key_heads
    keys = sizes.key_heads * sizes.key_dim
    decays = torch.exp(-weights.a_log.exp() * F.softplus(a.float() + weights.dt_bias))
    betas = b.float().sigmoid()
    starts, lens = query_starts.tolist(), kv_lens.tolist()
    for index, slot in enumerate(slots.tolist()):
        first, last = starts[index], starts[index + 1]
        count = last - first
        if count == 0:
            continue
        fresh = lens[index] == count
        history = torch.zeros_like(conv[slot]) if fresh else conv[slot]
        state = torch.zeros_like(recurrent[slot]) if fresh else recurrent[slot]
        rows = torch.cat([history.t(), qkv[first:last].float()])
        mixed = F.silu(
            sum((weights.conv[tap] * rows[tap : tap + count] for tap in range(taps + 1)), 0.0 * rows[0])
        )
        q, k, v = mixed.split([keys, keys, sizes.heads * sizes.value_dim], dim=1)
        q, k = (_normalised(x.unflatten(1, (sizes.key_heads, -1))) for x in (q, k))
        q, k = (x.repeat_interleave(group, 1) for x in (q * sizes.key_dim**-0.5, k))
        v = v.unflatten(1, (sizes.heads, -1))
        for token in range(count):
            state = state * decays[first + token, :, None, None]
            missing = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
            step = betas[first + token, :, None] * missing
            state = state + k[token, :, :, None] * step[:, None]
            out[first + token] = torch.einsum("hkv,hk->hv", state, q[token])
        conv[slot], recurrent[slot] = rows[-taps:].t(), state
    return out


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def output_gate(
    x: Tensor, gate: Tensor, *, norm: tuple[Tensor, float] | None = None, out: Tensor | None = None
) -> Tensor:
    """x · sigmoid(gate), the output gate of attention (arXiv 2505.06708). With `norm` it is norm(x) ·
    silu(gate), the output gate of gated delta-net layers. float32 inside, rounded once.

    Parameters
    ----------
    x, gate : (T, heads, size) float32 or bfloat16; each token contiguous
    norm : weight (size,), float32 or dtype of x, and epsilon, optional
        Of the RMS norm over each head.
    out : like x, optional
        Receives the result; may be x itself.
    """
    out = check_output_gate(x, gate, norm, out)
    if norm is None:
        return out.copy_(x.float() * gate.float().sigmoid())
    weight, eps = norm
    return out.copy_(F.rms_norm(x.float(), weight.shape, weight.float(), eps) * F.silu(gate.float()))
