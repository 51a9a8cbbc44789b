"""How an output grows: by tokens that were sampled, kept from a draft, or forced by a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ramify.messages import Finish
from ramify.runtime.scheduler.counters import Ledger
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.next_tokens import RequestSampler
from ramify.runtime.scheduler.output import Logprob, StepOutputs
from ramify.runtime.scheduler.request import Request

JUMP_CONTEXT = 16
"""Output tokens that a jump looks back at."""


class Growth:
    """Appends tokens and reports them; `finish` ends a request whose last token has come."""

    def __init__(
        self,
        limits: Limits,
        outputs: StepOutputs,
        sampler: RequestSampler,
        ledger: Ledger,
        finish: Callable[[Request, Finish], None],
        *,
        jump_forward: bool,
    ) -> None:
        self._limits = limits
        self._outputs = outputs
        self._sampler = sampler
        self._ledger = ledger
        self._finish = finish
        self._jump_forward = jump_forward

    def accept(self, request: Request, token: int, logprob: Logprob | None, now: float) -> bool:
        """Append a sampled token and all that the grammar forces after it. True if the request goes on."""
        if request.first_token is None:
            request.first_token = now
        request.append(token)
        self._ledger.output_tokens += 1
        constrained = request.constrained
        if constrained is not None:
            constrained.accept(token)
        if constrained is not None and not self._is_stop(request, token):
            if logprob is not None:
                self._report(request, [logprob])
            self.jump(request, loose=0 if logprob is not None else 1)
            if request.sampling.logprobs is None:
                self._report(request)
        else:
            self._report(request, None if logprob is None else [logprob])
        return not self.end_if_done(request)

    def accept_guess(self, request: Request, token: int, logprob: Logprob | None, now: float) -> int:
        """As `accept`; the token is the next guess, which was computed with those behind it.

        Returns how many rows on the state is that predicts the next token; 0 where there is none.
        """
        start = request.length
        guesses = request.known_and_draft[start:].copy()
        if not self.accept(request, token, logprob, now):
            return 0
        return request.follow(start, guesses)

    def keep_draft(self, request: Request, token: int, logprob: Logprob | None) -> bool:
        """The draft was chosen. True if the request goes on."""
        if request.constrained is not None:
            request.constrained.accept(token)
        healed = request.healing is not None
        request.keep_draft()
        if healed:
            return True
        self._ledger.output_tokens += 1
        self._count_forced(request, request.length - 1)
        self._report(request, None if logprob is None else [logprob])
        return not self.end_if_done(request)

    def jump(self, request: Request, loose: int) -> None:
        """Append what the grammar forces. The last `loose` tokens may be replaced by others."""
        constrained = request.constrained
        assert constrained is not None
        if not self._jump_forward:
            return
        # A token that a log-probability is asked for needs a pass after it: the last one is sampled.
        room = request.budget_left - (request.sampling.logprobs is not None)
        jump = constrained.jump(request.output[-JUMP_CONTEXT:].tolist(), loose, room)
        if jump is None:
            return
        before = request.length
        request.length -= jump.replaced
        for token in jump.tokens:
            request.append(token)
            if self._is_stop(request, token):
                break
        self._ledger.output_tokens += request.length - before
        self._count_forced(request, before)
        if jump.draft is not None and request.budget_left > 0:
            request.propose(jump.draft)

    def _count_forced(self, request: Request, start: int) -> None:
        """The tokens from `start` on, or fewer by as many as were taken back, were forced."""
        added = request.length - start
        request.forced_tokens += added
        self._ledger.forced_tokens += added
        request.forced_places.update(range(start, request.length))

    def _report(self, request: Request, logprobs: Sequence[Logprob] | None = None) -> None:
        """Tell of all tokens that have not been told of; `logprobs` has one entry for each, where asked."""
        start = request.reported_len
        for i, token in enumerate(request.ids[start:].tolist()):
            logprob = None if logprobs is None else logprobs[i]
            self._outputs.token(request, token, logprob, forced=start + i in request.forced_places)
        request.reported_len = request.length

    def report_computed(self, request: Request, rows: torch.Tensor, start: int, stop: int) -> None:
        """The log-probabilities of known tokens that the states `rows` of positions ``[start, stop)``
        predict: of the prompt's, and of forced ones that have not been reported."""
        if request.wants_prompt_logprobs:
            wanted = request.sampling.prompt_logprobs_start
            assert wanted is not None
            if wanted == 0 and not request.prompt_logprobs:
                request.prompt_logprobs.append((int(request.ids[0]), None, ()))
            low, high = max(wanted, start + 1), min(stop + 1, request.prompt_len)
            request.prompt_logprobs += self._sampler.known_tokens(request, rows, start, low, high)
        low, high = request.reported_len, min(stop + 1, request.length)
        if request.sampling.logprobs is not None and start < low < high:
            found = self._sampler.known_tokens(request, rows, start, low, high)
            for place, logprob in enumerate(found, low):
                self._outputs.token(request, logprob[0], logprob, forced=place in request.forced_places)
            request.reported_len = high

    def _is_stop(self, request: Request, token: int) -> bool:
        params = request.sampling
        return token in params.stop_token_ids or (
            not params.ignore_eos and token in self._limits.eos_token_ids
        )

    def end_if_done(self, request: Request) -> bool:
        """End `request` if its last token ends it, or nothing but the end may follow."""
        constrained = request.constrained
        last = int(request.ids[-1])
        if self._is_stop(request, last):
            self._finish(request, Finish(reason="stop", matched=last))
        elif request.budget_left <= 0:
            whole = constrained is not None and constrained.complete and not request.in_free_text
            self._finish(request, Finish(reason="stop" if whole else "length"))
        elif constrained is not None and request.sampling.logprobs is None and self._jump_forward:
            stop = constrained.only_end(request.budget_left)
            if stop is None:
                return False
            request.append(stop)
            self._ledger.output_tokens += 1
            self._count_forced(request, request.length - 1)
            self._report(request)
            self._finish(request, Finish(reason="stop", matched=stop))
        else:
            return False
        return True
