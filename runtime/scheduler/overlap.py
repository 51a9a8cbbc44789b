"""The pass after a step, launched before the host knows the step's tokens: its own work hides behind that.

Decoding goes on with one token a request, mostly. So when a step's tokens are chosen on the device, the pass
that computes them is launched at once, for all requests that may go on; then the host waits for the tokens,
appends them, ends what is done, sends, receives and plans. Where the next plan wants what was launched, it is
taken; the row of a request that ended, was retracted, or goes on otherwise is void. Such a row has written to
a place that was its request's own when it was launched, behind all that is known: nobody reads it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ramify.runtime.executor.attention import picked
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.runner import Runner
from ramify.runtime.processes.worker_process import log
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.request import Request

if TYPE_CHECKING:
    from ramify.runtime.scheduler.scheduler import Planned


@dataclasses.dataclass(slots=True)
class _Launched:
    """Row `row` of the pass: the token of `request` at `position`, chosen as entry `choice`."""

    request: Request
    row: int
    choice: int
    position: int
    page: int


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """What a plan finds computed: row `rows[i]` of `hidden` is its i-th entry's, None where there is none."""

    hidden: Tensor | None
    rows: list[int | None]

    def joined(self, fresh: Tensor | None, counts: Sequence[int]) -> Tensor:
        """States of a whole plan, `counts[i]` for its i-th entry. `fresh` are those of entries without."""
        if self.hidden is None:
            assert fresh is not None
            return fresh
        following = len(self.hidden)
        order: list[int] = []
        for row, count in zip(self.rows, counts, strict=True):
            if row is not None:
                order.append(row)
            else:
                order += range(following, following + count)
                following += count
        whole = self.hidden if fresh is None else torch.cat([self.hidden, fresh])
        return whole if order == list(range(len(whole))) else picked(whole, order)


class Lookahead:
    """Launches passes ahead and hands out what they computed."""

    def __init__(self, runner: Runner, pages: RequestPages) -> None:
        self._runner = runner
        self._pages = pages
        self._launched: list[_Launched] = []
        self._tokens: list[int] = []
        self._hidden: Tensor | None = None

    def launch(self, requests: Sequence[Request], tokens: Tensor) -> None:
        """Compute the tokens chosen for `requests`, (R,) int64 on the device, which all others precede.

        Left out are requests that have a draft or end with this token, and those for which no page is free.
        """
        self._launched = [
            _Launched(request, row=0, choice=choice, position=request.length, page=0)
            for choice, request in enumerate(requests)
            if not request.draft_len and request.budget_left > 1 and self._pages.grow(request, ahead=1)
        ]
        if not self._launched:
            return
        for row, entry in enumerate(self._launched):
            entry.row, entry.page = row, entry.request.pages[entry.position // self._pages.page_size]
        extensions = [
            Extension(None, entry.position, entry.position + 1, entry.request.pages)
            for entry in self._launched
        ]
        if len(extensions) < len(requests):
            tokens = picked(tokens, [entry.choice for entry in self._launched])
        try:
            self._hidden = self._runner.forward(pack(extensions, self._pages.page_size, next_ids=tokens))
        except Exception:  # the step that wants it will try again, and answer for it
            log.exception("a pass ahead failed")
            self._launched = []

    def settle(self, tokens: Sequence[int]) -> None:
        """The tokens that were chosen: the R of `launch`, now on the host."""
        self._tokens = list(tokens)

    def take(self, plan: Sequence[Planned]) -> Ahead:
        """What of `plan` was computed ahead. The rest is void from now on."""
        launched = {entry.request.rid: entry for entry in self._launched}
        hidden, self._launched, self._hidden = self._hidden, [], None
        if not launched:
            return Ahead(None, [None] * len(plan))
        found = [(planned, launched.get(planned.request.rid)) for planned in plan]
        rows = [
            entry.row if entry is not None and self._wanted(planned, entry) else None
            for planned, entry in found
        ]
        if all(row is None for row in rows):
            return Ahead(None, rows)
        if None in rows:
            assert hidden is not None
            hidden = hidden.clone()  # it holds until the next pass, which is to come
        return Ahead(hidden, rows)

    def _wanted(self, planned: Planned, entry: _Launched) -> bool:
        """The plan computes this very token, and writes it where it was written."""
        request, position = planned.request, entry.position
        return (
            request is entry.request
            and request.computed_len == position
            and planned.stop == position + 1
            and int(request.ids[position]) == self._tokens[entry.choice]
            and request.copy is None
            and request.pages[position // self._pages.page_size] == entry.page
        )
