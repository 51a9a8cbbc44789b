"""Placement: a request goes to the replica on which it would be through first.

Work is counted in tokens to be computed; an output token counts as `OUTPUT_WEIGHT`. The cost of a replica is
the work that it has, plus the tokens of the prompt that it does not hold, at its measured pace. Three rules
follow from that alone:

- A branch goes where its program is, as long as the queue there is shorter than what it would compute again
  elsewhere, or until its pages have come there, where they can move.
- The siblings of a fork are charged once for what they share: the pages that one of them will compute are
  promised to the others.
- New work goes where least is left. `place` reserves in the same call, so that two requests at the same
  moment see each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ramify.runtime.fleet.index import PrefixIndex, TreeEvents
from ramify.runtime.fleet.moves import LEAST_TOKENS

OUTPUT_WEIGHT = 0.3
"""Work of an output token, in prompt tokens. It costs 2.5 times a prompt token, but a new request does not
wait for it: rows decode beside its prompt."""
MISS_WEIGHT = 1.5
"""Weight of a prompt token to be computed: the request waits for it, and so do the requests behind it. With
1 the siblings of a fork go to idle replicas and compute there what one of them computes already; with 2
they wait longer than that takes (`python -m benchmarks.fleet`)."""
STAY = 64.0
"""Work that going elsewhere must save a program: its next step would be drawn to two places."""
KEPT = 0.9
"""Weight of an answer in a pace when the next one has come."""
DOUBTED_S = 10.0
"""Seconds without an answer after which a replica's pace counts half, and the fleet's the other half: one
that was slow once would get no request by which to show that it is not."""
STEP = 512.0
"""Work left in the step that already runs when a request arrives, in tokens."""
MOST_HOMES = 16_384
"""Programs whose replica is remembered; a client that dies tells of no end."""
KEPT_PROMISES = 256
"""Prompts of ended requests that stay promised, for their events may come later than their last text."""


class NoReplica(Exception):
    """No replica takes new requests."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A request: the digests of its prompt's whole pages in its cache scope, the prompt's tokens, and the
    output that is expected, in tokens."""

    rid: str
    digests: Sequence[int]
    tokens: int
    output: float
    program: str = ""


@dataclasses.dataclass(slots=True)
class _Reservation:
    work: Work
    replica: str
    placed_at: float
    queued: float
    """The replica's work when it was placed, its own included."""
    prompt: float
    """Prompt tokens that are still to be computed."""
    output: float
    promised: Sequence[int]
    """Digests of the pages that it computes."""


@dataclasses.dataclass(slots=True)
class _Pace:
    """Seconds for one token of work: of the answers so far, the newest weigh most."""

    seconds: float = 0.0
    tokens: float = 0.0
    value: float = 0.0
    """0 before the first answer."""
    learnt_at: float = 0.0

    def learn(self, seconds: float, tokens: float, now: float) -> None:
        self.seconds = KEPT * self.seconds + seconds
        self.tokens = KEPT * self.tokens + tokens
        self.value = self.seconds / self.tokens
        self.learnt_at = now

    def beside(self, fleet: float, now: float) -> float:
        """Pace to be expected at `now`; `fleet`: the pace of all replicas, or 0."""
        if not (self.value and fleet):
            return self.value or fleet
        trust = 0.5 ** (max(now - self.learnt_at, 0.0) / DOUBTED_S)
        return trust * self.value + (1 - trust) * fleet


@dataclasses.dataclass(slots=True)
class _Replica:
    pace: _Pace
    prefill: bool = False
    answered: bool = False
    """Whether its first answer has come. That one does not count in the pace, as it contains work done once,
    such as compiling; only a fleet without any pace uses it."""
    draining: bool = False
    work: float = 0.0
    ended: dict[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    """Ended request → digests of its pages that are still promised."""
    reserved: dict[str, _Reservation] = dataclasses.field(default_factory=dict)
    unanswered: dict[str, _Reservation] = dataclasses.field(default_factory=dict)
    """Requests whose prompt is still to be computed, the oldest first."""


class Placement:
    """Places requests on replicas. Times are seconds of any one clock.

    page_size : tokens of a page of every replica; 0 until the first replica has told it
    """

    def __init__(self, page_size: int = 0) -> None:
        self.page_size = page_size
        self._index = PrefixIndex()
        self._replicas: dict[str, _Replica] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._pace = _Pace()
        """Pace of the whole fleet."""
        self._homes: dict[str, str] = {}
        """The replica of each program's last request; the least recently placed program first."""

    # --- replicas ---------------------------------------------------------------------------------

    def join(self, replica: str, *, prefill: bool = False) -> None:
        """Add a replica with an empty tree. Until its second answer its pace is taken to be the fleet's.

        With `prefill` it computes prompts for others, and gets requests only while there is no other.
        """
        self._replicas[replica] = _Replica(_Pace(), prefill)
        self._index.join(replica)

    def drain(self, replica: str) -> None:
        """Place nothing more there."""
        self._replicas[replica].draining = True

    def undrain(self, replica: str) -> None:
        """Place requests there again."""
        self._replicas[replica].draining = False

    def leave(self, replica: str) -> list[Work]:
        """Remove a replica that is gone. Returns the work that it had, to be placed anew."""
        gone = self._replicas.pop(replica)
        self._index.leave(replica)
        for rid in gone.reserved:
            del self._reservations[rid]
        self._homes = {program: home for program, home in self._homes.items() if home != replica}
        return [reservation.work for reservation in gone.reserved.values()]

    def apply(self, replica: str, events: TreeEvents) -> bool:
        """See `PrefixIndex.apply`."""
        return self._index.apply(replica, events)

    def complete(self, replica: str) -> bool:
        """See `PrefixIndex.complete`."""
        return self._index.complete(replica)

    # --- requests ---------------------------------------------------------------------------------

    def place(
        self,
        work: Work,
        now: float,
        only: str | None = None,
        *,
        force: bool = False,
        move_s: Callable[[int], float] | None = None,
    ) -> str:
        """The replica for `work`, whose cost is reserved there; with `only` that one, with `force` also where
        it drains. Raises `NoReplica`.

        `move_s` gives the seconds in which a number of cached pages come from another replica; None where
        they do not.

        Costs O(replicas + log pages + pages that it computes).
        """
        home = self._homes.get(work.program) if work.program else None
        best: tuple[float, str, int] | None = None
        held = self._index.pages(work.digests, promised=True)
        nothing = MISS_WEIGHT * self._missing(work, 0)
        there = 0 if move_s is None else max(self._index.pages(work.digests).values(), default=0)
        takers = self._taking(only, prefill=False, draining=force)
        for name, replica in takers or self._taking(only, prefill=True, draining=force):
            pages = held.get(name, 0)
            pace = self._pace_of(replica, now)
            missing_s = (MISS_WEIGHT * self._missing(work, pages) if pages else nothing) * pace
            if move_s is not None and (there - pages) * self.page_size >= LEAST_TOKENS:
                rest_s = MISS_WEIGHT * self._missing(work, there) * pace
                missing_s = min(missing_s, move_s(there - pages) + rest_s)
            left = replica.work if home in (None, name) else replica.work + STAY
            cost = left * pace + missing_s
            if best is None or cost < best[0]:
                best = (cost, name, pages)
        if best is None:
            raise NoReplica
        _, name, pages = best
        self._reserve(work, name, pages, now)
        if work.program:
            self.settle(work.program, name)
        return name

    def place_prefill(self, work: Work, now: float) -> str | None:
        """The replica that computes prompts and is the first to have done with this one; None if there is
        none. Its cost is reserved there."""
        best: tuple[float, str, int] | None = None
        held = self._index.pages(work.digests, promised=True)
        for name, replica in self._taking(None, prefill=True):
            pages = held.get(name, 0)
            cost = (replica.work + self._missing(work, pages)) * self._pace_of(replica, now)
            if best is None or cost < best[0]:
                best = (cost, name, pages)
        if best is None:
            return None
        _, name, pages = best
        self._reserve(work, name, pages, now)
        return name

    def progress(self, rid: str, tokens: int, now: float) -> None:
        """Count `tokens` more of a request's output; with the first ones its prompt is computed."""
        found = self._reservations.get(rid)
        if found is None:
            return
        replica = self._replicas[found.replica]
        if found.prompt:
            taken = (now - found.placed_at, found.queued + STEP, now)
            if replica.answered:
                replica.pace.learn(*taken)
            if replica.answered or not self._pace.value:
                self._pace.learn(*taken)
            replica.answered = True
            replica.work -= found.prompt
            found.prompt = 0.0
            del replica.unanswered[rid]
        done = min(found.output, tokens * OUTPUT_WEIGHT)
        found.output -= done
        replica.work -= done

    def ended(self, rid: str) -> None:
        """Forget a request that has ended in any way. Unknown ids are ignored."""
        found = self._reservations.pop(rid, None)
        if found is None:
            return
        replica = self._replicas[found.replica]
        del replica.reserved[rid]
        replica.unanswered.pop(rid, None)
        replica.work -= found.prompt + found.output
        replica.ended[rid] = found.promised
        while len(replica.ended) > KEPT_PROMISES:
            self._index.break_promise(found.replica, replica.ended.pop(next(iter(replica.ended))))

    def program_ended(self, program: str) -> None:
        self._homes.pop(program, None)

    def work_of(self, replica: str) -> float:
        """Tokens of work that the replica has."""
        return self._replicas[replica].work

    # --- for moves of pages -----------------------------------------------------------------------

    def held(self, replica: str, digests: Sequence[int]) -> int:
        """Number of the prompt's whole pages that the replica holds now."""
        return self._index.pages(digests).get(replica, 0)

    def others(self, replica: str, digests: Sequence[int]) -> list[tuple[str, int]]:
        """The other replicas that hold some of the prompt's pages, each with the number of them."""
        return [(name, pages) for name, pages in self._index.pages(digests).items() if name != replica]

    def has(self, replica: str) -> bool:
        return replica in self._replicas

    def takers(self) -> list[str]:
        """The replicas that new requests may go to, the one with the least work first."""
        takers = [name for name, _ in self._taking(None, prefill=False)]
        return sorted(takers, key=self.work_of)

    def settle(self, program: str, replica: str) -> None:
        """Draw the program's next request to `replica`."""
        self._homes.pop(program, None)
        self._homes[program] = replica
        while len(self._homes) > MOST_HOMES:
            del self._homes[next(iter(self._homes))]

    def missing(self, rid: str) -> int:
        """Prompt tokens that the replica of the request was expected to compute for it."""
        found = self._reservations.get(rid)
        return 0 if found is None else int(found.prompt)

    def answered(self, replica: str) -> bool:
        """Whether the replica has computed a prompt."""
        return self._replicas[replica].answered

    def pace(self, replica: str, now: float) -> float:
        """Seconds for a token of work, as measured."""
        return self._pace_of(self._replicas[replica], now)

    def fetched(self, rid: str, tokens: int, now: float) -> None:
        """Count `tokens` fewer of a prompt to be computed: the request has waited for pages until `now`."""
        found = self._reservations.get(rid)
        if found is not None and found.prompt:
            saved = min(float(tokens), found.prompt - 1)
            found.prompt -= saved
            found.queued -= saved
            self._replicas[found.replica].work -= saved
            found.placed_at = now

    # --- internals --------------------------------------------------------------------------------

    def _taking(
        self, only: str | None, *, prefill: bool, draining: bool = False
    ) -> list[tuple[str, _Replica]]:
        """The replicas of one kind that take new work; also those that drain with `draining`."""
        return [
            (name, replica)
            for name, replica in self._replicas.items()
            if replica.prefill == prefill and (draining or not replica.draining) and only in (None, name)
        ]

    def _missing(self, work: Work, pages: int) -> float:
        """The prompt tokens to be computed where `pages` of its pages are held; the last one always is."""
        return max(work.tokens - pages * self.page_size, 1)

    def _reserve(self, work: Work, name: str, pages: int, now: float) -> None:
        replica = self._replicas[name]
        prompt, output = self._missing(work, pages), work.output * OUTPUT_WEIGHT
        replica.work += prompt + output
        promised = work.digests[pages:]
        self._index.promise(name, promised)
        reservation = _Reservation(work, name, now, replica.work - output, prompt, output, promised)
        replica.reserved[work.rid] = self._reservations[work.rid] = reservation
        replica.unanswered[work.rid] = reservation

    def _pace_of(self, replica: _Replica, now: float) -> float:
        """The replica's pace, or what its oldest unanswered request shows if that is slower."""
        pace = replica.pace.beside(self._pace.value, now) or 1.0
        for oldest in replica.unanswered.values():
            return max(pace, (now - oldest.placed_at) / (oldest.queued + STEP))
        return pace
