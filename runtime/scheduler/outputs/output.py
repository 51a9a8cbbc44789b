"""What a step tells the detokenizer: one message about all requests that have new tokens or have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ramify.engine_messages import StepOutput, TokenChunk
from ramify.messages import ChoiceScore, Finish, TokenLogprobs
from ramify.runtime.scheduler.request import Logprob, Request

CONTEXT_IDS = 6
"""Prompt ids that the detokenizer is given as context: no tokenizer's spelling depends on more."""


@dataclasses.dataclass(slots=True)
class _Pending:
    request: Request
    ids: list[int]
    logprobs: list[Logprob]
    forced: list[int]
    finish: Finish | None = None
    since: float | None = None
    """When the first step ended whose tokens it holds."""


class StepOutputs:
    """Collects tokens and ends: of one step, or of several where a request wants fewer chunks (`every_s`)."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}

    def tokens(
        self, request: Request, tokens: list[int], logprobs: Sequence[Logprob] | None, forced: Sequence[int]
    ) -> None:
        """`request` has new tokens, of which those at `forced` were forced. It may keep the list."""
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
        """The request has failed: its tokens that were not sent are void."""
        self._pending.pop(request.rid, None)

    def take(self, now: float) -> StepOutput | None:
        """The message about all requests that are due; None where none is."""
        due = [pending for pending in self._pending.values() if _is_due(pending, now)]
        if not due:
            return None
        if len(due) == len(self._pending):
            self._pending.clear()
        for pending in due if self._pending else ():
            del self._pending[pending.request.rid]
        return StepOutput(chunks=tuple([self._chunk(pending, now) for pending in due]))

    def _of(self, request: Request) -> _Pending:
        pending = self._pending.get(request.rid)
        if pending is None:
            pending = self._pending[request.rid] = _Pending(request, [], [], [])
        return pending

    def _chunk(self, pending: _Pending, now: float) -> TokenChunk:
        request, report = pending.request, pending.request.report
        if report.announced and pending.finish is None:
            return TokenChunk(
                rid=request.rid,
                ids=tuple(pending.ids),
                forced=tuple(pending.forced),
                logprobs=pack_logprobs(pending.logprobs) if pending.logprobs else None,
            )
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
        return TokenChunk(
            rid=request.rid,
            ids=tuple(pending.ids),
            forced=tuple(pending.forced),
            logprobs=pack_logprobs(pending.logprobs) if pending.logprobs else None,
            prompt_logprobs=prompt_logprobs,
            choices=choices,
            embedding=request.pooled.embedding() if request.pooled is not None and whole else b"",
            first=first,
            sampling=request.sampling if first else None,
            stop_after=tuple(one.end for one in request.preambles if one.apart) if first else (),
            context=context,
            overlap=report.overlap.decode() if first else "",
            replaced=report.replaced if first else 0,
            enforcement=report.enforcement if first else None,
            usage=request.usage(now, aborted=aborted) if first or pending.finish is not None else None,
            every_s=request.every_s if first else 0.0,
            finish=pending.finish,
        )


def _is_due(pending: _Pending, now: float) -> bool:
    """The tokens of a request with stop strings are sent at once: the detokenizer finds where it ends."""
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
