"""Masks, edits and log-probabilities of logits, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import (
    LogitEdits,
    LogProbabilities,
    check_chosen,
    check_edits,
    check_logits,
)


def masked(logits: Tensor, mask: Tensor | None, mask_rows: Tensor | None) -> Tensor:
    """A copy of the logits with forbidden tokens at -inf.

    Parameters
    ----------
    logits : (R, vocab) float32, float16 or bfloat16
    mask : (M, ceil(vocab / 32)) int32; rows contiguous
        Token t is allowed where bit t % 32 of word t // 32 is set.
    mask_rows : (R,) int32
        The row of `mask` for each row of logits; -1 for a row without a mask. Without `mask_rows` row i has
        mask i.
    """
    if mask is None:
        return logits.clone()
    token = torch.arange(logits.shape[1], device=logits.device)
    rows = torch.arange(len(logits), device=logits.device) if mask_rows is None else mask_rows.long()
    allowed = mask[rows.clamp(min=0)][:, token // 32] >> (token % 32) & 1
    refused = (allowed == 0) & (rows >= 0)[:, None]
    return logits.masked_fill(refused, -torch.inf)


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap) in place (arXiv 2408.00118): (R, vocab), rows contiguous; cap above 0."""
    check_logits(logits)
    return logits.div_(cap).tanh_().mul_(cap)


def log_sum(logits: Tensor) -> Tensor:
    """log Σ exp(logits) of each row of (R, vocab): (R,) float32."""
    check_logits(logits)
    return torch.logsumexp(logits.float(), dim=-1)


def edit_logits(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Apply `edits` in place: float32 inside, rounded once. Returns the old logits, (N,).

    Parameters
    ----------
    logits : (R, vocab) float32, float16 or bfloat16; rows contiguous
    edits : N edits; whether their places are within the logits is not checked
    """
    check_logits(logits)
    check_edits(logits, edits)
    rows, tokens = edits.places.long()
    repetition, penalty, bias = edits.amounts
    before = logits[rows, tokens]
    x = before.float()
    x = torch.where(x > 0, x / repetition, x * repetition) - penalty + bias
    logits[rows, tokens] = x.to(logits.dtype)
    return before


def restore_logits(logits: Tensor, edits: LogitEdits, before: Tensor) -> None:
    """Undo `edit_logits`, which returned `before`: log-probabilities need the unmodified logits."""
    check_logits(logits)
    check_edits(logits, edits, before)
    rows, tokens = edits.places.long()
    logits[rows, tokens] = before


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> LogProbabilities:
    """Log-probabilities of one chosen token a row, and of the `top` most likely tokens.

    Equally likely tokens are in the order of their ids. A row with fewer than `top` tokens above -inf has ids
    of -1 at the end.

    Parameters
    ----------
    logits : (R, vocab) float32, float16 or bfloat16, not changed; rows contiguous
    tokens : (R,) int64, contiguous
    top : 0 to `MOST_LOGPROBS`, capped at the vocabulary's size
    """
    check_logits(logits)
    check_chosen(logits, tokens, top)
    exact = logits.double()
    normaliser = torch.logsumexp(exact, dim=-1, keepdim=True)
    chosen = (exact.gather(1, tokens[:, None]) - normaliser)[:, 0]
    values, ids = torch.sort(exact, dim=-1, descending=True, stable=True)
    values, ids = values[:, :top], ids[:, :top]
    ids = ids.masked_fill(values == -torch.inf, -1)
    return LogProbabilities(chosen.float(), ids, (values - normaliser).float())
