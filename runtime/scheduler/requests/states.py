"""States of linear attention layers: a slot for each running request, and copies where others will begin.

A state belongs to one position. Unlike KV pages, it cannot be cut to fewer tokens. So a request can begin
only where the tree holds a state. A state is worth its slot only at a position where a later request parts
from the request that computes it. Such positions are known before they are computed:

    a waiting request shares its beginning with one that prefills      where the two part
    the tree has more tokens of a prompt than it has a state for       where that prompt parted from others
    requests inside a fork of a program                                what their prompts have in common
    the tokenizer says where a later prompt will go on differently     `Submit.forks`
    a prompt ends, a request ends or is retracted                      at that position
    none of these for `GRID` tokens                                    at the end of a chunk

A step with draft tokens changes the state too. So the state before the step is saved in a second slot. If a
draft token is rejected, the request goes on from there, and the next step computes the accepted tokens again.

The first four are marks, at which the scheduler ends a chunk of the prefill. The others cost no step.
"""

from __future__ import annotations

import bisect

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match, PrefixLock
from ramify.runtime.scheduler.requests.limits import TUNED
from ramify.runtime.scheduler.requests.request import Request

GRID = 1024
"""The number of tokens without a state after which the state at the end of a chunk is kept."""

FEW_USES = 0.1
"""The number of requests that are expected to begin from a state at the end of a prompt, or from one that is
kept because of `GRID`. From a state at a mark, 1 request is expected to begin."""


class Copies:
    """Copies between slots, made at the start of the next pass, all at once: every source is read before any
    destination is written.

    A slot may be freed and taken again before a pending copy to it is made. So if the source of a new copy is
    the destination of a pending copy, the new copy reads the source of the pending copy. Of several copies to
    one slot, only the last is made.
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
        """The copies to be made, as (source, destination); they are no longer pending."""
        taken = [(source, destination) for destination, source in self._sources.items()]
        self._sources.clear()
        return taken


class RequestStates:
    """Moves state slots between requests and the prefix cache. All methods but `cut` need a cache with
    states.

    least : the least number of tokens that a state must save
    """

    def __init__(self, cache: PrefixCache, least: int = TUNED.least_state) -> None:
        self._cache = cache
        self._least = least
        self.copies = Copies()
        self.present = cache.state_counts().total > 0
        """True if the model has states."""

    def available(self, slots: int = 1) -> bool:
        """True if requests can be given `slots` more slots, or if the model has no states."""
        if not self.present:
            return True
        counts = self._cache.state_counts()
        return counts.in_use + slots <= counts.total

    def take_slot(self, request: Request, lock: PrefixLock, match: Match) -> None:
        """Give a slot to `request`, which is admitted after the tokens of `lock`. A slot must be
        available."""
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
        # If the whole prompt is in the tree, its last token is computed again, unless no token follows it.
        last = request.length if request.max_tokens == 0 else request.length - 1
        for position in (match.known, *request.forks, *known):
            self._mark(request, min(position, last))

    def shares(self, request: Request, other: Request, shared: int, matched: int) -> bool:
        """True if `other`, which prefills, can keep a state for `request`. Adds a mark to `other` if no mark
        is near enough.

        shared : the number of tokens that both have in common
        matched : the number of tokens that `request` finds in the tree without that state
        """
        if shared - matched < self._least:
            return False
        near = [mark for mark in other.marks if max(matched, shared - self._least) < mark <= shared]
        return any(mark > other.computed_len for mark in near) or self._mark(other, shared)

    def cut(self, request: Request, stop: int) -> int:
        """The position at which a pass of `request` ends: `stop`, or the next mark if that comes before
        `stop`."""
        place = bisect.bisect_right(request.marks, request.computed_len)
        return stop if place == len(request.marks) else min(stop, request.marks[place])

    def keep_copy(self, request: Request) -> None:
        """Keep a copy of the state of `request` in the tree after a pass of its prefill, if the copy is worth
        a slot. The computed pages must be in the tree already."""
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

    def save(self, request: Request) -> bool:
        """Save the state of `request` before its draft tokens are computed. Returns False if no slot is
        available; True for a model without states."""
        pages = request.pages
        if pages.state is None or pages.saved is not None:
            return True
        pages.saved = self._cache.allocate_state() if self.available() else None
        if pages.saved is None:
            return False
        self.copies.add(pages.state, pages.saved)
        pages.saved_len = request.computed_len
        return True

    def settle(self, request: Request) -> None:
        """Go on from the saved state of `request` if a draft token was rejected: the tokens after that state
        are computed again. Called when draft tokens are verified."""
        pages = request.pages
        request.speculation.recomputed_len = 0
        if pages.saved is None or pages.state is None:
            return
        request.drop_draft()  # some are left if a known token came between
        if request.computed_len < pages.state_len:
            request.speculation.recomputed_len = request.computed_len - pages.saved_len
            request.computed_len = pages.state_len = pages.saved_len
            pages.state, pages.saved = pages.saved, pages.state
        self._cache.free_state(pages.saved)
        pages.saved = None

    def give_back(self, request: Request, *, keep: bool) -> None:
        """Give back the slot of `request`. With `keep`, the tree keeps the slot and its state. Called before
        the lock is released."""
        pages = request.pages
        if pages.state is None or pages.lock is None:
            return
        # The lengths differ after a failed pass. Then the content of the slot is undefined.
        if keep and pages.state_len == pages.lock.length:
            self._cache.keep_state(pages.lock, pages.state)
        else:
            self._cache.free_state(pages.state)
        if pages.saved is not None:
            self._cache.free_state(pages.saved)
        pages.state = pages.saved = None

    def _mark(self, request: Request, position: int) -> bool:
        """Add a mark at `position` to `request`, if a state there saves enough tokens. Returns True if the
        mark was added.

        Marks stay at least `least` tokens apart. A mark closer after `position` is replaced by the new mark.
        With a mark closer before `position`, none is added.
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
