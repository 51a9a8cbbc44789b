"""Masking logits: one pass over the words of the mask, most of which allow all of their tokens or none."""

from __future__ import annotations

import numba
import numpy as np
from torch import Tensor

from ramify.kernels.sampling_inputs import check_logits, check_mask


@numba.njit(numba.void(numba.float32[:, :], numba.int32[:, ::1], numba.int32[::1]), cache=True, nogil=True)
def _apply_mask(logits: np.ndarray, mask: np.ndarray, mask_rows: np.ndarray) -> None:
    vocab = logits.shape[1]
    for row in range(logits.shape[0]):
        which = mask_rows[row]
        if which < 0:
            continue
        for word in range(mask.shape[1]):
            bits = np.uint32(mask[which, word])
            if bits == np.uint32(0xFFFFFFFF):
                continue
            first = word * 32
            last = min(first + 32, vocab)
            if bits == 0:
                for token in range(first, last):
                    logits[row, token] = -np.inf
                continue
            for token in range(first, last):
                if not (bits >> np.uint32(token - first)) & np.uint32(1):
                    logits[row, token] = -np.inf


def apply_mask(logits: Tensor, mask: Tensor, mask_rows: Tensor | None = None) -> None:
    """As `reference.logits.apply_mask`, for float32 logits."""
    check_logits(logits)
    check_mask(logits, mask, mask_rows)
    rows = np.arange(len(logits), dtype=np.int32) if mask_rows is None else mask_rows.numpy()
    _apply_mask(logits.numpy(), mask.numpy(), rows)
