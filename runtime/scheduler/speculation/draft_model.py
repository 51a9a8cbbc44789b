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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ramify.errors import RamifyError, UnsupportedField
from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.executor.sampler import SamplingBatch, SamplingRow
from ramify.runtime.model.shape.config import ModelShape
from ramify.runtime.model.shape.context import with_context
from ramify.runtime.model.tokenizer.tokenizer import load_backend, tokenizer_file
from ramify.runtime.scheduler.requests.accounts import Counters
from ramify.runtime.scheduler.requests.constrained import ConstrainedOutput
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.parts import NONE, Draft, DraftKv
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest, common_prefix
from ramify.runtime.scheduler.requests.sampling import RequestSampler
from ramify.runtime.scheduler.speculation.acceptance import (
    LEARNING_RATE,
    LONGEST_MATCH,
    MOST,
    MOST_ROWS,
    AcceptanceRates,
    StepCost,
    StepDrafts,
    outcomes,
    rows_of,
)


def check_draft(
    config: EngineConfig, shape: ModelShape, draft: ModelShape, tokenizer: Path, draft_tokenizer: Path
) -> None:
    """Raise `UnsupportedField` if a draft model of shape `draft` cannot draft for the main model, of shape
    `shape`.

    tokenizer, draft_tokenizer : the folders of the tokenizers of the main model and of the draft model
    """
    name = f"draft_model {config.draft_model!r}"
    if draft.states is not None:
        raise _refused(
            f"{name} has linear attention layers: their states cannot go back behind draft tokens that are "
            "not accepted."
        )
    context_length = with_context(shape, config.context_length).context_length
    if draft.context_length < context_length:
        raise _refused(
            f"{name} has a context of {draft.context_length} tokens, and the engine one of {context_length}.",
            f"Give the engine a context_length of {draft.context_length}, or choose another draft model.",
        )
    differing = _difference(tokenizer, draft_tokenizer)
    if differing is not None:
        token, ours, other = differing
        raise _refused(
            f"{name} has another tokenizer: its token {token} is {other!r}, and the model's is {ours!r}."
        )


def _difference(tokenizer: Path, draft_tokenizer: Path) -> tuple[int, str | None, str | None] | None:
    """The first token id with different spellings in the two tokenizers, and both spellings; None if all are
    equal.

    Ids beyond the end of the smaller vocabulary do not count: they are padding in that vocabulary. The
    spelling of an id that a tokenizer does not have is None.
    """
    first, second = tokenizer_file(tokenizer), tokenizer_file(draft_tokenizer)
    if first.read_bytes() == second.read_bytes():
        return None
    ours, others = (
        {token: text for text, token in load_backend(folder).get_vocab(with_added_tokens=True).items()}
        for folder in (tokenizer, draft_tokenizer)
    )
    for token in range(1 + min(max(ours), max(others))):
        if ours.get(token) != others.get(token):
            return token, ours.get(token), others.get(token)
    return None


def _refused(
    message: str, remedy: str = "Choose a smaller model of the same family, with its tokenizer."
) -> UnsupportedField:
    return UnsupportedField(message, field="draft_model", remedy=remedy)


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
        size = self._pages.page_size
        batch = pack([self._extension(one, self._start(one), one.target_len) for one in ready], size)
        hidden = self._runner.forward(batch)
        if not batch.decoding:
            hidden = index_select(hidden, (batch.query_starts[1:] - 1).tolist())
        tokens, found = self._runner.sampler.begin_draw(
            self._logits(hidden, [row.mask for row in rows]), SamplingBatch.of(rows), range(len(rows)), 0
        ).result()
        self._spent(len(batch.ids), began)
        return [
            Drafted(request, token, math.exp(logprob))
            for request, token, (logprob, _) in zip(ready, tokens, found, strict=True)
        ]

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


MODEL = "model"
"""The name of the draft model among the sources of drafts."""
FIRST_RATE = 0.7
"""The assumed acceptance rate of the draft model's tokens, until some have been verified."""
PROBE_SHARE = 0.01
"""While the draft model does not pay, this share of the time is spent on probes: drafts that test whether it
pays now."""
MOST_PROBE_S = 1.0
"""The most seconds that are saved up for probes."""
READY = MOST + 2
"""The draft model drafts for a request at once if it lacks the KV of at most this number of tokens, which one
step may add. If it lacks more, it must catch up first."""


class ModelDrafts:
    """Proposes draft tokens by the draft model, for all requests of a step together."""

    def __init__(self, model: DraftModel, rates: AcceptanceRates, limits: Limits) -> None:
        self._model = model
        self._rates = rates
        self._limits = limits
        self._rate = FIRST_RATE
        self._probe_s = 0.0
        self._drafts = False
        """True if the draft model was found worth its time in the last step."""

    def chance(self, request: Request) -> float:
        """The probability that the draft model's next token for `request` is accepted, estimated before that
        token is known."""
        return request.speculation.model_acceptance.rate(self._rate)

    def is_better(self, request: Request, chance: float, step: StepDrafts) -> bool:
        """True if a token by the draft model, less the cost of its pass, promises more than a looked-up token
        that is accepted with probability `chance`. False if the model lacks more than `READY` tokens."""
        if not self._drafts or self._model.missing(request) > READY:
            return False
        return self.chance(request) - step.price_of(self._model.cost.seconds_of(1)) > chance

    def learn(self, request: Request) -> None:
        """Learn acceptance rates from the last draft and the tokens that were appended."""
        speculation = request.speculation
        draft, speculation.model_draft = speculation.model_draft, None
        for grade, accepted in () if draft is None else outcomes(request, draft):
            self._rates.learn(MODEL, grade, accepted=accepted)
            self._rate += LEARNING_RATE * (accepted - self._rate)
            speculation.model_acceptance.learn(accepted=accepted)

    def propose_drafts(self, requests: Sequence[Request], step: StepDrafts) -> None:
        """Give `requests` the draft tokens that are worth their passes and rows. If no draft token is, probe
        now and then."""
        began = self._model.seconds
        self._propose(requests, step)
        step.seconds = self._model.seconds - began

    def _propose(self, requests: Sequence[Request], step: StepDrafts) -> None:
        model = self._model
        model.begin_step()
        for request in requests:
            self.learn(request)
        self._probe_s = min(self._probe_s + PROBE_SHARE * step.cost.seconds_of(step.rows), MOST_PROBE_S)
        requests = [one for one in requests if one.pages.copy is None and step.most(one) > 0]
        worth = [one for one in requests if self.chance(one) >= step.price]
        if requests:
            self._drafts = self._pays({one: self.chance(one) for one in worth}, len(worth), step)
        if worth and self._drafts:
            missing = {request: model.missing(request) for request in worth}
            late = [one for one in worth if self._is_due(one, missing[one], step, len(requests))]
            self._draft([one for one in worth if missing[one] <= READY], step)
            if late:
                model.catch_up(late)
        elif requests and model.cost.seconds_of(1) <= self._probe_s:
            self._probe(min(requests, key=model.missing), step)

    def _pays(self, promised: Mapping[Request, float], rows: int, step: StepDrafts) -> bool:
        """True if a pass of `rows` tokens is worth its time. `promised` has the expected number of accepted
        tokens that the pass gives, by request."""
        needed = step.price_of(self._model.cost.seconds_of(rows)) + step.price * len(promised)
        return bool(promised) and sum(promised.values()) >= needed

    def _is_due(self, request: Request, missing: int, step: StepDrafts, among: int) -> bool:
        """True if the draft model is to catch up with `request`: the model lacks more than `READY` tokens,
        and `request` has decoded for as long as computing these tokens takes. A long output will probably get
        much longer. If not, the time lost is at most the time that the output has taken.

        missing : the number of tokens that the draft model lacks
        among : the number of requests that share the time of a step
        """
        cost, steps = self._model.cost, step.cost.seconds_of(step.rows) / among
        return missing > READY and cost.seconds_of(missing) <= request.output_len * steps

    def _draft(self, requests: Sequence[Request], step: StepDrafts, *, probing: bool = False) -> None:
        model, began = self._model, self._model.seconds
        drafts = {request: Draft(MODEL, [], request.target_len, []) for request in requests}
        chances = dict.fromkeys(requests, 1.0)
        rows = sum(map(model.missing, requests))
        while requests:
            promised = {one: chances[one] * self.chance(one) for one in requests}
            if not probing and not self._pays(promised, rows, step):
                break
            going = []
            for request, token, confidence in model.next_tokens(requests):
                grade = 1 + int(confidence * (LONGEST_MATCH - 1))
                drafts[request].tokens.append(token)
                drafts[request].grades.append(grade)
                acceptance = request.speculation.model_acceptance
                chances[request] *= acceptance.rate(self._rates.rate_of(MODEL, grade))
                if chances[request] >= step.price and step.most(request) > 0:
                    request.speculation.by_model = True
                    step.add(request, token, chances[request])
                    if not probing and step.most(request) > 0 and not self._ends(request, token):
                        going.append(request)
            step.seconds = model.seconds - began
            requests, rows = going, len(going)
        for request, draft in drafts.items():
            request.speculation.model_draft = draft if draft.tokens else None

    def _probe(self, request: Request, step: StepDrafts) -> None:
        """Draft one token of `request`, if the saved seconds allow. If the draft model lacks more than
        `READY` tokens of `request`, compute some of these instead."""
        missing = self._model.missing(request)
        seconds = self._model.cost.seconds_of(min(missing, MOST_ROWS))
        if seconds > self._probe_s:
            return
        self._probe_s -= seconds
        if missing > READY:
            self._model.catch_up([request])
        else:
            self._draft([request], step, probing=True)

    def _ends(self, request: Request, token: int) -> bool:
        return token in self._limits.eos_token_ids or token in request.sampling.stop_token_ids
