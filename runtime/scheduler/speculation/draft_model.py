"""The draft model: its passes over requests, and the KV that it has of them in pages of its own.

Example, in pages of 4 rows: the model has computed 7 of 8 tokens of a request, and the draft model 4.

    tokens        a b c d | e f g h |
    draft model   ■ ■ ■ ■ | · · · · |       pass 1 computes e f g h, and gives x
                  ■ ■ ■ ■ | ■ ■ ■ ■ | ·     pass 2 computes x, and gives y

A page has the same number in the pools of both models. So one page table serves both, and a page that is
shared, copied or evicted is so for both. The draft model computes a request when it is to draft, not before:
prompts of requests that never draft cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ramify.errors import RamifyError
from ramify.kernels.sampling_inputs import TokenCounts
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.sampler import SamplingRow
from ramify.runtime.scheduler.constraints.constrained import ConstrainedOutput
from ramify.runtime.scheduler.counters import Counters
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.outputs.next_tokens import RequestSampler
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.request import PageTable, Request, ScheduledRequest, common_prefix
from ramify.runtime.scheduler.speculation.acceptance import MOST_ROWS, StepCost, rows_of

NONE = np.zeros(0, dtype=np.int32)


@dataclasses.dataclass(slots=True)
class DraftKv:
    """What the draft model has computed of one request, as long as that has the pages of `table`."""

    table: PageTable
    computed: int
    """Tokens of the sequence."""
    ahead: np.ndarray = dataclasses.field(default_factory=lambda: NONE)
    """(n,) int32: known and draft tokens behind them. They count once the sequence has them."""


class Drafted(NamedTuple):
    request: Request
    token: int
    confidence: float
    """The draft model's probability of `token`."""


class DraftModel:
    """Computes what requests lack in the draft model's pages, and their next tokens by it.

    `cost` is that of one pass with its choice of tokens, by rows.
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
        self._counters = counters
        self._runner = runner
        self._pages = pages
        self._limits = limits
        self._clock = clock
        self._sampler = RequestSampler(runner, limits)
        self._rows = np.zeros(runner.pool.num_pages, dtype=np.int32)
        """By page: its first rows that hold the draft model's KV of the page's tokens."""
        self._grammars: dict[str, tuple[ConstrainedOutput, int]] = {}
        """By request: its grammar, ahead of the request's own, and the tokens that it has read."""

    @property
    def seconds(self) -> float:
        """The time of all passes so far."""
        return self._counters.draft_model_s

    def missing(self, request: Request) -> int:
        """Tokens, known and draft tokens among them, that a pass must compute to give the next one."""
        return request.target_len - self._start(request)

    def wrote(self, plan: Sequence[ScheduledRequest], copies: Sequence[tuple[int, int]]) -> None:
        """The model computes `plan` after `copies` of pages: rows that get other tokens hold no KV of the
        draft model any more."""
        used = [(source, to) for source, to in copies if self._rows[source]]
        for source, to in copies:
            self._rows[to] = self._rows[source]
        if used:
            self._runner.copy_pages(used)
        size = self._pages.page_size
        for request, stop in plan:
            kv, start = request.speculation.kv, request.computed_len
            if kv is not None and kv.table is request.pages:
                start = max(start, kv.computed)  # these tokens were computed by both, and stay
            if start < stop:
                page, row = divmod(start, size)
                table = request.pages.ids
                self._rows[table[page]] = min(self._rows[table[page]], row)
                self._rows[table[page + 1 : -(-stop // size)]] = 0

    def overwritten(self, pages: Sequence[int]) -> None:
        """`pages` hold other tokens now, of which this model has computed none."""
        self._rows[list(pages)] = 0

    def begin(self) -> None:
        """A step begins: draft tokens of the last one are decided."""
        self._grammars.clear()

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute up to `MOST_ROWS` tokens that `requests` lack, the last one of each excepted."""
        began, room = self._clock(), MOST_ROWS
        extensions = []
        for request in requests:
            kv = self._settled(request)
            # A request before may compute a prefix that this one shares, in the same pass.
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
        """One pass: the token behind the draft tokens of each request, chosen by its own options, random
        number and grammar. Requests for which no page is free, or whose grammar allows none, are left out."""
        began = self._clock()
        ready: list[Request] = []
        rows: list[SamplingRow] = []
        for request in requests:
            allowed, mask = self._grammar_ahead(request)
            if allowed and self._pages.grow(request):
                ready.append(request)
                counts = None
                if request.sampling.penalises:
                    counts = TokenCounts.of(request.target_ids, request.prompt_len)
                rows.append(self._sampler.row(request, request.ahead_len, mask, counts))
        if not ready:
            return []
        size = self._pages.page_size
        batch = pack([self._extension(one, self._start(one), one.target_len) for one in ready], size)
        hidden = self._runner.forward(batch)
        if not batch.decoding:
            hidden = index_select(hidden, (batch.query_starts[1:] - 1).tolist())
        tokens, found = self._runner.sampler.begin_draw(
            self._logits(hidden, [row.mask for row in rows]), rows, range(len(rows)), 0
        ).result()
        self._spent(len(batch.ids), began)
        return [
            Drafted(request, token, math.exp(logprob))
            for request, token, (logprob, _) in zip(ready, tokens, found, strict=True)
        ]

    def _grammar_ahead(self, request: Request) -> tuple[bool, np.ndarray | None]:
        """Whether the grammar goes on behind the known and draft tokens, and the mask of the next one."""
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
        """(R, hidden) → (R, vocabulary of the model): both vocabularies may be padded differently."""
        wanted = self._limits.vocab_size
        if self._runner.model.config.vocab_size == wanted:
            return self._runner.logits(hidden, masks)
        logits = self._runner.logits(hidden)[:, :wanted]
        missing = wanted - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-math.inf).contiguous()

    def _start(self, request: Request) -> int:
        kv = self._settled(request)
        return min(kv.computed + len(kv.ahead), request.target_len - 1)

    def _settled(self, request: Request) -> DraftKv:
        """What is computed of `request`, now that it is known which tokens came."""
        kv = request.speculation.kv
        if kv is None or kv.table is not request.pages:
            kv = request.speculation.kv = DraftKv(request.pages, self._marked(request))
        elif len(kv.ahead) and not request.draft_len:
            computed = kv.computed + common_prefix(request.ids[kv.computed :], kv.ahead)
            self._compute(request, kv, computed, NONE)
        return kv

    def _extension(self, request: Request, start: int, stop: int) -> Extension:
        """Positions ``[start, stop)``, which count as computed from now on."""
        kv = request.speculation.kv
        assert kv is not None
        computed = max(kv.computed, min(stop, request.length))
        self._compute(request, kv, computed, request.target_ids[computed:stop].copy())
        return Extension(request.target_ids, start, stop, request.pages.ids)

    def _compute(self, request: Request, kv: DraftKv, computed: int, ahead: np.ndarray) -> None:
        """Record that the first `computed` tokens of `request`, and `ahead` behind them, are computed."""
        size = self._pages.page_size
        first, (full, rows) = kv.computed // size, divmod(computed, size)
        table = request.pages.ids
        self._rows[table[first:full]] = size
        if rows:
            self._rows[table[full]] = rows
        kv.computed, kv.ahead = computed, ahead

    def _marked(self, request: Request) -> int:
        """The first tokens of `request` whose KV its pages hold, by the marks of the pages."""
        size = self._pages.page_size
        rows = self._rows[request.pages.ids[: -(-request.computed_len // size)]]
        partial = np.flatnonzero(rows < size)
        found = len(rows) * size if not len(partial) else int(partial[0] * size + rows[partial[0]])
        return min(found, request.computed_len)
