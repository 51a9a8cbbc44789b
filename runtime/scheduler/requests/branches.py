"""Pages and state slots of branches: taken for a wave, given back when a branch is finished.

A branch reads the whole pages of the tokens before it, and copies the last page if it is partly full. The
last of several branches behind the same tokens inherits that page, and the slot of its state. As the span
with the most paths comes last, n paths need at most log2(n) more pages and slots than the longest path.

Several forms are computed side by side while that leaves enough for one form. So the branches of a request
always come to their ends, one after the other if need be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.requests.decisions import Branch, Decisions, Part
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.states import RequestStates


class BranchPages:
    """Moves pages and slots between the branches of requests and the prefix cache."""

    def __init__(self, cache: PrefixCache, states: RequestStates) -> None:
        self._cache = cache
        self._states = states

    def take_wave(self, request: Request, budget: int, rows: int) -> list[Part]:
        """The parts that the next step computes for `request`: at most `rows`, and `budget` tokens together.
        Takes their pages and slots. Empty if there are too few for the first part."""
        decisions, wave = _of(request), list[Part]()
        most = decisions.most_pages(self._cache.page_size)
        while budget > 0 and len(wave) < rows and (branch := decisions.next_branch()) is not None:
            copy = None
            if branch not in decisions.live:
                kept = (most, decisions.slots) if wave else (0, 0)
                if not self._take(request, branch, *kept):
                    break
                copy = self._copy(request, branch)
            stop = min(branch.stop, branch.computed + budget)
            wave.append(Part(branch, branch.computed, stop, copy))
            budget -= stop - branch.computed
            if stop == branch.stop:
                decisions.pending.pop()
        return wave

    def computed(self, request: Request, wave: Sequence[Part]) -> None:
        """Record that `wave` is computed and scored: branches that follow wait, and finished ones give back
        their pages and slots."""
        decisions, pages = _of(request), list[int]()
        for branch, start, stop, _ in wave:
            branch.computed = stop
            decisions.count(stop - start)
            if stop < branch.stop:
                continue
            decisions.follow(branch)
            done: Branch | None = branch
            while done is not None and not done.unfinished:
                pages += self._let_go(decisions, done)
                before = done.before
                if before is None:
                    decisions.finish(done.form)
                else:
                    before.unfinished -= 1
                done = before
        self._cache.free(pages)

    def drop(self, request: Request) -> None:
        """Give back the pages and slots of all branches of `request`. Forms that are not finished begin
        anew."""
        decisions = _of(request)
        for branch in list(decisions.live):
            self._cache.free(self._let_go(decisions, branch))
        decisions.restart()

    def _take(self, request: Request, branch: Branch, kept_pages: int, kept_slots: int) -> bool:
        """Take pages and a slot for `branch`. Returns False, and takes nothing, if fewer than `kept_pages`
        and `kept_slots` would be left."""
        cache, decisions, before = self._cache, _of(request), branch.before
        table = request.pages.ids if before is None else before.table
        parent = decisions if before is None else before
        inherits = parent.untaken == 1
        shared = branch.start // cache.page_size
        if inherits:  # the last page is shared even if it is partly full
            shared = -(-branch.start // cache.page_size)
        count = -(-branch.stop // cache.page_size) - shared
        takes_slot = self._states.present and not (inherits and before is not None)
        if cache.available() < count + kept_pages or not self._states.available(takes_slot + kept_slots):
            return False
        new = cache.allocate(count, request.taker)
        assert new is not None
        branch.own, branch.table = new, np.concatenate([table[:shared], np.array(new, np.int32)])
        if takes_slot:
            branch.slot = cache.allocate_state()
            source = request.pages.state if before is None else before.slot
            assert branch.slot is not None
            assert source is not None
            if branch.start:
                self._states.copies.add(source, branch.slot)
        elif before is not None:
            branch.slot, before.slot = before.slot, None
        parent.untaken -= 1
        decisions.live.add(branch)
        return True

    def _copy(self, request: Request, branch: Branch) -> tuple[int, int] | None:
        """The copy of the partly full page before `branch`, which has just been given its pages."""
        slot, rows = divmod(branch.start, self._cache.page_size)
        table = request.pages.ids if branch.before is None else branch.before.table
        if not rows or table[slot] == branch.table[slot]:
            return None
        source, page = int(table[slot]), int(branch.table[slot])
        waiting = request.pages.copy  # made in the same pass, before which every source is read
        return (waiting[0] if waiting is not None and waiting[1] == source else source, page)

    def _let_go(self, decisions: Decisions, branch: Branch) -> list[int]:
        """Give back the slot of `branch`. Returns its pages, which the caller frees."""
        decisions.live.remove(branch)
        if branch.slot is not None:
            self._cache.free_state(branch.slot)
            branch.slot = None
        pages, branch.own = branch.own, []
        return pages


def _of(request: Request) -> Decisions:
    assert request.decisions is not None
    return request.decisions
