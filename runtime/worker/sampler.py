"""Logits to tokens: bias and penalties, grammar mask, temperature, top-k, top-p, min-p, one draw.

Every random number comes from the caller, one per row, so that a request's tokens depend on its own
seed and not on the batch it is in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ramify.kernels.reference.logits import apply_mask
from ramify.kernels.registry import ApplyMask
from ramify.sampling import SamplingParams

SORTED_TOKENS = 256
"""Top-p looks at so many of the most likely tokens first: a full sort of 49k logits costs 20 times more."""


@dataclasses.dataclass(slots=True)
class SamplingRow:
    """What choosing one row's token depends on besides its logits."""

    params: SamplingParams
    uniform: float
    """In [0, 1); unused for greedy rows."""
    ids: np.ndarray
    """(length,) int32: prompt and output so far, for the penalties."""
    prompt_len: int
    mask: np.ndarray | None = None
    """(ceil(vocab / 32),) int32 bitmask of the tokens that the grammar allows; None allows all."""
    banned: Sequence[int] = ()
    """Tokens that must not come yet (stop tokens before `min_tokens`)."""


RowLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log-probability of the token, and the most likely (id, log-probability) pairs."""


class Drawing(Protocol):
    """Tokens that are being chosen."""

    @property
    def tokens(self) -> torch.Tensor:
        """(R,) int64 on the model's device."""
        ...

    def result(self) -> tuple[list[int], list[RowLogprobs]]:
        """Wait for the tokens, and for the log-probabilities of the rows that were asked for."""
        ...


class Sampler(Protocol):
    """Chooses tokens where the logits are."""

    def begin(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], asked: Sequence[int], top: int
    ) -> Drawing:
        """Choose a token for each row of `logits`, (R, vocab), which may be changed.

        asked : rows whose log-probabilities are wanted, and of their `top` most likely tokens
        """
        ...

    def log_probabilities(self, logits: torch.Tensor, tokens: np.ndarray, top: int) -> list[RowLogprobs]:
        """Of one known token a row, (R,) int, and of the `top` most likely ones."""
        ...


class HostSampler:
    """On the host, at once."""

    def __init__(self, apply_mask: ApplyMask = apply_mask) -> None:
        self._apply_mask = apply_mask

    def begin(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], asked: Sequence[int], top: int
    ) -> Drawing:
        logits = logits.float()
        original = logits[list(asked)].clone() if asked else None
        tokens = torch.from_numpy(sample(logits, rows, self._apply_mask))
        found = [] if original is None else log_probabilities(original, tokens[list(asked)], top)
        return _Drawn(tokens, found)

    def log_probabilities(self, logits: torch.Tensor, tokens: np.ndarray, top: int) -> list[RowLogprobs]:
        return log_probabilities(logits.float(), torch.from_numpy(tokens.astype(np.int64)), top)


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    tokens: torch.Tensor
    logprobs: list[RowLogprobs]

    def result(self) -> tuple[list[int], list[RowLogprobs]]:
        return self.tokens.tolist(), self.logprobs


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], apply_mask: ApplyMask = apply_mask
) -> np.ndarray:
    """Choose one token per row.

    Parameters
    ----------
    logits : (R, vocab) float32, changed in place
    rows : R rows
    apply_mask : that of the kernels in use

    Returns
    -------
    (R,) int64
    """
    for row, spec in enumerate(rows):
        _adjust(logits[row], spec)
    _mask_all(logits, rows, apply_mask)
    tokens = torch.argmax(logits, dim=-1)
    drawn = [row for row, spec in enumerate(rows) if spec.params.temperature > 0.0]
    if drawn:
        picked = logits if len(drawn) == len(rows) else logits[drawn]
        tokens[drawn] = _draw(picked, [rows[row] for row in drawn])
    return tokens.numpy()


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[RowLogprobs]:
    """Log-probabilities of one chosen token a row and of the `top` most likely ones.

    Parameters
    ----------
    logits : (R, vocab) float32, unmodified
    tokens : (R,) int64
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    chosen = (logits.gather(1, tokens[:, None])[:, 0] - normaliser).tolist()
    if top == 0:
        return [(value, ()) for value in chosen]
    values, ids = torch.topk(logits, min(top, logits.shape[1]), dim=-1)
    pairs = zip(ids.tolist(), (values - normaliser[:, None]).tolist(), strict=True)
    best = [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
    return list(zip(chosen, best, strict=True))


def _adjust(logits: torch.Tensor, spec: SamplingRow) -> None:
    """Logit bias, penalties and banned tokens of one row; (vocab,) in place."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(spec.ids).astype(np.int64))
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        tokens, counts = np.unique(spec.ids[spec.prompt_len :], return_counts=True)
        if len(tokens):
            amount = params.presence_penalty + params.frequency_penalty * counts
            logits[torch.from_numpy(tokens.astype(np.int64))] -= torch.from_numpy(amount.astype(np.float32))
    if params.logit_bias:
        keys = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        logits[keys] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if spec.banned:
        logits[list(spec.banned)] = -torch.inf


def stacked(masks: Sequence[np.ndarray | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, words) int32 of those that are there, and for each its row in it or -1, (len(masks),) int32."""
    held = np.array([mask is not None for mask in masks])
    rows = np.where(held, np.cumsum(held) - 1, -1).astype(np.int32)
    return torch.from_numpy(np.stack([mask for mask in masks if mask is not None])), torch.from_numpy(rows)


def _mask_all(logits: torch.Tensor, rows: Sequence[SamplingRow], apply_mask: ApplyMask) -> None:
    masks = [spec.mask for spec in rows]
    if any(mask is not None for mask in masks):
        apply_mask(logits, *stacked(masks))


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """(R, vocab) → (R,) by inverse transform: the first token at which the cumulated mass passes u."""
    temperature = torch.tensor([[spec.params.temperature] for spec in rows])
    logits = logits / temperature
    uniform = torch.tensor([[spec.uniform] for spec in rows], dtype=torch.float64)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    ordered = [r for r, spec in enumerate(rows) if spec.params.top_k > 0 or spec.params.top_p < 1.0]
    plain = [r for r in range(len(rows)) if r not in set(ordered)]
    if plain:
        probs = torch.softmax(logits[plain], dim=-1)
        min_p = torch.tensor([[rows[r].params.min_p] for r in plain])
        if bool((min_p > 0).any()):
            probs = torch.where(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0, probs)
        tokens[plain] = _invert(probs, uniform[plain])
    if ordered:
        tokens[ordered] = _draw_ordered(logits[ordered], [rows[r] for r in ordered], uniform[ordered])
    return tokens


def _draw_ordered(logits: torch.Tensor, rows: Sequence[SamplingRow], uniform: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[1]
    top_k = torch.tensor([[spec.params.top_k or vocab] for spec in rows])
    top_p = torch.tensor([[spec.params.top_p] for spec in rows])
    min_p = torch.tensor([[spec.params.min_p] for spec in rows])
    largest_k = max(spec.params.top_k for spec in rows)
    width = min(vocab, max(SORTED_TOKENS, largest_k))
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    values, ids = torch.topk(logits, width, dim=-1)
    probs = torch.exp(values - normaliser)
    unbounded = top_k[:, 0] > width
    if width < vocab and bool((unbounded & (probs.sum(dim=-1) < top_p[:, 0])).any()):
        values, ids = torch.sort(logits, dim=-1, descending=True)
        probs = torch.exp(values - normaliser)
    probs = torch.where(torch.arange(probs.shape[1]) < top_k, probs, 0.0)
    kept = torch.where(top_k <= probs.shape[1], probs.sum(dim=-1, keepdim=True), 1.0)
    probs = probs / kept  # top-p counts the mass that top-k left
    before = torch.cumsum(probs, dim=-1) - probs
    probs = torch.where(before < top_p, probs, 0.0)
    probs = torch.where(probs < min_p * probs[:, :1], 0.0, probs)
    return ids.gather(1, _invert(probs, uniform)[:, None])[:, 0]


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    mass = torch.cumsum(probs, dim=-1, dtype=torch.float64)
    total = mass[:, -1:]
    # A draw that rounds up to the whole mass must not fall on a token of probability 0.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, target, right=True)[:, 0]
