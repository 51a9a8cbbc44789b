"""The next token of each request in a step, and the log-probabilities that were asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.sampler import SamplingRow
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.output import Logprob
from ramify.runtime.scheduler.request import Request

LOGPROB_ROWS = 64
"""Rows whose logits exist at one time: 64 x 49k float32 are 13 MB."""


class Sampled(NamedTuple):
    token: int
    logprob: Logprob | None


class RequestSampler:
    """Chooses tokens as each request's own options and grammar say."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self._runner = runner
        self._limits = limits

    def next_tokens(
        self,
        places: Sequence[tuple[Request, int]],
        logits: torch.Tensor,
        meanwhile: Callable[[torch.Tensor], None] | None = None,
    ) -> list[Sampled]:
        """A token for each of `places` from `logits`, (places, vocab), which are changed.

        A place is a request, and how many of its guesses stand before the token. `meanwhile` gets the tokens
        on the model's device, (places,) int64, before they are waited for.
        """
        requests = [request for request, _ in places]
        rows = [self._row(request, ahead) for request, ahead in places]
        asked = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        top = max((requests[row].sampling.logprobs or 0 for row in asked), default=0)
        drawing = self._runner.sampler.begin(logits, rows, asked, top)
        if meanwhile is not None:
            meanwhile(drawing.tokens)
        tokens, found = drawing.result()
        logprobs: list[Logprob | None] = [None] * len(rows)
        for row, (value, best) in zip(asked, found, strict=True):
            logprobs[row] = (tokens[row], value, best[: requests[row].sampling.logprobs])
        return [Sampled(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]

    def at_once(self, request: Request) -> int:
        """How many of the next tokens can be chosen together, each as if the guesses before it were right.

        Only one where a grammar or a penalty has to see the token before.
        """
        if not request.next_is_guess or request.constrained is not None:
            return 1
        params = request.sampling
        early = request.output_len < params.min_tokens
        return 1 if params.penalises or early or params.logprobs is not None else 1 + request.draft_len

    def known_tokens(
        self, request: Request, hidden: torch.Tensor, start: int, low: int, high: int
    ) -> list[Logprob]:
        """Log-probabilities of the known tokens at positions ``[low, high)``, low > start.

        `hidden` (tokens, hidden size) are the states of positions `start` and on.
        """
        top = request.sampling.logprobs or 0
        found: list[Logprob] = []
        for first in range(low, high, LOGPROB_ROWS):
            last = min(first + LOGPROB_ROWS, high)
            logits = self._runner.logits(hidden[first - start - 1 : last - start - 1])
            tokens = request.ids[first:last]
            values = self._runner.sampler.log_probabilities(logits, tokens, top)
            found += [(int(token), value, best) for token, (value, best) in zip(tokens, values, strict=True)]
        return found

    def masks(self, requests: Sequence[Request]) -> list[np.ndarray | None]:
        """For each request's row, and then for those of all drafts, the tokens whose logits are of use.

        Log-probabilities are those of all tokens; what a mask allows after a draft is not known yet.
        """
        found = [None if request.sampling.logprobs is not None else _mask(request) for request in requests]
        return found + [None] * sum(request.draft_len for request in requests)

    def _row(self, request: Request, ahead: int) -> SamplingRow:
        params = request.sampling
        mask = _mask(request)
        banned: tuple[int, ...] = ()
        if request.output_len < params.min_tokens:
            banned = params.stop_token_ids + (() if params.ignore_eos else self._limits.eos_token_ids)
            if mask is not None and _allows_only(mask, banned):
                banned = ()  # the grammar says that the text ends here
        return SamplingRow(
            params=params,
            uniform=uniform(request.seed, request.length - request.prompt_len + ahead)
            if params.temperature > 0.0
            else 0.0,
            ids=request.ids,
            prompt_len=request.prompt_len,
            mask=mask,
            banned=banned,
        )


def _mask(request: Request) -> np.ndarray | None:
    """The tokens that may come next, (words,) int32; None for all."""
    mask = None if request.constrained is None else request.constrained.mask
    if request.healing is not None and request.next_draft is not None:
        mask = request.healing.mask(request.next_draft, mask)
    return mask


def uniform(seed: int, position: int) -> float:
    """In [0, 1), from the seed and the number of the output token alone: how the tokens before it came
    about (sampled, forced, computed again after a retraction) makes no difference. Tokens at the end of
    the prompt that are being healed have negative numbers."""
    return random.Random((seed << 32) ^ (position & 0xFFFFFFFF)).random()


def _allows_only(mask: np.ndarray, tokens: Sequence[int]) -> bool:
    """The mask, (words,) int32, allows none but `tokens`."""
    bits = mask.view(np.uint32)
    allowed = int(np.bitwise_count(bits).sum())
    return allowed == sum(int(bits[token >> 5]) >> (token & 31) & 1 for token in {*tokens})
