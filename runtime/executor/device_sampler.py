"""Sampling on the device that holds the logits: options are copied to it, and tokens back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.arguments.device_counts import DeviceCounts
from ramify.kernels.arguments.sampling_inputs import LogProbabilities
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.registry import SamplingOps
from ramify.runtime.executor.sampler import RowLogprobs, SamplingRow, options_of, row_edits, stacked
from ramify.sampling_params import SamplingParams


class DeviceSampler:
    """As `HostSampler`, but only launches kernels; the result of a drawing waits for them."""

    def __init__(self, ops: SamplingOps, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._counts = DeviceCounts(device)
        self._words = torch.empty(0, 0, dtype=torch.int32)
        """Where masks are put together, pinned for a CUDA device: allocating pinned memory in each step, and
        copying the masks to it, would double the work."""
        self._sent: torch.cuda.Event | None = None
        """The masks of the last step have left `_words`."""

    @torch.inference_mode()
    def begin(
        self, logits: Tensor, rows: Sequence[SamplingRow], asked: Sequence[int], top: int
    ) -> DeviceDrawing:
        edits = self._counts.edits(row_edits(rows))
        before = None if edits is None else self._ops.edit_logits(logits, edits)
        tokens = self._ops.sample_tokens(logits, options_of(rows, self._device), *self._masks(rows))
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
                self.begin(logits, [row], [0], top)

    def _masks(self, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        masks = [row.mask for row in rows]
        if all(mask is None for mask in masks):
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
    """Tokens that are copied to the host; `result` does not wait for kernels that are launched after them."""

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
