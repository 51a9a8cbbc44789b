"""Sampling: bias and penalties, grammar mask, temperature, top-k, top-p, min-p, and one draw per row.

Every random number comes from the caller, one per row, so that a request's tokens depend on its own
seed and not on the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from ramify.kernels.arguments.sampling_inputs import (
    NONE_COUNTED,
    LogitEdits,
    RowEdits,
    SamplingOptions,
    TokenCounts,
)
from ramify.kernels.reference.logits import edit_logits, log_sum
from ramify.kernels.reference.sampling import sample_tokens
from ramify.kernels.registry import LogSum, SampleTokens
from ramify.sampling_params import SamplingParams


@dataclasses.dataclass(slots=True)
class SamplingRow:
    """Everything but the logits that the token of one row depends on."""

    params: SamplingParams
    uniform: float
    """In [0, 1); unused for greedy rows."""
    counts: TokenCounts | None = None
    """Of the text so far, where a penalty is set."""
    mask: np.ndarray | None = None
    """(ceil(vocab / 32),) int32 bitmask of the tokens that the grammar allows; None allows all."""
    banned: Sequence[int] = ()
    """Tokens that are not allowed yet: stop tokens before `min_tokens`."""


RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of the token, and the most likely (id, log-probability) pairs."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostDrawing:
    """Tokens, (R,) int64, and the log-probabilities that were asked for."""

    tokens: torch.Tensor
    logprobs: list[RowLogprobs]

    def result(self) -> tuple[list[int], list[RowLogprobs]]:
        return self.tokens.tolist(), self.logprobs


class HostSampler:
    """Samples on the host, before it returns. `sample_tokens` and `log_sum` take float32 logits."""

    def __init__(self, sample_tokens: SampleTokens = sample_tokens, log_sum: LogSum = log_sum) -> None:
        self._sample_tokens, self._log_sum = sample_tokens, log_sum

    def begin(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], asked: Sequence[int], top: int
    ) -> HostDrawing:
        """Choose a token for each row of `logits`, (R, vocab), which may be changed.

        asked : rows whose log-probabilities are wanted: of the chosen token and of the `top` most likely ones
        """
        logits = logits.float()
        original = logits[list(asked)].clone() if asked else None
        tokens = sample(logits, rows, self._sample_tokens)
        found: list[RowLogprobs] = []
        if original is not None:
            found = log_probabilities(original, tokens[list(asked)], top, self._log_sum)
        return HostDrawing(tokens, found)

    def log_probabilities(self, logits: torch.Tensor, tokens: np.ndarray, top: int) -> list[RowLogprobs]:
        """For each row the log-probabilities of its token in `tokens`, (R,) int, and of the `top`
        likeliest."""
        chosen = torch.from_numpy(tokens.astype(np.int64))
        return log_probabilities(logits.float(), chosen, top, self._log_sum)


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], sample_tokens: SampleTokens = sample_tokens
) -> torch.Tensor:
    """Choose one token per row, (R,) int64.

    logits : (R, vocab) float32, changed in place by biases and penalties
    """
    edits = row_edits(rows)
    if any(row is not None for row in edits):
        edit_logits(logits, LogitEdits.from_rows([row or RowEdits() for row in edits]))
    masks = [spec.mask for spec in rows]
    masked = () if all(mask is None for mask in masks) else stacked(masks)
    return sample_tokens(logits, options_of(rows), *masked)


def options_of(rows: Sequence[SamplingRow], device: torch.device | str = "cpu") -> SamplingOptions:
    """The sampling parameters of `rows` as tensors on `device`."""
    params = [row.params for row in rows]
    return SamplingOptions.from_columns(
        [each.temperature for each in params],
        [max(each.top_k, 0) for each in params],
        [each.top_p for each in params],
        [each.min_p for each in params],
        [row.uniform for row in rows],
        device,
    )


def row_edits(rows: Sequence[SamplingRow]) -> list[RowEdits | None]:
    """The penalties, biases and banned tokens of each row; None where it has none."""
    return [
        RowEdits(
            row.counts or NONE_COUNTED,
            row.params.repetition_penalty,
            row.params.presence_penalty,
            row.params.frequency_penalty,
            row.params.logit_bias,
            row.banned,
        )
        if row.counts is not None or row.banned or row.params.logit_bias
        else None
        for row in rows
    ]


@torch.inference_mode()
def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, log_sum: LogSum = log_sum
) -> list[RowLogprobs]:
    """Log-probabilities of one chosen token a row and of the `top` most likely ones.

    Parameters
    ----------
    logits : (R, vocab) float32, unmodified
    tokens : (R,) int64
    """
    normaliser = log_sum(logits)
    chosen = (logits.gather(1, tokens[:, None])[:, 0] - normaliser).tolist()
    if top == 0:
        return [(value, ()) for value in chosen]
    values, ids = torch.topk(logits, min(top, logits.shape[1]), dim=-1)
    pairs = zip(ids.tolist(), (values - normaliser[:, None]).tolist(), strict=True)
    best = [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    return list(zip(chosen, best, strict=True))


def stacked(
    masks: Sequence[np.ndarray | None], out: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masks that are not None as (M, words) int32, in `out` if given, and for each mask its row there or
    -1, (len(masks),)."""
    held = np.array([mask is not None for mask in masks])
    rows = np.where(held, np.cumsum(held) - 1, -1).astype(np.int32)
    words = np.stack([mask for mask in masks if mask is not None], out=out)
    return torch.from_numpy(words), torch.from_numpy(rows)
