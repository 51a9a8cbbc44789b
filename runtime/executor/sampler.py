"""Sampling: bias and penalties, grammar mask, temperature, top-k, top-p, min-p, and one draw per row.

Every random number comes from the caller, one per row, so that a request's tokens depend on its own
seed and not on the batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.arguments.device_counts import DeviceCounts
from ramify.kernels.arguments.sampling_inputs import (
    NONE_COUNTED,
    LogitEdits,
    LogProbabilities,
    RowEdits,
    SamplingOptions,
    TokenCounts,
)
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.reference.logits import edit_logits, log_sum
from ramify.kernels.reference.sampling import sample_tokens
from ramify.kernels.registry import LogSum, SampleTokens, SamplingOps
from ramify.sampling_params import SamplingParams


@dataclasses.dataclass(slots=True)
class SamplingRow:
    """Inputs of one row's draw, besides its logits."""

    params: SamplingParams
    uniform: float
    """The random number of the draw, in [0, 1); unused for greedy rows."""
    counts: TokenCounts | None = None
    """Counts of the tokens so far, if a penalty is set."""
    mask: np.ndarray | None = None
    """(ceil(vocab / 32),) int32 bitmask of the tokens that the grammar allows; None allows all."""
    banned: Sequence[int] = ()
    """Forbidden tokens: the stop tokens, until `min_tokens` tokens have been written."""


@dataclasses.dataclass(slots=True)
class SamplingBatch:
    """Inputs of the draws of R rows.

    options : (5, R) float64, as `SamplingOptions.values`
    edits : the penalties, biases and banned tokens by row, for rows that have any
    masks : for each row as `SamplingRow.mask`; empty if no row has a mask
    """

    options: np.ndarray
    edits: Mapping[int, RowEdits]
    masks: Sequence[np.ndarray | None]

    @staticmethod
    def of(rows: Sequence[SamplingRow]) -> SamplingBatch:
        columns = [
            (
                row.params.temperature,
                max(row.params.top_k, 0),
                row.params.top_p,
                row.params.min_p,
                row.uniform,
            )
            for row in rows
        ]
        edits = {place: row_edits(row.params, row.counts, row.banned) for place, row in enumerate(rows)}
        return SamplingBatch(
            np.array(columns).T.copy(),
            {place: edit for place, edit in edits.items() if edit is not None},
            [row.mask for row in rows] if any(row.mask is not None for row in rows) else (),
        )

    def row_edits(self) -> list[RowEdits | None]:
        """The edits of each row; None for a row without any."""
        return [self.edits.get(row) for row in range(self.options.shape[1])]


def row_edits(params: SamplingParams, counts: TokenCounts | None, banned: Sequence[int]) -> RowEdits | None:
    """The penalties, biases and banned tokens of a row; None if it has none of these."""
    if counts is None and not banned and not params.logit_bias:
        return None
    return RowEdits(
        counts or NONE_COUNTED,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        params.logit_bias,
        banned,
    )


RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of the chosen token, and the most likely tokens as (id, log-probability) pairs."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostDrawing:
    """Tokens, (R,) int64, and the log-probabilities of the `asked` rows."""

    tokens: Tensor
    logprobs: list[RowLogprobs]

    def result(self) -> tuple[list[int], list[RowLogprobs]]:
        return self.tokens.tolist(), self.logprobs


class HostSampler:
    """Sampler on the host: the tokens are computed when `begin_draw` returns. `sample_tokens` and `log_sum`
    take float32 logits."""

    def __init__(self, sample_tokens: SampleTokens = sample_tokens, log_sum: LogSum = log_sum) -> None:
        self._sample_tokens, self._log_sum = sample_tokens, log_sum

    def begin_draw(self, logits: Tensor, batch: SamplingBatch, asked: Sequence[int], top: int) -> HostDrawing:
        """Choose a token for each row of `logits`, (R, vocab), which may be changed.

        asked : rows that need log-probabilities: of the chosen token and of the `top` most likely tokens
        """
        logits = logits.float()
        original = logits[list(asked)].clone() if asked else None
        tokens = sample(logits, batch, self._sample_tokens)
        found: list[RowLogprobs] = []
        if original is not None:
            found = log_probabilities(original, tokens[list(asked)], top, self._log_sum)
        return HostDrawing(tokens, found)

    def log_probabilities(self, logits: Tensor, tokens: np.ndarray, top: int) -> list[RowLogprobs]:
        """Log-probabilities of the token in `tokens`, (R,) int, of each row, and of the row's `top` likeliest
        tokens."""
        chosen = torch.from_numpy(tokens.astype(np.int64))
        return log_probabilities(logits.float(), chosen, top, self._log_sum)


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch, sample_tokens: SampleTokens = sample_tokens) -> Tensor:
    """Choose one token per row, (R,) int64.

    logits : (R, vocab) float32, changed in place by biases and penalties
    """
    if batch.edits:
        edit_logits(logits, LogitEdits.from_rows([row or RowEdits() for row in batch.row_edits()]))
    masked = stacked(batch.masks) if batch.masks else ()
    return sample_tokens(logits, SamplingOptions.of(batch.options), *masked)


@torch.inference_mode()
def log_probabilities(
    logits: Tensor, tokens: Tensor, top: int, log_sum: LogSum = log_sum
) -> list[RowLogprobs]:
    """Log-probabilities, for each row, of the chosen token and of the `top` most likely tokens.

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


def stacked(masks: Sequence[np.ndarray | None], out: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """(the masks that are not None, stacked as (M, words) int32; the row of each mask in the stack,
    (len(masks),) int32, -1 for None). `out`, if given, receives the stack."""
    held = np.array([mask is not None for mask in masks])
    rows = np.where(held, np.cumsum(held) - 1, -1).astype(np.int32)
    words = np.stack([mask for mask in masks if mask is not None], out=out)
    return torch.from_numpy(words), torch.from_numpy(rows)


class DeviceSampler:
    """Sampler on a device. `begin_draw` only launches kernels; `DeviceDrawing.result` waits for them."""

    def __init__(self, ops: SamplingOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self.counts = DeviceCounts(device)
        self._words = torch.empty(0, 0, dtype=torch.int32)
        """Buffer in which masks are put together, pinned for a CUDA device: allocating pinned memory in each
        step, and copying the masks to it, would double the work."""
        self._sent: torch.cuda.Event | None = None
        """Event after which the last step's masks have been copied from `_words`."""

    @torch.inference_mode()
    def begin_draw(
        self, logits: Tensor, batch: SamplingBatch, asked: Sequence[int], top: int
    ) -> DeviceDrawing:
        edits = self.counts.edits(batch.row_edits()) if batch.edits else None
        before = None if edits is None else self._ops.edit_logits(logits, edits)
        options = SamplingOptions.of(batch.options, self._device)
        tokens = self._ops.sample_tokens(logits, options, *self._masks(batch.masks))
        if edits is not None and before is not None:
            self._ops.restore_logits(logits, edits, before)
        if not asked:
            return DeviceDrawing(tokens, None)
        index = to_device(torch.tensor(asked, dtype=torch.int64), self._device)
        found = self._ops.log_probabilities(logits[index], tokens[index], top)
        return DeviceDrawing(tokens, found)

    @torch.inference_mode()
    def log_probabilities(self, logits: Tensor, tokens: np.ndarray, top: int) -> list[RowLogprobs]:
        known = to_device(torch.from_numpy(tokens.astype(np.int64)), self._device)
        return _as_rows(*self._ops.log_probabilities(logits, known, top))

    def warm_up(self, logits: Tensor) -> None:
        """Compile every kernel that sampling from `logits`, (1, vocab), can launch. Changes `logits`."""
        words = np.zeros(-(-logits.shape[1] // 32), np.int32)
        for params, mask in itertools.product(
            (SamplingParams(temperature=0.0, logit_bias={0: 1.0}), SamplingParams(temperature=1.0, top_k=1)),
            (None, words),
        ):
            row = SamplingRow(params, uniform=0.0, mask=mask)
            for top in (0, 1):
                self.begin_draw(logits, SamplingBatch.of([row]), [0], top)

    def _masks(self, masks: Sequence[np.ndarray | None]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not masks:
            return None, None
        cuda = self._device.type == "cuda"
        count, width = sum(mask is not None for mask in masks), max(len(m) for m in masks if m is not None)
        if len(self._words) < count or self._words.shape[1] != width:
            rows_of_words = max(count, 2 * len(self._words))
            self._words = torch.empty(rows_of_words, width, dtype=torch.int32, pin_memory=cuda)
        elif self._sent is not None:
            self._sent.synchronize()
        words, places = stacked(masks, out=self._words[:count].numpy())
        on_device = words.to(self._device, non_blocking=True)
        if cuda:
            self._sent = torch.cuda.Event()
            self._sent.record()
        return on_device, to_device(places, self._device)


class DeviceDrawing:
    """Tokens that are being copied to the host. `result` waits for the copy, not for kernels launched after
    it."""

    def __init__(self, tokens: Tensor, found: LogProbabilities | None) -> None:
        self.tokens = tokens
        self._found = [_to_host(tokens), *(() if found is None else map(_to_host, found))]
        self._event = torch.cuda.Event() if tokens.is_cuda else None
        if self._event is not None:
            self._event.record()

    def result(self) -> tuple[list[int], list[RowLogprobs]]:
        if self._event is not None:
            self._event.synchronize()
        tokens, *found = self._found
        return tokens.tolist(), _as_rows(*found) if found else []


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _as_rows(chosen: Tensor, ids: Tensor, values: Tensor) -> list[RowLogprobs]:
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    best = [
        tuple((token, value) for token, value in zip(row_ids, row_values, strict=True) if token >= 0)
        for row_ids, row_values in pairs
    ]
    return list(zip(chosen.tolist(), best, strict=True))
