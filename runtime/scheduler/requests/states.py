"""States of linear attention layers: a slot for each running request, and copies where others will begin.

A state belongs to one position, and cannot be cut shorter as KV pages can. So a request can begin only where
the tree holds a state, and a state is worth its slot only where a later request parts from this one. Such
positions are known before they are computed:

    a waiting request shares its beginning with one that prefills      where the two part
    the tree has more tokens of a prompt than it has a state for       where that prompt parted from others
    requests inside a fork of a program                                what their prompts have in common
    the tokenizer says where a later prompt will go on differently     `Submit.forks`
    a prompt ends, a request ends or is retracted                      there
    none of these for `GRID` tokens                                    at the end of a chunk

The first four are marks, at which the scheduler ends a chunk of the prefill. The others cost no step.
"""

from __future__ import annotations

import bisect

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match, PrefixLock
from ramify.runtime.scheduler.requests.limits import TUNED
from ramify.runtime.scheduler.requests.request import Request

GRID = 1024
"""Tokens without a state after which the end of a chunk is kept."""

FEW_USES = 0.1
"""Requests that are expected to begin from a state of the grid, or at the end of a prompt; elsewhere 1."""


class Copies:
    """Copies of slots that the next pass makes first, all at once: each source is read before any is written.

    Requests and nodes may give slots away before their copies are made. So a copy of a copy that was not made
    yet reads what that one reads, and a slot that is taken anew reads what was asked for last.
    """

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}
        """Source slots by destination slot."""

    def add(self, source: int, destination: int) -> None:
        source = self._sources.get(source, source)
        if source == destination:
            self._sources.pop(destination, None)
        else:
            self._sources[destination] = source

    def take(self) -> list[tuple[int, int]]:
        """All copies that were added since the last call: (source, destination)."""
        taken = [(source, destination) for destination, source in self._sources.items()]
        self._sources.clear()
        return taken


class RequestStates:
    """Moves slots between requests and the prefix cache. All methods but `cut` need a cache with states.

    least : tokens that a state must save at least
    """

    def __init__(self, cache: PrefixCache, least: int = TUNED.least_state) -> None:
        self._cache = cache
        self._least = least
        self.copies = Copies()
        self.present = cache.state_counts().total > 0
        """True where the model has states."""

    def available(self) -> bool:
        """True where a request can be given a slot."""
        counts = self._cache.state_counts()
        return counts.in_use < counts.total

    def take_slot(self, request: Request, lock: PrefixLock, match: Match) -> None:
        """Give a slot to `request`, which is admitted behind the tokens of `lock`; there must be one."""
        source = self._cache.use_state(lock)
        slot = self._cache.allocate_state()
        assert slot is not None
        if source is not None:
            self.copies.add(source, slot)
        pages = request.pages
        pages.state, pages.state_len, pages.kept_len = slot, lock.length, lock.length
        request.computes_ahead = False
        request.marks = []
        forks = request.program.forks
        known = [len(forks[fork]) for fork in (request.hint.forks if request.hint else ()) if fork in forks]
        for position in (match.known, *request.forks, *known):
            # An equal prompt has its last token computed again.
            self._mark(request, min(position, request.length - 1))

    def shares(self, request: Request, other: Request, shared: int, matched: int) -> bool:
        """True where `other`, which prefills, can leave a state for `request`.

        shared : tokens that both begin with
        matched : tokens that `request` finds in the tree without that state
        """
        if shared - matched < self._least:
            return False
        near = [mark for mark in other.marks if max(matched, shared - self._least) < mark <= shared]
        return any(mark > other.computed_len for mark in near) or self._mark(other, shared)

    def cut(self, request: Request, stop: int) -> int:
        """The end of a pass from `computed_len` to `stop`, cut at the next mark."""
        place = bisect.bisect_right(request.marks, request.computed_len)
        return stop if place == len(request.marks) else min(stop, request.marks[place])

    def keep_copy(self, request: Request) -> None:
        """Keep a copy of the state at the end of a pass of the prefill, if it is worth one. The pages are in
        the tree."""
        pages, end = request.pages, request.computed_len
        if pages.state is None or pages.lock is None or end - pages.kept_len < self._least:
            return
        if end in request.marks:
            uses = 1.0
        elif end == request.length or end - pages.kept_len >= GRID:
            uses = FEW_USES
        else:
            return
        slot = self._cache.copy_state(pages.lock, uses)
        if slot is not None:
            self.copies.add(pages.state, slot)
        pages.kept_len = end

    def give_back(self, request: Request, *, keep: bool) -> None:
        """Give back the slot of `request`; with `keep` the tree gets it. Called while the lock is held."""
        pages = request.pages
        if pages.state is None or pages.lock is None:
            return
        # They differ where a pass has failed: nobody knows then what the slot holds.
        if keep and pages.state_len == pages.lock.length:
            self._cache.keep_state(pages.lock, pages.state)
        else:
            self._cache.free_state(pages.state)
        pages.state = None

    def _mark(self, request: Request, position: int) -> bool:
        """End a pass of `request` at `position`, if it is worth that.

        Marks are `least` tokens apart: a nearer one behind `position` gives way.
        """
        pages, marks = request.pages, request.marks
        if (
            position - pages.kept_len < self._least
            or not request.computed_len < position <= request.prompt_len
        ):
            return False
        place = bisect.bisect_left(marks, position)
        if place and position - marks[place - 1] < self._least:
            return False
        if place < len(marks) and marks[place] - position < self._least:
            marks[place] = position
        else:
            marks.insert(place, position)
        return True
