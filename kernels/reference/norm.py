"""RMS normalisation, alone and with the residual addition before it, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.arguments.checks import check_add_norm, check_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (arXiv 1910.07467): float32 inside, rounded once.

    Parameters
    ----------
    x : (T, size) or (T, heads, size) float32 or bfloat16; the last axis contiguous
    weight : (size,), float32 or dtype of x, contiguous
    eps : float
    out : like x, optional
        Receives the result; may be x itself.
    """
    out = check_norm(x, weight, out)
    return out.copy_(F.rms_norm(x.float(), weight.shape, weight.float(), eps))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Add x to residual in place, and return the RMS norm of the rounded sum. The bits are the same as those
    of an addition and a call of `rms_norm`.

    Parameters
    ----------
    x : (T, size) float32, float16 or bfloat16; rows contiguous
    residual : like x, changed in place; must not overlap x or out
    weight : (size,), float32 or dtype of x, contiguous
    eps : float
    out : like x, optional
        Receives the result; may be x itself.
    """
    out = check_add_norm(x, residual, weight, out)
    residual.copy_(residual.float() + x.float())
    return out.copy_(F.rms_norm(residual.float(), weight.shape, weight.float(), eps))
