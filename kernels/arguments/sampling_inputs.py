"""The arguments of the sampling operations of every backend: options, edits of logits, and their checks.

A `check_*` function raises ValueError naming the argument that does not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.arguments.checks import ALL_DTYPES, check_linear
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.weights.packed import PackedWeight

MOST_LOGPROBS = 512
"""The largest `top` of `log_probabilities`."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters of R rows, in one tensor for one transfer.

    values : (5, R) float64, contiguous
        temperature (0: greedy), top_k (0: off), top_p (1: off), min_p (0: off), and a uniform random number
        in [0, 1). All but the last are rounded to float32 before use.
    ordered : bool
        Whether some row has top_k above 0 or top_p below 1.
    """

    values: Tensor
    ordered: bool

    @staticmethod
    def from_columns(
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        uniform: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> SamplingOptions:
        values = np.array([temperature, top_k, top_p, min_p, uniform], dtype=np.float64)
        return SamplingOptions.of(values, device)

    @staticmethod
    def of(values: np.ndarray, device: torch.device | str = "cpu") -> SamplingOptions:
        """The options `values`, (5, R) float64 on the host."""
        ordered = bool((values[1] > 0).any() or (values[2] < 1.0).any())
        return SamplingOptions(to_device(values, device), ordered)


@dataclasses.dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to N distinct logits.

    places : (2, N) int32, contiguous
        Row and token of each logit.
    amounts : (3, N) float32, contiguous
        In the order of use: the repetition penalty, which divides a positive logit and multiplies any other;
        the presence and frequency penalty, subtracted; the bias, added (-inf forbids the token).
    """

    places: Tensor
    amounts: Tensor

    @staticmethod
    def from_rows(rows: Sequence[RowEdits], device: torch.device | str = "cpu") -> LogitEdits:
        """The edits of all rows of the logits; `rows[i]` describes the edits of row i."""
        rows = rows or [RowEdits()]
        found = [row.entries() for row in rows]
        sizes = [len(entries[0]) for entries, _ in found]
        tokens, counts = np.concatenate([entries for entries, _ in found], axis=1)
        of = np.repeat(np.arange(len(rows)), sizes)
        options = [(row.repetition_penalty, row.presence_penalty, row.frequency_penalty) for row in rows]
        repetition, presence, frequency = np.array(options).T
        amounts = np.zeros((3, len(tokens)), np.float32)
        amounts[0] = np.where(counts >= 0, repetition[of], 1.0)
        used = np.flatnonzero(counts > 0)
        amounts[1, used] = presence[of[used]] + frequency[of[used]] * counts[used]
        begins = np.cumsum([0, *sizes])
        for row, (_, biases) in enumerate(found):
            if biases is not None:
                amounts[2, begins[row] : begins[row + 1]] = biases
        places = np.stack([of.astype(np.int32), tokens])
        return LogitEdits(to_device(places, device), to_device(amounts, device))


class TokenCounts:
    """The distinct tokens of one sequence, and how often each occurs in its output. The counts grow with the
    sequence.

    Example with the prompt 7 9 and the output 9 4 9: tokens 7 9 4, counts 0 2 1. Without the prompt, which
    only a repetition penalty needs: tokens 9 4, counts 2 1.
    """

    def __init__(self, *, prompt: bool = True) -> None:
        self.length = 0
        """The number of tokens of the sequence that have been counted."""
        self._prompt = prompt
        self._places: dict[int, int] = {}
        self._arrays = np.empty((2, 64), np.int32)
        self._changed: set[int] | None = None

    @staticmethod
    def from_ids(ids: np.ndarray, prompt_len: int) -> TokenCounts:
        """The counts of a whole sequence."""
        counts = TokenCounts()
        counts.extend(ids, prompt_len)
        return counts

    @property
    def arrays(self) -> np.ndarray:
        """(2, n) int32: distinct tokens, and their occurrences in the output."""
        return self._arrays[:, : len(self._places)]

    def extend(self, ids: np.ndarray, prompt_len: int) -> None:
        """Count the tokens of the sequence `ids`, (n,), that are not counted yet; the first `prompt_len` are
        the prompt."""
        start, self.length = self.length, len(ids)
        if start >= prompt_len and start == len(ids) - 1:  # one more token, as in most steps
            self._add((ids.item(start),), 1)
            return
        if self._prompt and start < prompt_len:
            self._add(np.unique(ids[start:prompt_len]).tolist(), 0)
        self._add(ids[max(start, prompt_len) :].tolist(), 1)

    def _add(self, tokens: Sequence[int], times: int) -> None:
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == self._arrays.shape[1]:
                    self._arrays = np.concatenate([self._arrays, np.empty_like(self._arrays)], axis=1)
                self._arrays[:, place] = token, 0
            self._arrays[1, place] += times
            if self._changed is not None:
                self._changed.add(place)

    def take_changes(self) -> Collection[int]:
        """The columns of `arrays` that have changed since the last call; at the first call all columns."""
        changed = range(len(self._places)) if self._changed is None else self._changed
        self._changed = set()
        return changed

    def places_of(self, tokens: Iterable[int]) -> list[int]:
        """The column of each of `tokens` in `arrays`; -1 for a token that is not counted."""
        return [self._places.get(token, -1) for token in tokens]


NONE_COUNTED = TokenCounts()
"""The counts of an empty sequence."""


@dataclasses.dataclass(slots=True)
class RowEdits:
    """Penalties and biases of one row; see the sampling parameters of the same names.

    counts : the tokens that penalties apply to, and their occurrences
    banned : forbidden tokens
    """

    counts: TokenCounts = NONE_COUNTED
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned: Sequence[int] = ()

    def entries(self) -> tuple[np.ndarray, np.ndarray | None]:
        """(2, n) int32: distinct tokens, and their occurrences in the output, -1 for a token that is not in
        `counts`. Then their biases, (n,) float64; None if the row has none."""
        if not self.logit_bias and not self.banned:
            return self.counts.arrays, None
        tokens, counts = self.counts.arrays
        biases = {**self.logit_bias, **dict.fromkeys(self.banned, -np.inf)}
        places = np.array(self.counts.places_of(biases))
        new = np.fromiter(biases, np.int32, len(biases))[places < 0]
        tokens = np.concatenate([tokens, new])
        counts = np.concatenate([counts, np.full(len(new), -1, np.int32)])
        places[places < 0] = np.arange(len(tokens) - len(new), len(tokens))
        added = np.zeros(len(tokens))
        added[places] = list(biases.values())
        return np.stack([tokens, counts]), added


class LogProbabilities(NamedTuple):
    """Natural log-probabilities, float32: `chosen` (R,) of the chosen tokens, `values` (R, top) of the most
    likely tokens, in descending order. `ids` (R, top) int64 are the tokens of `values`."""

    chosen: Tensor
    ids: Tensor
    values: Tensor


def check_logits(logits: Tensor) -> None:

    if logits.dim() != 2 or logits.dtype not in ALL_DTYPES or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(
            f"logits are {tuple(logits.shape)} {logits.dtype}; they must be (R, vocab) float32, float16 or "
            "bfloat16 with contiguous rows."
        )


def check_mask(logits: Tensor, mask: Tensor | None, mask_rows: Tensor | None) -> None:
    rows, vocab = logits.shape
    if mask is None:
        if mask_rows is not None:
            raise ValueError("mask_rows are given, but no mask.")
        return
    words = -(-vocab // 32)
    if mask.dim() != 2 or mask.shape[1] != words or mask.dtype != torch.int32 or mask.stride(1) != 1:
        raise ValueError(
            f"mask is {tuple(mask.shape)} {mask.dtype}; {vocab} tokens need (M, {words}) int32 with "
            "contiguous rows."
        )
    if mask_rows is None and len(mask) != rows:
        raise ValueError(f"{len(mask)} rows of mask for {rows} of logits, and no mask_rows.")
    if mask_rows is not None and (
        mask_rows.shape != (rows,) or mask_rows.dtype != torch.int32 or not mask_rows.is_contiguous()
    ):
        raise ValueError(f"mask_rows must be contiguous ({rows},) int32.")


def check_masked(
    x: Tensor, weight: PackedWeight, mask: Tensor, mask_rows: Tensor, out: Tensor | None
) -> Tensor:
    """Check the arguments of `masked_linear`. Returns `out`, or newly allocated memory."""
    if out is None and x.dim() == 2:
        out = torch.empty(len(x), weight.results)
    out = check_linear(x, weight, None, out, add=False)
    if out.dtype != torch.float32 or weight.gated:
        raise ValueError(f"out is {out.dtype} and gated {weight.gated}; it must be float32, W not gated.")
    check_mask(out, mask, mask_rows)
    if not mask.is_contiguous():
        raise ValueError("mask must be contiguous.")
    return out


def check_options(logits: Tensor, options: SamplingOptions) -> None:
    values, rows = options.values, len(logits)
    if values.shape != (5, rows) or values.dtype != torch.float64 or not values.is_contiguous():
        raise ValueError(f"the options' values are {tuple(values.shape)}; they must be (5, {rows}) float64.")


def check_edits(logits: Tensor, edits: LogitEdits, before: Tensor | None = None) -> None:
    places, amounts = edits.places, edits.amounts
    count = places.shape[-1]
    if places.shape != (2, count) or places.dtype != torch.int32 or not places.is_contiguous():
        raise ValueError("places must be contiguous (2, N) int32.")
    if amounts.shape != (3, count) or amounts.dtype != torch.float32 or not amounts.is_contiguous():
        raise ValueError(f"amounts must be contiguous (3, {count}) float32.")
    if before is not None and (before.shape != (count,) or before.dtype != logits.dtype):
        raise ValueError(f"before must be ({count},) {logits.dtype}.")


def check_chosen(logits: Tensor, tokens: Tensor, top: int) -> None:
    if tokens.shape != (len(logits),) or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(f"tokens must be contiguous ({len(logits)},) int64.")
    if not 0 <= top <= MOST_LOGPROBS:
        raise ValueError(f"top is {top}; it must be 0 to {MOST_LOGPROBS}.")
