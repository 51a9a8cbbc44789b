"""Overlap scheduling: the pass of the next step is launched before the host knows this step's tokens.

    without  device | pass 1 |............| pass 2 |............| pass 3 |
             host            | bookkeeping|        | bookkeeping|
    with     device | pass 1 | pass 2 | pass 3 |
             host            | bookkeeping of 1 | bookkeeping of 2 |

A decoding request goes on with one token, mostly, and a prefilling one with its next chunk. So as soon as a
step's tokens are chosen on the device, the pass that computes them and the next chunks is launched, for all
requests that may go on. Then the host waits for the tokens, appends them, ends requests that are done, sends,
receives and schedules. Where the next plan wants what was launched, it takes it; requests that are admitted
meanwhile have a pass of their own behind it. The rows of a request that ended, was retracted or goes on
otherwise are void. A void row harms nobody: it was written into a page of its own request, behind what is
computed, where nothing is read before it is written again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from ramify.errors import EngineError, RamifyError
from ramify.kernels.machine.transfers import to_device
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.draft_model import DraftModel

log = logging.getLogger("ramify")


class MaskFiller:
    """Fills token masks in a thread. One is enough: walks over the token trie and forward passes release the
    GIL."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling: Future[None] | None = None
        self._errors: dict[str, RamifyError] = {}

    def begin_filling(self, requests: Sequence[Request]) -> None:
        """Start to fill the masks of `requests`, all constrained, whose matchers must not be used until
        `wait`."""
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
        """Errors of masks that could not be filled, by request id."""
        return self._errors

    def _fill(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.constrained is None:
                continue
            try:
                # A prompt that is being healed may keep its last token, which the mask need not allow.
                request.constrained.fill(request.budget_left, may_be_empty=request.healing is not None)
            except RamifyError as error:
                self._errors[request.rid] = error
            except Exception as error:
                log.exception("the grammar of %s failed", request.rid)
                self._errors[request.rid] = EngineError(f"The grammar failed: {error}")


@dataclasses.dataclass(slots=True)
class _Launched:
    """The pass computes positions ``[start, stop)`` of `request` from row `row` on.

    pages : those that are written
    choice : of a decode, whose one token is this entry of those of the launch; None for a chunk of a prompt
    token : of a decode, None until the host has it
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
    """States of a plan that were computed ahead.

    hidden : (rows, hidden size); None where there are none
    rows : for each entry of the plan its first row in `hidden`; None where it was not computed ahead
    """

    hidden: Tensor | None
    rows: list[int | None]

    def joined(self, computed: Tensor | None, counts: Sequence[int]) -> Tensor:
        """The states of the whole plan, in which entry i has `counts[i]` tokens.

        `computed` holds those of the entries that were not computed ahead, in their order.
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
    """Launches passes ahead and hands out what they computed."""

    def __init__(self, runner: Runner, pages: RequestPages) -> None:
        self._runner = runner
        self._pages = pages
        self._launched: list[_Launched] = []
        self._hidden: Tensor | None = None

    @property
    def idle(self) -> bool:
        """No pass is launched for the next step."""
        return not self._launched

    def launch(
        self, requests: Sequence[Request], tokens: Tensor, chunks: Sequence[ScheduledRequest] = ()
    ) -> None:
        """Compute the tokens chosen for `requests`, (R,) int64 on the device, and chunks of prompts.

        Left out are requests with known or draft tokens, requests that end with this token, those for which
        no page is free, and chunks behind a page that is still to be copied.
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
            for request, stop in chunks
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
        except Exception:  # the step that wants these tokens computes them, and reports its own error
            log.exception("a pass ahead failed")
            self._launched = []

    def _written(self, request: Request, start: int, stop: int) -> list[int]:
        """The pages of positions ``[start, stop)``."""
        size = self._pages.page_size
        return request.pages.ids[start // size : -(-stop // size)].tolist()

    def settle(self, tokens: Sequence[int]) -> None:
        """Note the tokens of a choice, (R,), which have arrived on the host. They are those that `launch` was
        given, if there was a launch.

        A step chooses several times where known or draft tokens are accepted; only one choice launches.
        """
        for entry in self._launched:
            if entry.choice is not None and entry.token is None:
                entry.token = tokens[entry.choice]

    def take_computed(self, plan: Sequence[ScheduledRequest]) -> Ahead:
        """The states that `plan` finds computed. Launched rows that it does not want are void."""
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
            hidden = hidden.clone()  # the runner's states hold until its next pass, which is to come
        return Ahead(hidden, rows)

    def _wanted(self, scheduled: ScheduledRequest, entry: _Launched) -> bool:
        """True where the plan's request, positions, token and pages are those that were launched."""
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
    """Runs passes, and fills the grammar masks of the tokens to come meanwhile."""

    def __init__(self, runner: Runner, pages: RequestPages, draft_model: DraftModel | None) -> None:
        self.masks = MaskFiller()
        self.overlap = OverlapScheduling(runner, pages)
        self._runner = runner
        self._pages = pages
        self._draft_model = draft_model

    def run_plan(self, plan: Sequence[ScheduledRequest]) -> torch.Tensor:
        """(tokens, hidden size): the states of the scheduled tokens, in the order of `plan`.

        States that the pass before has computed ahead are taken from there.
        """
        ahead, states = self.overlap.take_computed(plan), self._pages.states
        rest = [scheduled for scheduled, row in zip(plan, ahead.rows, strict=True) if row is None]
        copies = []
        extensions = []
        for request, stop in rest:
            pages = request.pages
            if pages.copy is not None:
                copies.append(pages.copy)
                pages.copy = None
            start, ids = request.computed_len, request.target_ids
            extensions.append(Extension(ids, start, stop, pages.ids, pages.state, request.lora))
            pages.state_len = stop
        if states.present:
            self._runner.copy_states(states.copies.take())
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
            computed = self._runner.forward(pack(extensions, self._pages.page_size, copies)) if rest else None
        finally:
            self.masks.wait()
        return ahead.joined(computed, [stop - request.computed_len for request, stop in plan])
