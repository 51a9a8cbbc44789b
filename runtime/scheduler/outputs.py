"""Output tokens: appended to requests, and sent to the detokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import torch

from ramify.engine_messages import StepOutput, TokenChunk
from ramify.messages import ChoiceScore, Continuation, Finish, TokenLogprobs
from ramify.runtime.scheduler.requests.accounts import Counters
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.parts import Logprob
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.sampling import RequestSampler

CONTEXT_IDS = 6
"""Number of prompt ids that the detokenizer gets as context. No tokenizer's decoding depends on more."""


@dataclasses.dataclass(slots=True)
class _Pending:
    request: Request
    ids: list[int]
    logprobs: list[Logprob]
    forced: list[int]
    finish: Finish | None = None
    since: float | None = None
    """The clock when the first of these tokens was held back; None if none was."""


class StepOutputs:
    """Collects new tokens and finish reasons until they are sent: after each step, or less often for a
    request with `every_s`."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._single: dict[str, TokenChunk] = {}
        """By request id, chunks of one token. They are sent before what is pending of the same request."""

    def token(self, request: Request, token: int) -> None:
        """Add the new `token` of `request`, which is `plain`. In a step with draft tokens there may be tokens
        before it."""
        rid = request.rid
        if rid in self._pending or rid in self._single:
            self.tokens(request, [token], None, ())
        else:
            self._single[rid] = TokenChunk(rid=rid, ids=(token,))

    def tokens(
        self, request: Request, tokens: list[int], logprobs: Sequence[Logprob] | None, forced: Sequence[int]
    ) -> None:
        """Add new `tokens` of `request`. `forced` are the indices in `tokens` of forced tokens. The caller
        must not use the list `tokens` afterwards."""
        pending = self._pending.get(request.rid)
        if pending is None:
            self._pending[request.rid] = _Pending(request, tokens, [*(logprobs or ())], [*forced])
            return
        pending.forced += [len(pending.ids) + place for place in forced]
        pending.ids += tokens
        pending.logprobs += logprobs or ()

    def finish(self, request: Request, finish: Finish) -> None:
        self._of(request).finish = finish

    def drop(self, request: Request) -> None:
        """Drop the unsent tokens of `request`, which has failed."""
        self._pending.pop(request.rid, None)
        self._single.pop(request.rid, None)

    def take_output(self, now: float) -> StepOutput | None:
        """The message with all output that is to be sent now; None if there is none. That output is no longer
        pending afterwards."""
        due = [pending for pending in self._pending.values() if _is_due(pending, now)]
        if not due and not self._single:
            return None
        for pending in due:
            del self._pending[pending.request.rid]
        single, self._single = self._single, {}
        return StepOutput(chunks=(*single.values(), *[self._chunk(pending, now) for pending in due]))

    def _of(self, request: Request) -> _Pending:
        pending = self._pending.get(request.rid)
        if pending is None:
            pending = self._pending[request.rid] = _Pending(request, [], [], [])
        return pending

    def _chunk(self, pending: _Pending, now: float) -> TokenChunk:
        request, report = pending.request, pending.request.report
        chunk = TokenChunk(
            rid=request.rid,
            ids=tuple(pending.ids),
            forced=tuple(pending.forced),
            logprobs=pack_logprobs(pending.logprobs) if pending.logprobs else None,
        )
        if report.announced and pending.finish is None:
            return chunk
        first = not report.announced
        report.announced = True
        prompt_logprobs = None
        context: tuple[int, ...] = ()
        if first:
            context = tuple(request.ids[: request.prompt_len][-CONTEXT_IDS:].tolist())
            if request.sampling.prompt_logprobs_start is not None:
                prompt_logprobs = pack_logprobs(report.prompt_logprobs)
                report.prompt_logprobs = []
        aborted = pending.finish is not None and pending.finish.reason == "abort"
        whole = pending.finish is not None and pending.finish.reason == "length"
        choices: tuple[ChoiceScore, ...] = ()
        if request.scoring is not None and whole:
            choices = request.scoring.choices.scores()
        decisions = request.decisions.scores() if request.decisions is not None and whole else None
        return msgspec.structs.replace(
            chunk,
            prompt_logprobs=prompt_logprobs,
            choices=choices,
            decisions=decisions,
            embedding=request.pooled.embedding() if request.pooled is not None and whole else b"",
            first=first,
            sampling=request.sampling if first else None,
            stop_after=tuple(one.end for one in request.preambles if one.apart) if first else (),
            context=context,
            overlap=report.overlap.decode() if first else "",
            replaced=report.replaced if first else 0,
            enforcement=report.enforcement if first else None,
            usage=request.usage(now, aborted=aborted),
            every_s=request.every_s if first else 0.0,
            finish=pending.finish,
        )


def _is_due(pending: _Pending, now: float) -> bool:
    """True if `pending` is to be sent now. Tokens of a request with stop strings are never held back, because
    the detokenizer searches for these strings."""
    request = pending.request
    if pending.finish is not None or request.every_s <= 0 or request.sampling.stop:
        return True
    if pending.since is None:
        pending.since = now
    return now - pending.since >= request.every_s


def pack_logprobs(entries: list[Logprob]) -> TokenLogprobs:
    return TokenLogprobs(
        ids=tuple(token for token, _, _ in entries),
        logprobs=tuple(value for _, value, _ in entries),
        top=tuple(top for _, _, top in entries),
    )


JUMP_CONTEXT = 16
"""Number of output tokens before a jump that the retokenizer sees. The last of these tokens may be replaced,
to be spelled together with the forced text."""


@dataclasses.dataclass(eq=False)
class OutputAppender:
    """Appends output tokens to requests, and reports them to `outputs`. `finish` is called with each request
    whose output has ended."""

    limits: Limits
    outputs: StepOutputs
    sampler: RequestSampler
    counters: Counters
    finish: Callable[[Request, Finish], None]
    jump_forward: bool

    def accept_plain(self, request: Request, token: int) -> bool:
        """`accept` for most tokens of a `plain` request, in a fifth of the time. Returns False, and does
        nothing, for the first token, for one that may end the output, under a grammar, and while there are
        known or draft tokens."""
        length, params = request.length, request.sampling
        if (
            request.constrained is not None
            or request.known_len
            or request.draft_len
            or not request.report.announced
            or request.reported_len != length
            or length + 1 - request.prompt_len >= request.max_tokens
            or token in params.stop_token_ids
            or (token in self.limits.eos_token_ids and not params.ignore_eos)
        ):
            return False
        request.append(token)
        request.reported_len = length + 1
        self.counters.output_tokens += 1
        self.outputs.token(request, token)
        return True

    def accept(self, request: Request, token: int, logprob: Logprob | None, now: float) -> bool:
        """Append a sampled token, and the tokens that the grammar forces after it. Returns True if the
        request continues."""
        if request.stats.first_token is None:
            request.stats.first_token = now
        request.append(token)
        self.counters.output_tokens += 1
        constrained = request.constrained
        logprobs = None if logprob is None else [logprob]
        if constrained is not None:
            constrained.accept(token)
        if constrained is None or self._is_stop(request, token):
            self._report(request, logprobs)
        else:
            if logprobs is not None:
                self._report(request, logprobs)
            self.jump(request, loose=0 if logprobs is not None else 1)
            if request.sampling.logprobs is None:
                self._report(request)
        return not self.end_if_done(request)

    def accept_draft(self, request: Request, token: int, logprob: Logprob | None, now: float) -> int:
        """Append `token`, which equals the next draft token. The KV of all current draft tokens is computed
        already.

        Returns the distance in rows from the hidden state that predicted `token` to the hidden state that
        predicts the next token; 0 if that one is not computed.
        """
        start = request.length
        draft = request.target_ids[start:].copy()
        if not self.accept(request, token, logprob, now):
            return 0
        return request.verify_draft(start, draft)

    def accept_known(self, request: Request, token: int, logprob: Logprob | None) -> bool:
        """Append the next known token, which was chosen. Returns True if the request continues and the hidden
        state of that token is computed."""
        if request.constrained is not None:
            request.constrained.accept(token)
        healed = request.healing is not None
        request.keep_known()
        if healed:
            return request.computes_ahead  # the token belongs to the prompt, and is not reported
        self._count_forced(request, request.length - 1)
        self._report(request, None if logprob is None else [logprob])
        return not self.end_if_done(request) and request.computes_ahead

    def replay(self, request: Request, output: Continuation) -> None:
        """Append `output`, which `request` had on an engine that has died. `request` has just arrived here.

        Raises `EngineError` if the grammar of `request` does not allow `output`.
        """
        request.continues = None
        while request.healing is not None and request.known_len > output.replaced:
            if request.constrained is not None and request.next_ahead is not None:
                request.constrained.accept(request.next_ahead)
            request.keep_known()
        request.computed_len = 0
        for token in output.ids:
            request.append(token)
            if request.constrained is not None:
                request.constrained.accept(token)
            request.begin_answer(request.output_len)
        request.report.forced.update(request.prompt_len + index for index in output.forced)
        request.stats.forced_tokens = len(output.forced)

    def jump(self, request: Request, loose: int) -> None:
        """Append the tokens that the grammar forces (jump-forward). They may replace the last `loose` output
        tokens."""
        constrained = request.constrained
        assert constrained is not None
        if not self.jump_forward:
            return
        # With log-probabilities a forced token is reported by a later step. So the last token of the budget
        # is not forced, but sampled.
        room = request.budget_left - (request.sampling.logprobs is not None)
        jump = constrained.jump(request.output[-JUMP_CONTEXT:].tolist(), loose, room)
        if jump is None:
            return
        before = request.length
        request.take_back(jump.replaced)
        request.begin_answer(request.output_len + len(jump.tokens))
        for token in jump.tokens:
            request.append(token)
            if self._is_stop(request, token):
                break
        self._count_forced(request, before)
        if jump.draft is not None and request.budget_left > 0:
            request.add_known(jump.draft)

    def report_computed(self, request: Request, states: torch.Tensor, start: int, stop: int) -> None:
        """Report log-probabilities of tokens that were not sampled: the prompt's, and forced ones.

        `states` (stop - start, hidden size) are the hidden states of positions ``[start, stop)``. Each of
        them predicts the token at the next position.
        """
        report = request.report
        if request.wants_prompt_logprobs:
            wanted = request.sampling.prompt_logprobs_start
            assert wanted is not None
            if wanted == 0 and not report.prompt_logprobs:
                report.prompt_logprobs.append((int(request.ids[0]), None, ()))
            low, high = max(wanted, start + 1), min(stop + 1, request.prompt_len)
            report.prompt_logprobs += self.sampler.token_logprobs(request, states, start, low, high)
        low, high = request.reported_len, min(stop + 1, request.length)
        if request.sampling.logprobs is not None and start < low < high:
            found = self.sampler.token_logprobs(request, states, start, low, high)
            for position, logprob in enumerate(found, low):
                forced = [0] if position in report.forced else []
                self.outputs.tokens(request, [logprob[0]], [logprob], forced)
            request.reported_len = high

    def end_if_done(self, request: Request) -> bool:
        """Finish `request` if its last token ends the output, its budget is spent, or the grammar allows only
        a stop token. Returns True if it has been finished."""
        constrained = request.constrained
        if request.answer_start is None:
            request.begin_answer(request.output_len)
        last = request.last
        if self._is_stop(request, last):
            self.finish(request, Finish(reason="stop", matched=last))
        elif request.budget_left <= 0:
            whole = constrained is not None and constrained.whole
            self.finish(request, Finish(reason="stop" if whole else "length"))
        elif constrained is not None and request.sampling.logprobs is None and self.jump_forward:
            stop = constrained.only_end(request.budget_left)
            if stop is None:
                return False
            request.append(stop)
            self._count_forced(request, request.length - 1)
            self._report(request)
            self.finish(request, Finish(reason="stop", matched=stop))
        else:
            return False
        return True

    def _count_forced(self, request: Request, start: int) -> None:
        """Count the tokens from position `start` on as forced. Tokens before `start` that a jump has replaced
        are not counted."""
        added = request.length - start
        request.stats.forced_tokens += added
        self.counters.forced_tokens += added
        self.counters.output_tokens += added
        request.report.forced.update(range(start, request.length))

    def _report(self, request: Request, logprobs: Sequence[Logprob] | None = None) -> None:
        """Report all tokens that have not been reported, each with its entry of `logprobs` if there are
        any."""
        start, forced = request.reported_len, request.report.forced
        tokens = request.ids[start:].tolist()
        if not tokens:
            return
        places = [i for i in range(len(tokens)) if start + i in forced] if forced else []
        self.outputs.tokens(request, tokens, logprobs, places)
        request.reported_len = request.length

    def _is_stop(self, request: Request, token: int) -> bool:
        params = request.sampling
        return (token in params.stop_token_ids and request.answer_len > 0) or (
            not params.ignore_eos and token in self.limits.eos_token_ids
        )
