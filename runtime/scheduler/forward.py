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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.errors import EngineError, RamifyError
from ramify.kernels.machine.transfers import to_device
from ramify.runtime.cores import usable_cores
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack, pack_columns
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.requests.slots import slots_of
from ramify.runtime.scheduler.speculation.draft_model import DraftModel

log = logging.getLogger("ramify")


MOST_MASK_THREADS = 8
MASKS_A_THREAD = 8
"""The fewest masks for which a further thread is worth waking: a mask that was met before takes 5 us."""


def mask_threads(device: torch.device) -> int:
    """The number of threads that fill masks: a thread for each usable core that does not compute. Beside a
    pass on the CPU, or on all cores, this is one."""
    computing = torch.get_num_threads() if device.type == "cpu" else 1
    return max(1, min(len(usable_cores()) - computing, MOST_MASK_THREADS))


class MaskFiller:
    """Fills token masks in background threads, while a forward pass runs. Walks over the token trie and
    forward passes release the GIL, so they run in parallel.

    The masks of one grammar are filled by one thread, because its matchers share a cache. Preambles may be
    shared by requests of several grammars, so one thread fills the masks of all these.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="masks")
        self._most = threads
        self._filling: list[Future[None]] = []
        self._errors: dict[str, RamifyError] = {}

    def begin_filling(self, requests: Sequence[Request]) -> None:
        """Start to fill the masks of `requests`, which are all constrained. The matchers of `requests` must
        not be used until `wait` has returned."""
        self._errors.clear()
        parts = min(self._most, -(-len(requests) // MASKS_A_THREAD))
        self._filling = [self._threads.submit(self._fill, part) for part in self._shares(requests, parts)]

    def _shares(self, requests: Sequence[Request], parts: int) -> list[list[Request]]:
        """`requests` in at most `parts` parts of about equal length, with those of one grammar together."""
        if parts < 2:
            return [list(requests)] if requests else []
        behind = {id(request.grammar) for request in requests if request.preambles}
        by_grammar: dict[int, list[Request]] = {}
        for request in requests:
            grammar = id(request.grammar)
            shared = bool(request.preambles) or grammar in behind
            by_grammar.setdefault(0 if shared else grammar, []).append(request)
        shares: list[list[Request]] = [[] for _ in range(parts)]
        for some in sorted(by_grammar.values(), key=len, reverse=True):
            min(shares, key=len).extend(some)
        return [share for share in shares if share]

    def wait(self) -> None:
        filling, self._filling = self._filling, []
        wait(filling)  # all of them, also if one raises
        for future in filling:
            future.result()

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


class _Part(NamedTuple):
    """One request's part of a launched pass: positions ``[start, stop)``, in the rows of the pass from `row`
    on.

    pages : the pages of these positions
    choice : for a decoding request, the index of its token in `tokens` of `launch`; None for a prompt chunk
    """

    request: Request
    start: int
    stop: int
    row: int
    pages: list[int]
    choice: int | None = None


@dataclasses.dataclass(slots=True)
class _Launched:
    """A launched pass. `hidden` are the hidden states of all parts, (rows, hidden size); `tokens` the tokens
    that were chosen, None until the host has them."""

    parts: list[_Part]
    hidden: Tensor
    tokens: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """The hidden states of a plan that were computed ahead.

    hidden : (rows, hidden size); None if no entry was computed ahead
    rows : for each entry of the plan, its first row in `hidden`; -1 if it was not computed ahead
    """

    hidden: Tensor | None
    rows: list[int]

    def joined(self, computed: Tensor | None, counts: Sequence[int]) -> Tensor:
        """The hidden states of the whole plan, in which entry i has `counts[i]` tokens.

        `computed` holds the hidden states of the entries that were not computed ahead, in the order of the
        plan; None if there are no such entries.
        """
        if self.hidden is None:
            assert computed is not None
            return computed
        if computed is None and sum(counts) == len(self.hidden) and self.rows == sorted(self.rows):
            return self.hidden
        following = len(self.hidden)
        order: list[int] = []
        for row, count in zip(self.rows, counts, strict=True):
            first, following = (row, following) if row >= 0 else (following, following + count)
            order += range(first, first + count)
        return index_select(self.hidden if computed is None else torch.cat([self.hidden, computed]), order)


class OverlapScheduling:
    """Launches passes ahead, and returns the hidden states that they computed."""

    def __init__(self, runner: Runner, pages: RequestPages) -> None:
        self._runner = runner
        self._pages = pages
        self._launched: _Launched | None = None

    @property
    def idle(self) -> bool:
        """True if no pass has been launched for the next step."""
        return self._launched is None

    def launch(
        self, requests: Sequence[Request], tokens: Tensor, chunks: Sequence[ScheduledRequest] = ()
    ) -> None:
        """Launch a pass over `chunks` of prompts and over `tokens`, (R,) int64 on the device: the token
        chosen for each of `requests`.

        Four kinds of parts are left out: requests with known or draft tokens, requests whose chosen token is
        their last, requests for which no page is free, and chunks of requests with a page still to be copied.
        If none of `requests` is left, nothing is launched.
        """
        size, held = self._pages.page_size, self._pages.slots
        choices = [
            choice
            for choice, request in enumerate(requests)
            if not (request.known_len or request.draft_len)
            and request.budget_left > 1
            and (request.length < request.pages.count * size or self._pages.grow(request, ahead=1))
        ]
        if not choices:
            return
        prefills = [one for one in chunks if one.request.pages.copy is None and one.tokens]
        parts = [requests[choice] for choice in choices] + [one.request for one in prefills]
        lengths = [request.length for request in parts[: len(choices)]]
        starts = lengths + [one.start for one in prefills]
        stops = [length + 1 for length in lengths] + [one.stop for one in prefills]
        slots = slots_of(parts)
        if len(choices) < len(requests):
            tokens = index_select(tokens, choices)
        if prefills:
            known = [one.request.buffer[one.start : one.stop] for one in prefills]
            ids = torch.from_numpy(np.concatenate(known).astype(np.int64))
            tokens = torch.cat([tokens, to_device(ids, tokens.device)])
        table, loras = held.pages[slots, : -(-max(stops) // size)], held.loras[slots]
        batch = pack_columns(
            None, np.array(starts), np.array(stops), table, size, next_ids=tokens, loras=loras
        )
        try:
            hidden = self._runner.forward(batch)
        except Exception:  # the next step computes these tokens itself, and reports its own error
            log.exception("a pass ahead failed")
            return
        pages = map(self._written, parts, starts, stops)
        rows = batch.query_starts.tolist()
        of: list[int | None] = [*choices, *[None] * len(prefills)]
        self._launched = _Launched(list(map(_Part, parts, starts, stops, rows, pages, of)), hidden)

    def _written(self, request: Request, start: int, stop: int) -> list[int]:
        """The pages of the positions ``[start, stop)`` of `request`."""
        size, table = self._pages.page_size, request.pages
        if stop - start == 1 and table.slots is not None:  # in a quarter of the time
            return [table.slots.pages.item(table.slot, start // size)]
        return table.ids[start // size : -(-stop // size)].tolist()

    def record(self, tokens: Sequence[int]) -> None:
        """Record `tokens`, (R,), which were chosen and have arrived on the host.

        A step chooses tokens several times if known or draft tokens are accepted. At most one of these
        choices launches a pass, over `tokens`; `record` has an effect for that choice only.
        """
        launched = self._launched
        if launched is not None and launched.tokens is None:
            launched.tokens = tokens

    def take_computed(self, plan: Sequence[ScheduledRequest]) -> Ahead:
        """The hidden states of the launched pass that `plan` can use. All other launched rows are void."""
        rows = [-1] * len(plan)
        launched, self._launched = self._launched, None
        if launched is None:
            return Ahead(None, rows)
        places = {scheduled.request: place for place, scheduled in enumerate(plan)}
        for part in launched.parts:
            request, start, stop, row, pages, choice = part
            place = places.get(request)
            if (
                place is not None
                and plan[place].start == start
                and plan[place].stop == stop
                and (
                    choice is None
                    or (launched.tokens and request.buffer.item(start) == launched.tokens[choice])
                )
                and request.pages.copy is None
                and self._written(request, start, stop) == pages
            ):
                rows[place] = row
        hidden = launched.hidden
        if max(rows) < 0:
            return Ahead(None, rows)
        if min(rows) < 0:
            hidden = hidden.clone()  # the runner's next pass, which follows, may overwrite its states
        return Ahead(hidden, rows)


class ForwardPass:
    """Runs forward passes. While a pass runs, the grammar masks for the tokens chosen after it are filled."""

    def __init__(self, runner: Runner, pages: RequestPages, draft_model: DraftModel | None) -> None:
        self.masks = MaskFiller(mask_threads(runner.device))
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
            rest = [scheduled for scheduled, row in zip(plan, ahead.rows, strict=True) if row < 0]
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
        size = self._pages.page_size
        if any(scheduled.wave for scheduled in plan):
            return pack([each for scheduled in plan for each in _extensions(scheduled)], size, copies)
        requests = [scheduled.request for scheduled in plan]
        starts = np.array([scheduled.start for scheduled in plan], np.int64)
        stops = np.array([scheduled.stop for scheduled in plan], np.int64)
        if int((stops - starts).max()) == 1:
            ids = np.array([request.buffer.item(start) for request, start, *_ in plan])
        else:
            ids = np.concatenate([request.buffer[start:stop] for request, start, stop, *_ in plan])
        states = [request.pages.state for request in requests if request.pages.state is not None]
        if states:
            for request, stop in zip(requests, stops.tolist(), strict=True):
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
