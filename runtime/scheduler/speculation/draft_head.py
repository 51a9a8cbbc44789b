"""The draft head: a layer that drafts from the model's own hidden states (`families.draft_heads`).

    sequence      a    b    c    d              d was chosen by the last step, and is computed by the next
    model        h0   h1   h2                   the hidden states of computed tokens
    head's KV    h0b  h1c  h2d                  row i: the state of token i, and token i + 1
    drafts                  └▶ e ─▶ f           row 3: the head's own state of row 2, and e

The head's KV is in pages with the model's page numbers, as a draft model's. Rows from the head's own states
are never kept: what was accepted is computed again from the model's states.

The model's states are kept until the head computes their rows: when the request drafts, or, while drafting
pays, once the states of `KEPT` positions wait. Otherwise only the last of them are kept, so some pages may
lack the head's rows, as may pages from the prefix tree. The head then skips such pages: its keys are
rotated by their places in the sequence, so any pages can be left out. The last row of a shared prefix holds
the next token of the request that computed it. All this changes which drafts are accepted, and no output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.model.families.draft_heads import DraftHead
from ramify.runtime.scheduler.requests.parts import NONE, DraftKv
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.acceptance import MOST_ROWS
from ramify.runtime.scheduler.speculation.draft_model import DraftModel

KEPT = 64
"""The most positions of a request whose hidden states are kept, or two pages if that is more."""
FOLLOWED = 1024
"""The most rows of a pass behind a prefill, which reads a copy of the model's states."""
NEVER = 1 << 30
"""`HeadRunner.missing` for a request whose next token the head cannot draft in this step."""


@dataclasses.dataclass(slots=True)
class HeadKv(DraftKv):
    """The rows that the head has computed, and the model's states from which the next rows follow.

    `computed` is the position of the next row. `states` holds the hidden states of positions
    ``[computed, end)`` as (states of a pass, first row, count).
    """

    end: int = 0
    states: list[tuple[Tensor, int, int]] = dataclasses.field(default_factory=list)

    def keep(self, start: int, states: Tensor, row: int, count: int) -> None:
        """Keep the states of `count` positions from `start` on, in place of those kept for them before."""
        again = self.computed - start
        if 0 < again < count:  # a state went back to before these positions, which are computed already
            start, row, count = self.computed, row + again, count - again
        if not self.computed <= start <= self.end:
            self.states.clear()
            self.computed = self.end = start
        self.cut(start)
        self.states.append((states, row, count))
        self.end += count

    def cut(self, stop: int) -> None:
        """Drop the states of the positions from `stop` on."""
        while self.states and self.end > stop:
            held, first, length = self.states.pop()
            left = max(0, length - (self.end - stop))
            self.end -= length - left
            if left:
                self.states.append((held, first, left))

    def take(self, stop: int) -> list[Tensor]:
        """Remove the states of positions ``[computed, stop)``, and return them. The caller moves
        `computed`."""
        taken, position = [], self.computed
        while position < stop:
            held, first, length = self.states.pop(0)
            count = min(length, stop - position)
            taken.append(held[first : first + count])
            position += count
            if count < length:
                self.states.insert(0, (held, first + count, length - count))
        return taken

    def skip_to(self, position: int) -> None:
        """Drop the states before `position`, whose rows will not be computed."""
        position = min(position, self.end)
        self.take(position)
        self.computed = position


class HeadRunner(DraftModel):
    """Runs a draft head: keeps the model's hidden states, computes the head's KV, and proposes tokens."""

    _own: dict[str, Tensor]
    """The head's own state of the last row of each request in the last pass: (1, hidden size)."""

    @property
    def _head(self) -> DraftHead:
        head = self._runner.model
        assert isinstance(head, DraftHead)
        return head

    def observe_pass(self, plan: Sequence[ScheduledRequest], read: Tensor) -> None:
        """Take what the model's pass over `plan` gave: the states that the head reads, (tokens, width), in
        the order of `plan`."""
        size = self._pages.page_size
        most, place = max(KEPT, 2 * size), 0
        parts: list[tuple[HeadKv, int, int, int]] = []
        for request, start, stop, tokens, wave in plan:
            first, place = place, place + tokens
            if wave or request.scoring is not None or request.budget_left < 2:
                continue
            kv = self._kv_of(request)
            pending = stop - (kv.computed if kv.computed <= start <= kv.end else start)
            if pending > most and self.pays:
                known = min(stop, request.length - 1)
                self._follow(request, kv, start, read[first : first + known - start])
                start, first = known, first + known - start
            elif stop - start > most:
                skipped = -(-(stop - most) // size) * size - start
                start, first = start + skipped, first + skipped
            if start < stop:
                parts.append((kv, start, first, stop - start))
        if not parts:
            return
        # A copy, since the next pass may overwrite the model's states.
        rows = [row for _, _, first, count in parts for row in range(first, first + count)]
        held = read.clone() if rows == list(range(len(read))) else index_select(read, rows)
        row = 0
        for kv, start, _, count in parts:
            kv.keep(start, held, row, count)
            row += count
            if kv.end - kv.computed > most:
                kv.skip_to(-(-(kv.end - most) // size) * size)

    def missing(self, request: Request) -> int:
        kv = self._ready(request)
        if kv is None or request.known_len or kv.end != request.length - 1:
            return NEVER
        return kv.end - kv.computed

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute rows of `requests` that are not computed yet: at most `MOST_ROWS` in all, and never the
        last row of a request."""
        began, room = self._clock(), MOST_ROWS
        spans = []
        for request in requests:
            kv = self._ready(request)
            if kv is None:
                continue
            stop = min(kv.end, request.length - 2, kv.computed + room)
            if kv.computed < stop:
                room -= stop - kv.computed
                spans.append((request, kv.computed, stop))
        if spans:
            self._compute_rows(spans)
            self._runner.check_device()  # waits for the pass, whose time counts
            self._spent(MOST_ROWS - room, began)

    def _last_states(self, requests: Sequence[Request]) -> tuple[Tensor, int]:
        if requests[0].draft_len:
            spans = [(one, one.target_len - 2, one.target_len - 1) for one in requests]
        else:
            spans = [(one, self._kv_of(one).computed, one.length - 1) for one in requests]
        last = self._compute_rows(spans)
        self._own = {one.rid: last[row : row + 1] for row, one in enumerate(requests)}
        return last, sum(stop - start for _, start, stop in spans)

    def _compute_rows(self, spans: Sequence[tuple[Request, int, int]]) -> Tensor:
        """Compute rows ``[start, stop)`` of requests: from the model's states, or, behind draft tokens, from
        the head's own. Returns the head's states of each one's last row, (requests, hidden size)."""
        extensions, shifts, taken, own = [], [], [], []
        for request, start, stop in spans:
            kv = self._kv_of(request)
            pages, shift = self._table(request, kv, stop)
            ids = request.target_ids
            extensions.append(Extension(ids, start - shift, stop - shift, pages, first=-shift - 1))
            shifts += [shift] * (stop - start)
            if start == kv.computed and kv.end > start:
                taken += kv.take(stop)
                self._compute(request, kv, stop, NONE)
            else:
                own.append(self._own[request.rid])
        assert not (taken and own)
        return self._pass(
            extensions, shifts, self._head.combine(torch.cat(taken)) if taken else torch.cat(own)
        )

    def _follow(self, request: Request, kv: HeadKv, start: int, read: Tensor) -> None:
        """Compute the rows that wait and those of the positions from `start` on, whose states are `read`,
        right behind the model's pass."""
        began = self._clock()
        kv.keep(start, read, 0, len(read))
        if self._aligned(request) is None:
            return
        first, stop = kv.computed, start + len(read)
        while kv.computed < stop:
            self._compute_rows([(request, kv.computed, min(stop, kv.computed + FOLLOWED))])
        self._spent(stop - first, began)

    def _pass(self, extensions: Sequence[Extension], shifts: Sequence[int], states: Tensor) -> Tensor:
        batch = pack(extensions, self._pages.page_size)
        batch.tokens[1] += torch.tensor(shifts)  # keys are rotated by their places in the sequence
        batch = dataclasses.replace(batch, hidden=states)
        return self._lasts(batch, self._runner.forward(batch))

    def _table(self, request: Request, kv: HeadKv, stop: int) -> tuple[np.ndarray, int]:
        """The pages up to row `stop` that hold the head's rows, and the number of positions left out."""
        size, table = self._pages.page_size, request.pages.ids
        page = kv.computed // size
        whole = table[:page][self._rows[table[:page]] == size]
        return np.concatenate([whole, table[page : -(-stop // size)]]), (page - len(whole)) * size

    def _ready(self, request: Request) -> HeadKv | None:
        """`_aligned`, without the states of rejected draft tokens."""
        valid = request.computed_len + request.speculation.recomputed_len
        self._kv_of(request).cut(min(request.length - 1, valid))
        return self._aligned(request)

    def _aligned(self, request: Request) -> HeadKv | None:
        """The `HeadKv` of `request`, whose next row can be computed; None without states for such a row.

        If the rows before it on its page are missing, goes on at the next page.
        """
        kv, size = self._kv_of(request), self._pages.page_size
        page, row = divmod(kv.computed, size)
        if row and self._rows[request.pages.ids[page]] < row:
            kv.skip_to((page + 1) * size)
            if kv.computed % size:
                return None
        return kv if kv.computed < kv.end else None

    def _kv_of(self, request: Request) -> HeadKv:
        kv = request.speculation.kv
        if kv is None or kv.table is not request.pages:
            start = request.computed_len
            kv = request.speculation.kv = HeadKv(request.pages, start, end=start)
        assert isinstance(kv, HeadKv)
        return kv
