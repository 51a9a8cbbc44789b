"""Chooses the next token of each request, and verifies known and draft tokens against it.

Example: a request's sequence ends in 4, and the draft tokens 5 6 7 were computed behind it. The states of 4,
5, 6 and 7 each predict a token. The state of 4 gives 5: the draft is right, and the state of 5 counts. It
gives 6, and the state of 6 gives 9. The request has 5 6 9 after this step, and 7 is void. Tokens are the same
as without a draft, as each is chosen with the request's own random number and under its grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.admission.chunk_size import ChunkSize
from ramify.runtime.scheduler.constraints.masks import MaskFiller
from ramify.runtime.scheduler.counters import Counters
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.outputs.appending import OutputAppender
from ramify.runtime.scheduler.outputs.next_tokens import RequestSampler, Sampled
from ramify.runtime.scheduler.overlap import OverlapScheduling
from ramify.runtime.scheduler.request import Logprob, Request
from ramify.runtime.scheduler.speculation.alternation import Alternation

Predicting = list[tuple[Request, int]]
"""Requests, each with the row of the state that predicts its next token."""


@dataclasses.dataclass(eq=False)
class Verifier:
    """`overlap` is None where no pass is launched ahead. `chunks`: the prompt tokens of such a pass.
    `alternation` is None unless overlap and speculation are both on."""

    runner: Runner
    sampler: RequestSampler
    masks: MaskFiller
    appender: OutputAppender
    requests: Lifecycle
    counters: Counters
    overlap: OverlapScheduling | None
    chunks: ChunkSize
    alternation: Alternation | None = None

    def choose(self, predicting: Predicting, hidden: torch.Tensor, now: float) -> None:
        """Choose and append tokens. `hidden` (tokens, hidden size) are the states of the step."""
        with self.counters.model_time():
            # The logits of known and draft tokens are computed with the first ones: most tokens are kept, and
            # the head's weights are read once. Rows are ordered by their distance from the sequence's end, so
            # that what is chosen together is a slice.
            ahead = [request.computed_ahead for request, _ in predicting]
            needed = [
                row + i
                for i in range(max(ahead) + 1)
                for (_, row), count in zip(predicting, ahead, strict=True)
                if i <= count
            ]
            states = hidden if needed == list(range(len(hidden))) else index_select(hidden, needed)
            logits = self.runner.logits(states, self.sampler.masks([request for request, _ in predicting]))
        place = {row: i for i, row in enumerate(needed)}
        while predicting:
            predicting = self._choose(predicting, logits, place, now)

    def _choose(
        self, predicting: Predicting, logits: torch.Tensor, place: Mapping[int, int], now: float
    ) -> Predicting:
        """Choose from the logits of each state, which are in row ``place[state]``.

        Returns the requests whose known or draft tokens were chosen, each with its next state.
        """
        errors, ready = self.masks.errors, predicting
        if errors:
            ready = [(request, row) for request, row in predicting if request.rid not in errors]
            for request, _ in predicting:
                if request.rid in errors:
                    self.requests.fail(request, errors[request.rid])
        if not ready:
            return []
        requests = [request for request, _ in ready]
        counts = [self.sampler.at_once(request) for request in requests]
        # In the order of the logits.
        wanted = [(i, ahead) for ahead in range(max(counts)) for i in range(len(ready)) if ahead < counts[i]]
        rows = [place[ready[i][1] + ahead] for i, ahead in wanted]
        first, last = rows[0], rows[0] + len(rows)
        chosen = self.sampler.next_tokens(
            [(requests[i], ahead) for i, ahead in wanted],
            logits[first:last] if rows == list(range(first, last)) else index_select(logits, rows),
            self._launcher(requests) if len(rows) == len(requests) else None,
        )
        if self.overlap is not None:
            self.overlap.settle([token for token, _ in chosen])
        tokens: list[list[Sampled]] = [[sampled] for sampled in chosen[: len(ready)]]
        for (i, _), sampled in zip(wanted[len(ready) :], chosen[len(ready) :], strict=True):
            tokens[i].append(sampled)
        more: Predicting = []
        for (request, row), some in zip(ready, tokens, strict=True):
            try:
                on = 0
                for token, logprob in some:
                    following = self._append(request, token, logprob, now)
                    on += following
                    if not following:
                        break
                else:
                    more.append((request, row + on))
            except Exception as error:
                self.requests.fail_alone(request, error)
        self.masks.fill_now([request for request, _ in more])
        return more

    def _append(self, request: Request, token: int, logprob: Logprob | None, now: float) -> int:
        """Append a chosen token. Returns the distance to the state that predicts the next one, 0 where that
        state has not been computed."""
        if token != request.next_ahead:
            self.appender.accept(request, token, logprob, now)
            return 0
        if request.next_is_draft:
            self.counters.accepted(request)
            return self.appender.accept_draft(request, token, logprob, now)
        return int(self.appender.accept_known(request, token, logprob))

    def _launcher(self, requests: Sequence[Request]) -> Callable[[torch.Tensor], None] | None:
        """Launches the pass over the tokens that are being chosen and the next chunks of prompts, if the next
        step wants it."""
        overlap = self.overlap
        if overlap is None or not overlap.idle or not self.requests.next_step_wants(requests):
            return None
        if self.alternation is not None and self.alternation.next_drafts:
            return None
        chunks = self.requests.next_chunks(self.chunks.ahead(len(requests)))

        def launch(tokens: torch.Tensor) -> None:
            with self.counters.model_time():
                overlap.launch(requests, tokens, chunks)

        return launch
