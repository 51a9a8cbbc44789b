"""Choice of the next token of each request in a step, and the log-probabilities that were asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ramify.grammar.matcher import allowed_among
from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.sampler import SamplingBatch, SamplingRow, row_edits
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.parts import Logprob
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.slots import RunningSlots, slots_of, uniforms

LOGPROB_ROWS = 64
"""The number of rows whose logits are in memory at a time. With 49k tokens, 64 rows of float32 take 13 MB."""


Sampled = tuple[int, Logprob | None]
"""(token, log-probability); the log-probability is None unless it was asked for."""


@dataclasses.dataclass(eq=False)
class RequestSampler:
    """Chooses tokens by each request's own options, random numbers and grammar."""

    runner: Runner
    limits: Limits
    slots: RunningSlots

    def next_tokens(
        self,
        places: Sequence[tuple[Request, int]],
        logits: torch.Tensor,
        meanwhile: Callable[[torch.Tensor], None] | None = None,
    ) -> list[Sampled]:
        """Choose a token for each of `places` from `logits`, (places, vocab), which are overwritten.

        A place is (request, ahead): `ahead` is the number of the request's draft tokens before the token to
        be chosen. `meanwhile` is called with the tokens on the model's device, (places,) int64, before the
        host waits for them.
        """
        requests = [request for request, _ in places]
        slots, held = slots_of(requests), self.slots
        options = np.zeros((5, len(places)))
        options[:4] = held.options[:, slots]
        drawn = np.flatnonzero(options[0] > 0.0)
        if len(drawn):
            positions = [request.length - request.prompt_len + ahead for request, ahead in places]
            options[4, drawn] = uniforms(held.seeds[slots[drawn]], np.array(positions, np.int64)[drawn])
        masks = [
            None if request.constrained is None and request.healing is None else _mask(request)
            for request in requests
        ]
        edits = {}
        for row in np.flatnonzero(held.edited[slots]).tolist():
            request = requests[row]
            counts = request.token_counts() if request.sampling.penalises else None
            found = row_edits(request.sampling, counts, self._banned(request, masks[row]))
            if found is not None:
                edits[row] = found
        if all(mask is None for mask in masks):
            masks = []
        asked = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        top = max((requests[row].sampling.logprobs or 0 for row in asked), default=0)
        drawing = self.runner.sampler.begin_draw(logits, SamplingBatch(options, edits, masks), asked, top)
        if meanwhile is not None:
            meanwhile(drawing.tokens)
        tokens, scores = drawing.result()
        logprobs: list[Logprob | None] = [None] * len(places)
        for row, (value, best) in zip(asked, scores, strict=True):
            logprobs[row] = (tokens[row], value, best[: requests[row].sampling.logprobs])
        return list(zip(tokens, logprobs, strict=True))

    def at_once(self, request: Request) -> int:
        """The number of next tokens that can be chosen together, each on the assumption that all draft tokens
        before it are accepted.

        It is 1 if the choice of a token depends on the tokens before it, as with a grammar or a penalty.
        """
        if not request.draft_len or request.known_len or request.constrained is not None:
            return 1
        params = request.sampling
        early = request.output_len < params.min_tokens
        return 1 if params.penalises or early or params.logprobs is not None else 1 + request.draft_len

    def token_logprobs(
        self, request: Request, hidden: torch.Tensor, start: int, low: int, high: int
    ) -> list[Logprob]:
        """The log-probabilities of the request's tokens at positions ``[low, high)``, with low > start.

        `hidden` (tokens, hidden size) are the hidden states of the positions from `start` on.
        """
        top = request.sampling.logprobs or 0
        found: list[Logprob] = []
        for first in range(low, high, LOGPROB_ROWS):
            last = min(first + LOGPROB_ROWS, high)
            logits = self.runner.logits(hidden[first - start - 1 : last - start - 1])
            tokens = request.ids[first:last]
            values = self.runner.sampler.log_probabilities(logits, tokens, top)
            found += [(int(token), value, best) for token, (value, best) in zip(tokens, values, strict=True)]
        return found

    def masks(self, requests: Sequence[Request]) -> list[np.ndarray | None]:
        """For each row of logits, the mask of the tokens whose logits are needed, or None if all are needed.
        The list is empty if no request has a mask.

        One entry per request comes first: None if log-probabilities are asked for, which need the logits of
        all tokens. Then each known or draft token has None, because its mask is not known yet.
        """
        if not any(each.constrained is not None or each.healing is not None for each in requests):
            return []
        found = [None if request.sampling.logprobs is not None else _mask(request) for request in requests]
        return found + [None] * sum(request.computed_ahead for request in requests)

    def row(
        self, request: Request, ahead: int, mask: np.ndarray | None, counts: TokenCounts | None
    ) -> SamplingRow:
        """The sampling options of the token `ahead` tokens after the end of the sequence.

        mask : the mask of the allowed tokens, (words,) int32; None if all are allowed
        counts : the token counts that penalties use
        """
        slot = request.pages.slot
        position = np.array([request.length - request.prompt_len + ahead], np.int64)
        return SamplingRow(
            params=request.sampling,
            uniform=float(uniforms(self.slots.seeds[slot : slot + 1], position)[0]),
            counts=counts,
            mask=mask,
            banned=self._banned(request, mask),
        )

    def _banned(self, request: Request, mask: np.ndarray | None) -> tuple[int, ...]:
        """The stop tokens, while the answer is shorter than `min_tokens`. If the grammar allows one of them,
        none is banned: the grammar decides where the text ends."""
        params = request.sampling
        if not params.min_tokens or request.answer_len >= params.min_tokens:
            return ()
        banned = params.stop_token_ids + (() if params.ignore_eos else self.limits.eos_token_ids)
        return () if mask is not None and allowed_among(mask, {*banned}) is not None else banned


def _mask(request: Request) -> np.ndarray | None:
    """The mask of the tokens that may come next, (words,) int32; None if all tokens may."""
    mask = None if request.constrained is None else request.constrained.mask
    if request.healing is not None and request.next_ahead is not None:
        mask = request.healing.mask(request.next_ahead, mask)
    return mask
