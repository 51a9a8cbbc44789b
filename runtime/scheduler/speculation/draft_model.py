"""The draft model: its passes over requests, and its KV of their tokens, in pages of its own.

Example, in pages of 4 rows: the main model has computed 7 of 8 tokens of a request, and the draft model 4.

    tokens        a b c d | e f g h |
    draft model   ■ ■ ■ ■ | · · · · |       pass 1 computes e f g h, and gives x
                  ■ ■ ■ ■ | ■ ■ ■ ■ | ·     pass 2 computes x, and gives y

A page has the same number in the pools of both models. So one page table serves both models, and sharing,
copying or evicting a page applies to both. The draft model computes the tokens of a request only when draft
tokens are wanted for that request. So requests without draft tokens cost no time of the draft model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ramify.errors import RamifyError
from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.sampler import SamplingBatch, SamplingRow
from ramify.runtime.scheduler.requests.accounts import Counters
from ramify.runtime.scheduler.requests.constrained import ConstrainedOutput
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.parts import NONE, DraftKv
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest, common_prefix
from ramify.runtime.scheduler.requests.sampling import RequestSampler
from ramify.runtime.scheduler.speculation.acceptance import MOST_ROWS, StepCost, rows_of


class Drafted(NamedTuple):
    request: Request
    token: int
    confidence: float
    """The draft model's probability of `token`."""


class DraftModel:
    """Runs the draft model: computes KV of requests, and proposes their next tokens.

    `cost` models the time of one pass, the choice of tokens included, by the number of rows.
    """

    def __init__(
        self,
        runner: Runner,
        pages: RequestPages,
        limits: Limits,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.cost = StepCost(rows_of(runner.device))
        self.pays = True
        """False if a pass was not worth its time in the last step that could draft."""
        self._counters = counters
        self._runner = runner
        self._pages = pages
        self._limits = limits
        self._clock = clock
        self._sampler = RequestSampler(runner, limits, pages.slots)
        self._rows = np.zeros(runner.pool.num_pages, dtype=np.int32)
        """By page, the number of its first rows that hold the draft model's KV of the page's tokens."""
        self._grammars: dict[str, tuple[ConstrainedOutput, int]] = {}
        """By request id, a fork of the request's grammar that has also read known and draft tokens, and the
        number of tokens that the fork has read."""

    @property
    def seconds(self) -> float:
        """The seconds of all passes so far."""
        return self._counters.draft_model_s

    def missing(self, request: Request) -> int:
        """The number of tokens of `request`, known and draft tokens included, that a pass must compute to
        give the next draft token."""
        return request.target_len - self._start(request)

    def wrote(self, plan: Sequence[ScheduledRequest], copies: Sequence[tuple[int, int]]) -> None:
        """Follow the main model, which makes `copies` of pages, (source, destination), and then computes
        `plan`. The draft model's KV is void from now on in rows that get new tokens."""
        used = [(source, to) for source, to in copies if self._rows[source]]
        for source, to in copies:
            self._rows[to] = self._rows[source]
        if used:
            self._runner.copy_pages(used)
        size = self._pages.page_size
        for request, start, stop, _, wave in plan:
            kv = request.speculation.kv
            if kv is not None and kv.table is request.pages:
                start = max(start, kv.computed)  # the rows before keep the draft model's KV
            written = [(request.pages.ids, start, stop)]
            written += [(part.branch.table, part.start, part.stop) for part in wave]
            for table, start, stop in written:
                if start < stop:
                    page, row = divmod(start, size)
                    self._rows[table[page]] = min(self._rows[table[page]], row)
                    self._rows[table[page + 1 : -(-stop // size)]] = 0

    def overwritten(self, pages: Sequence[int]) -> None:
        """Note that `pages` hold other tokens now, none of which the draft model has computed."""
        self._rows[list(pages)] = 0

    def begin_step(self) -> None:
        """Begin a step: the draft tokens of the last step have been accepted or rejected."""
        self._grammars.clear()

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Run the draft model over tokens of `requests` that it has not computed yet: at most `MOST_ROWS`
        tokens in all, and never the last token of a request."""
        began, room = self._clock(), MOST_ROWS
        extensions = []
        for request in requests:
            kv = self._kv_of(request)
            # An earlier request of this pass may compute a prefix that this one shares.
            kv.computed = max(kv.computed, self._marked(request))
            start, stop = kv.computed, min(request.length - 1, kv.computed + room)
            if start < stop:
                extensions.append(self._extension(request, start, stop))
                room -= stop - start
        if extensions:
            self._runner.forward(pack(extensions, self._pages.page_size))
            self._runner.check_device()  # waits for the pass, whose time counts
            self._spent(MOST_ROWS - room, began)

    def next_tokens(self, requests: Sequence[Request]) -> list[Drafted]:
        """Run one pass. Returns the token after the draft tokens of each request, chosen by the request's own
        options, random number and grammar. Requests for which no page is free, or whose grammar allows no
        token there, are left out."""
        began = self._clock()
        ready: list[Request] = []
        rows: list[SamplingRow] = []
        for request in requests:
            allowed, mask = self._grammar_ahead(request)
            if allowed and self._pages.grow(request):
                ready.append(request)
                counts = None
                if request.sampling.penalises:
                    counts = TokenCounts.from_ids(request.target_ids, request.prompt_len)
                rows.append(self._sampler.row(request, request.ahead_len, mask, counts))
        if not ready:
            return []
        hidden, computed = self._last_states(ready)
        tokens, found = self._runner.sampler.begin_draw(
            self._logits(hidden, [row.mask for row in rows]), SamplingBatch.of(rows), range(len(rows)), 0
        ).result()
        self._spent(computed, began)
        return [
            Drafted(request, token, math.exp(logprob))
            for request, token, (logprob, _) in zip(ready, tokens, found, strict=True)
        ]

    def _last_states(self, requests: Sequence[Request]) -> tuple[torch.Tensor, int]:
        """Run one pass over what `requests` lack. Returns the hidden state of each one's last token,
        (requests, hidden size), and the number of rows of the pass."""
        size = self._pages.page_size
        batch = pack([self._extension(one, self._start(one), one.target_len) for one in requests], size)
        return self._lasts(batch, self._runner.forward(batch)), len(batch.ids)

    def _lasts(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if batch.decoding else index_select(hidden, (batch.query_starts[1:] - 1).tolist())

    def _grammar_ahead(self, request: Request) -> tuple[bool, np.ndarray | None]:
        """Advance the request's grammar over its known and draft tokens. Returns (whether a token may follow
        them, the mask of that token), with None for the mask if all tokens may follow."""
        if request.constrained is None:
            return True, None
        if not request.draft_len:
            self._grammars[request.rid] = (request.constrained.fork(), request.length)
        grammar, read = self._grammars[request.rid]
        try:
            for token in request.target_ids[read:].tolist():
                grammar.accept(token)
            grammar.fill(request.budget_left - request.ahead_len)
        except RamifyError:
            return False, None
        self._grammars[request.rid] = (grammar, request.target_len)
        return True, grammar.mask

    def _spent(self, rows: int, began: float) -> None:
        seconds = self._clock() - began
        self.cost.learn(rows, seconds)
        self._counters.draft_model_s += seconds
        self._counters.draft_model_tokens += rows

    def _logits(self, hidden: torch.Tensor, masks: Sequence[np.ndarray | None]) -> torch.Tensor:
        """The logits over the main model's vocabulary, (R, hidden) → (R, vocabulary). The vocabularies of the
        two models may be padded to different sizes."""
        wanted = self._limits.vocab_size
        if self._runner.model.config.vocab_size == wanted:
            return self._runner.logits(hidden, masks)
        logits = self._runner.logits(hidden)[:, :wanted]
        missing = wanted - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf).contiguous()

    def _start(self, request: Request) -> int:
        kv = self._kv_of(request)
        return min(kv.computed + len(kv.ahead), request.target_len - 1)

    def _kv_of(self, request: Request) -> DraftKv:
        """The `DraftKv` of `request`, without the KV of rejected draft tokens."""
        kv = request.speculation.kv
        if kv is None or kv.table is not request.pages:
            kv = request.speculation.kv = DraftKv(request.pages, self._marked(request))
        elif len(kv.ahead) and not request.draft_len:
            computed = kv.computed + common_prefix(request.ids[kv.computed :], kv.ahead)
            self._compute(request, kv, computed, NONE)
        return kv

    def _extension(self, request: Request, start: int, stop: int) -> Extension:
        """The part of a batch for positions ``[start, stop)`` of `request`. These positions count as computed
        from now on."""
        kv = request.speculation.kv
        assert kv is not None
        computed = max(kv.computed, min(stop, request.length))
        self._compute(request, kv, computed, request.target_ids[computed:stop].copy())
        return Extension(request.target_ids, start, stop, request.pages.ids)

    def _compute(self, request: Request, kv: DraftKv, computed: int, ahead: np.ndarray) -> None:
        """Record that the first `computed` tokens of `request` are computed, and the tokens `ahead` after
        them."""
        size = self._pages.page_size
        first, (full, rows) = kv.computed // size, divmod(computed, size)
        table = request.pages.ids
        self._rows[table[first:full]] = size
        if rows:
            self._rows[table[full]] = rows
        kv.computed, kv.ahead = computed, ahead

    def _marked(self, request: Request) -> int:
        size = self._pages.page_size
        rows = self._rows[request.pages.ids[: -(-request.computed_len // size)]]
        partial = np.flatnonzero(rows < size)
        found = len(rows) * size if not len(partial) else int(partial[0] * size + rows[partial[0]])
        return min(found, request.computed_len)
