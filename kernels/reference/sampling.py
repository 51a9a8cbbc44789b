"""Sampling of tokens, in torch and float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import SamplingOptions, check_logits, check_mask, check_options
from ramify.kernels.reference.logits import masked


def sample_tokens(
    logits: Tensor,
    options: SamplingOptions,
    mask: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Tensor:
    """Sample one token a row, (R,) int64, by mask, temperature, top-k, top-p, min-p and a uniform number.

    Inverse transform sampling: the result is the first token at which the cumulative probability passes the
    row's uniform number. Rows with top-k or top-p accumulate in descending order of probability, with the
    lower id first among equals; other rows accumulate in the order of the ids. A kernel computes
    probabilities in float32 and accumulates them in float64. Rows do not depend on each other. A row whose
    tokens are all forbidden gives token 0.

    Parameters
    ----------
    logits : (R, vocab) float32, float16 or bfloat16, not changed; rows contiguous
    options : of R rows
    mask, mask_rows : as in `logits.masked`; optional
    """
    check_logits(logits)
    check_options(logits, options)
    check_mask(logits, mask, mask_rows)
    temperature, top_k, top_p, min_p = options.values[:4].float()[:, :, None]
    uniform = options.values[4, :, None]
    x = masked(logits.float(), mask, mask_rows)
    best = torch.argmax(x, dim=-1)
    x = x / torch.where(temperature > 0, temperature, 1.0)
    probs = torch.exp((x - x.amax(dim=-1, keepdim=True)).double()).nan_to_num(0.0)

    straight = _invert(torch.where(probs < min_p, 0.0, probs), uniform)
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(1, order)
    rank = torch.arange(x.shape[1], device=x.device)
    ranked = torch.where((rank < top_k) | (top_k == 0), ranked, 0.0)
    limit = top_p.double() * ranked.sum(dim=-1, keepdim=True)
    before = torch.cumsum(ranked, dim=-1) - ranked
    ranked = torch.where(((before < limit) | (top_p >= 1)) & (ranked >= min_p), ranked, 0.0)
    drawn = order.gather(1, _invert(ranked, uniform)[:, None])[:, 0]

    drawn = torch.where(((top_k > 0) | (top_p < 1))[:, 0], drawn, straight)
    refused = x.amax(dim=-1) == -torch.inf
    return torch.where((temperature[:, 0] > 0) & ~refused, drawn, best)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    mass = torch.cumsum(probs, dim=-1)
    total = mass[:, -1:]
    # A product that rounds up to the whole mass must not select a token of probability 0.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, target, right=True)[:, 0].clamp(max=probs.shape[1] - 1)
