"""Overlap scheduling: the pass of the next step is launched before the host knows this step's tokens.

    without  device | pass 1 |............| pass 2 |............| pass 3 |
             host            | bookkeeping|        | bookkeeping|
    with     device | pass 1 | pass 2 | pass 3 |
             host            | bookkeeping of 1 | bookkeeping of 2 |

In most steps a decoding request computes one token, and a prefilling request its next chunk. So as soon as a
step's tokens are chosen on the device, a pass over these tokens and the next chunks is launched, for all
requests that may continue. Then the host waits for the tokens, appends them, ends requests that are done,
sends, receives and schedules. For each entry of the next plan that equals a part of the launched pass, the
hidden states of the launched pass are taken. All other entries, such as those of newly admitted requests, are
computed in a second pass.

The launched rows of a request are void if the request has ended, was retracted, or has another entry in the
plan. A void row does no harm: its KV is in a page of the row's own request, after the computed tokens, where
every row is written again before it is read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ramify.errors import EngineError, RamifyError
from ramify.kernels.machine.transfers import to_device
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack, pack_columns
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.requests.slots import slots_of
from ramify.runtime.scheduler.speculation.draft_model import DraftModel

log = logging.getLogger("ramify")


class MaskFiller:
    """Fills token masks in one background thread, while a forward pass runs. Walks over the token trie and
    forward passes release the GIL, so they run in parallel."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None
        self._errors: dict[str, RamifyError] = {}

    def begin_filling(self, requests: Sequence[Request]) -> None:
        """Start to fill the masks of `requests`, which are all constrained. The matchers of `requests` must
        not be used until `wait` has returned."""
        self._errors.clear()
        if requests:
            self._filling = self._thread.submit(self._fill, requests)

    def wait(self) -> None:
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def fill_now(self, requests: Sequence[Request]) -> None:
        self._errors.clear()
        self._fill(requests)

    @property
    def errors(self) -> Mapping[str, RamifyError]:
        """The errors of masks that could not be filled, by request id."""
        return self._errors

    def _fill(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.constrained is None:
                continue
            try:
                # While a prompt is healed, its proposed token may always be chosen, whatever the mask allows.
                request.constrained.fill(request.budget_left, may_be_empty=request.healing is not None)
            except RamifyError as error:
                self._errors[request.rid] = error
            except Exception as error:
                log.exception("the grammar of %s failed", request.rid)
                self._errors[request.rid] = EngineError(f"The grammar failed: {error}")


@dataclasses.dataclass(slots=True)
class _Launched:
    """One request's part of a launched pass: positions ``[start, stop)``, in the rows of the pass from `row`
    on.

    pages : the pages of these positions
    choice : for a decoding request, the index of its token in `tokens` of `launch`; None for a prompt chunk
    token : for a decoding request, its token; None until the host has it
    """

    request: Request
    start: int
    stop: int
    row: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    choice: int | None = None
    token: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """The hidden states of a plan that were computed ahead.

    hidden : (rows, hidden size); None if no entry was computed ahead
    rows : for each entry of the plan, its first row in `hidden`; None if the entry was not computed ahead
    """

    hidden: Tensor | None
    rows: list[int | None]

    def joined(self, computed: Tensor | None, counts: Sequence[int]) -> Tensor:
        """The hidden states of the whole plan, in which entry i has `counts[i]` tokens.

        `computed` holds the hidden states of the entries that were not computed ahead, in the order of the
        plan; None if there are no such entries.
        """
        if self.hidden is None:
            assert computed is not None
            return computed
        following = len(self.hidden)
        order: list[int] = []
        for row, count in zip(self.rows, counts, strict=True):
            if row is not None:
                order += range(row, row + count)
            else:
                order += range(following, following + count)
                following += count
        whole = self.hidden if computed is None else torch.cat([self.hidden, computed])
        return whole if order == list(range(len(whole))) else index_select(whole, order)


class OverlapScheduling:
    """Launches passes ahead, and returns the hidden states that they computed."""

    def __init__(self, runner: Runner, pages: RequestPages) -> None:
        self._runner = runner
        self._pages = pages
        self._launched: list[_Launched] = []
        self._hidden: Tensor | None = None

    @property
    def idle(self) -> bool:
        """True if no pass has been launched for the next step."""
        return not self._launched

    def launch(
        self, requests: Sequence[Request], tokens: Tensor, chunks: Sequence[ScheduledRequest] = ()
    ) -> None:
        """Launch a pass over `chunks` of prompts and over `tokens`, (R,) int64 on the device: the token
        chosen for each of `requests`.

        Four kinds of parts are left out: requests with known or draft tokens, requests whose chosen token is
        their last, requests for which no page is free, and chunks of requests with a page still to be copied.
        If none of `requests` is left, nothing is launched.
        """
        decodes = [
            _Launched(request, request.length, request.length + 1, choice=choice)
            for choice, request in enumerate(requests)
            if not request.ahead_len and request.budget_left > 1 and self._pages.grow(request, ahead=1)
        ]
        if not decodes:
            return
        prefills = [
            _Launched(request, request.computed_len, stop)
            for request, _, stop, *_ in chunks
            if request.pages.copy is None and stop > request.computed_len
        ]
        self._launched, row = decodes + prefills, 0
        for entry in self._launched:
            entry.row, row = row, row + entry.stop - entry.start
            entry.pages = self._written(entry.request, entry.start, entry.stop)
        extensions = [
            Extension(None, entry.start, entry.stop, entry.request.pages.ids, lora=entry.request.lora)
            for entry in self._launched
        ]
        if len(decodes) < len(requests):
            tokens = index_select(tokens, [entry.choice for entry in decodes if entry.choice is not None])
        if prefills:
            known = [entry.request.target_ids[entry.start : entry.stop] for entry in prefills]
            ids = torch.from_numpy(np.concatenate(known).astype(np.int64))
            tokens = torch.cat([tokens, to_device(ids, tokens.device)])
        try:
            self._hidden = self._runner.forward(pack(extensions, self._pages.page_size, next_ids=tokens))
        except Exception:  # the next step computes these tokens itself, and reports its own error
            log.exception("a pass ahead failed")
            self._launched = []

    def _written(self, request: Request, start: int, stop: int) -> list[int]:
        size = self._pages.page_size
        return request.pages.ids[start // size : -(-stop // size)].tolist()

    def record(self, tokens: Sequence[int]) -> None:
        """Record `tokens`, (R,), which were chosen and have arrived on the host.

        A step chooses tokens several times if known or draft tokens are accepted. At most one of these
        choices launches a pass, over `tokens`; `record` has an effect for that choice only.
        """
        for entry in self._launched:
            if entry.choice is not None and entry.token is None:
                entry.token = tokens[entry.choice]

    def take_computed(self, plan: Sequence[ScheduledRequest]) -> Ahead:
        """The hidden states of the launched pass that `plan` can use. All other launched rows are void."""
        if not self._launched:
            return Ahead(None, [None] * len(plan))
        launched = {entry.request.rid: entry for entry in self._launched}
        hidden, self._launched, self._hidden = self._hidden, [], None
        found = [(scheduled, launched.get(scheduled.request.rid)) for scheduled in plan]
        rows = [
            entry.row if entry is not None and self._wanted(scheduled, entry) else None
            for scheduled, entry in found
        ]
        if all(row is None for row in rows):
            return Ahead(None, rows)
        if None in rows:
            assert hidden is not None
            hidden = hidden.clone()  # the runner's next pass, which follows, may overwrite its states
        return Ahead(hidden, rows)

    def _wanted(self, scheduled: ScheduledRequest, entry: _Launched) -> bool:
        request = scheduled.request
        return (
            request is entry.request
            and request.computed_len == entry.start
            and scheduled.stop == entry.stop
            and (entry.choice is None or int(request.ids[entry.start]) == entry.token)
            and request.pages.copy is None
            and self._written(request, entry.start, entry.stop) == entry.pages
        )


class ForwardPass:
    """Runs forward passes. While a pass runs, the grammar masks for the tokens chosen after it are filled."""

    def __init__(self, runner: Runner, pages: RequestPages, draft_model: DraftModel | None) -> None:
        self.masks = MaskFiller()
        self.overlap = OverlapScheduling(runner, pages)
        self._runner = runner
        self._pages = pages
        self._draft_model = draft_model

    def run_plan(self, plan: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Run `plan`. Returns the hidden states of the scheduled tokens, (tokens, hidden size), in the order
        of `plan`.

        Hidden states that were computed ahead are not computed again.
        """
        ahead, states = self.overlap.take_computed(plan), self._pages.states
        rest = plan
        if ahead.hidden is not None:
            rest = [scheduled for scheduled, row in zip(plan, ahead.rows, strict=True) if row is None]
        copies = []
        for scheduled in rest:
            pages = scheduled.request.pages
            if pages.copy is not None:
                copies.append(pages.copy)
                pages.copy = None
            if scheduled.wave:
                copies += [part.copy for part in scheduled.wave if part.copy is not None]
        if states.present:
            assert self._runner.states is not None
            self._runner.states.copy(states.copies.take())
        if self._draft_model is not None:
            self._draft_model.wrote(plan, copies)
        self.masks.begin_filling(
            [
                scheduled.request
                for scheduled in plan
                if scheduled.request.constrained is not None and scheduled.samples
            ]
        )
        try:
            computed = self._runner.forward(self._packed(rest, copies)) if rest else None
        finally:
            self.masks.wait()
        return ahead.joined(computed, [scheduled.tokens for scheduled in plan])

    def _packed(self, plan: Sequence[ScheduledRequest], copies: Sequence[tuple[int, int]]) -> ForwardBatch:
        """The batch of `plan`."""
        size, present = self._pages.page_size, self._pages.states.present
        if any([scheduled.wave for scheduled in plan]):
            return pack([each for scheduled in plan for each in _extensions(scheduled)], size, copies)
        requests = [scheduled.request for scheduled in plan]
        starts = np.array([scheduled.start for scheduled in plan], np.int64)
        stops = np.array([scheduled.stop for scheduled in plan], np.int64)
        if int((stops - starts).max()) == 1:
            ids = np.array([request.buffer.item(start) for request, start, *_ in plan])
        else:
            ids = np.concatenate([request.buffer[start:stop] for request, start, stop, *_ in plan])
        states = [request.pages.state for request in requests] if present else []
        for request, stop in zip(requests, stops.tolist(), strict=True) if present else ():
            request.pages.state_len = stop
        held, slots = self._pages.slots, slots_of(requests)
        table = held.pages[slots, : -(-int(stops.max()) // size)]
        return pack_columns(
            ids, starts, stops, table, size, copies=copies, states=states, loras=held.loras[slots]
        )


def _extensions(scheduled: ScheduledRequest) -> Iterator[Extension]:
    request, start, stop, _, wave = scheduled
    pages = request.pages
    if not wave:
        pages.state_len = stop
        yield Extension(request.target_ids, start, stop, pages.ids, pages.state, request.lora)
    for one, first, end, _ in wave:
        yield Extension(one.ids, first, end, one.table, one.slot, request.lora, one.start)
