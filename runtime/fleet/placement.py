"""Placement: a request goes to the replica with the lowest estimated time until its prompt is computed.

Work is counted in tokens to be computed; an output token counts as `OUTPUT_WEIGHT`. The cost of a replica is
its queued work plus the prompt's tokens that it does not hold, times the seconds per token measured on it.
Three rules follow from that alone:

- A branch stays on its program's replica, as long as the queue there costs less than computing the prefix
  again, or moving its pages, elsewhere.
- The shared prefix of a fork is charged once. Its pages are promised by the sibling that computes them, so
  that the others on the same replica count them as held.
- New work goes to the replica with the least work left. `place` reserves the cost in the same call, so that
  two simultaneous requests see each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ramify.engine_messages import TreeChange
from ramify.runtime.fleet.index import PrefixIndex
from ramify.runtime.fleet.moves import LEAST_TOKENS

OUTPUT_WEIGHT = 0.3
"""Work of an output token, in prompt tokens. An output token costs 2.5 times a prompt token. But a new
request does not wait for output tokens, since decoding rows share the steps with the new prompt."""
MISS_WEIGHT = 1.5
"""Weight of a prompt token to be computed: the request waits for the token, and so do the requests behind it
in the queue. With a weight of 1 the siblings of a fork go to idle replicas, and compute again what one of
them is already computing. With 2 they wait longer than computing would take (`python -m
benchmarks.fleet`)."""
STAY = 64.0
"""Minimum work, in tokens, that a program must save by leaving its replica. Leaving has a price: the next
step of the program would find its pages divided between two replicas."""
KEPT = 0.9
"""Decay of a measured pace: the factor by which the weight of earlier answers shrinks with each new one."""
DOUBTED_S = 10.0
"""Half-life of a replica's measured pace, in seconds without an answer: after that time the expected pace is
the mean of the replica's pace and the fleet's. Otherwise a replica that was slow once would get no request by
which to show that it is fast again."""
STEP = 512.0
"""Work, in tokens, assumed to be left in the step that is running when a request arrives."""
MOST_HOMES = 16_384
"""Maximum number of programs whose replica is remembered. The bound is needed since a client that dies does
not report the end of its programs."""
KEPT_PROMISES = 256
"""Maximum number of ended requests of a replica whose prompts stay promised. A promise outlives its request,
as the events of the pages may arrive after the request's last text."""


class NoReplica(Exception):
    """Raised when no replica takes new requests."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The work of a request: the digests of its prompt's whole pages, the number of prompt tokens, and the
    expected number of output tokens."""

    rid: str
    digests: Sequence[int]
    tokens: int
    output: float
    program: str = ""


@dataclasses.dataclass(slots=True)
class _Reservation:
    replica: str
    placed_at: float
    queued: float
    """The replica's work when the request was placed, including the request's prompt."""
    prompt: float
    """Prompt tokens that are still to be computed."""
    output: float
    promised: Sequence[int]
    """Digests of the pages that the request will compute."""


@dataclasses.dataclass(slots=True)
class _Pace:
    """Measured seconds per token of work. Recent answers weigh most."""

    seconds: float = 0.0
    tokens: float = 0.0
    value: float = 0.0
    """Seconds per token of work; 0 before the first answer."""
    learnt_at: float = 0.0

    def learn(self, seconds: float, tokens: float, now: float) -> None:
        self.seconds = KEPT * self.seconds + seconds
        self.tokens = KEPT * self.tokens + tokens
        self.value = self.seconds / self.tokens
        self.learnt_at = now

    def beside(self, fleet: float, now: float) -> float:
        """The expected pace at `now`. `fleet` is the pace of all replicas together, 0 if not yet measured."""
        if not (self.value and fleet):
            return self.value or fleet
        trust = 0.5 ** (max(now - self.learnt_at, 0.0) / DOUBTED_S)
        return trust * self.value + (1 - trust) * fleet


@dataclasses.dataclass(slots=True)
class _Replica:
    pace: _Pace
    prefill: bool = False
    answered: bool = False
    """Whether the first answer of the replica has come. The first answer does not count in the replica's
    pace, as it includes one-time work such as compiling. It counts in the fleet's pace only if that pace has
    not been measured yet."""
    draining: bool = False
    work: float = 0.0
    ended: dict[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    """Id of an ended request → digests of its pages, which are still promised."""
    unanswered: dict[str, _Reservation] = dataclasses.field(default_factory=dict)
    """Requests whose prompt is still to be computed, in order of placement."""


class Placement:
    """Places requests on replicas. All times are in seconds, by one clock of the caller's choice.

    page_size : tokens per page, the same on every replica; 0 until the first replica has started
    """

    def __init__(self, page_size: int = 0) -> None:
        self.page_size = page_size
        self._index = PrefixIndex()
        self._replicas: dict[str, _Replica] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._pace = _Pace()
        """Pace of the whole fleet."""
        self._homes: dict[str, str] = {}
        """Program → replica of its last request, in order of placement, the oldest first."""

    def join(self, replica: str, *, prefill: bool = False) -> None:
        """Add a replica with an empty tree. Until its second answer the fleet's pace is used for it.

        With `prefill` the replica computes prompts for others. It gets requests of its own only while there
        is no replica without `prefill`.
        """
        self._replicas[replica] = _Replica(_Pace(), prefill)
        self._index.join(replica)

    def drain(self, replica: str) -> None:
        """Place nothing more on `replica`."""
        self._replicas[replica].draining = True

    def undrain(self, replica: str) -> None:
        """Place requests on `replica` again."""
        self._replicas[replica].draining = False

    def leave(self, replica: str) -> None:
        """Remove a replica that is gone, and forget the work that was placed on it."""
        del self._replicas[replica]
        self._index.leave(replica)
        self._reservations = {rid: one for rid, one in self._reservations.items() if one.replica != replica}
        self._homes = {program: home for program, home in self._homes.items() if home != replica}

    def apply(self, replica: str, change: TreeChange) -> bool:
        """See `PrefixIndex.apply`."""
        return self._index.apply(replica, change)

    def complete(self, replica: str) -> bool:
        """See `PrefixIndex.complete`."""
        return self._index.complete(replica)

    def place(
        self,
        work: Work,
        now: float,
        only: str | None = None,
        *,
        force: bool = False,
        move_s: Callable[[int], float] | None = None,
    ) -> str:
        """Choose the replica for `work`, and reserve its cost there. With `only`, that replica alone is
        considered; with `force`, draining replicas are considered too. Raises `NoReplica`.

        `move_s` maps a number of cached pages to the expected seconds for moving them between replicas; None
        if pages are not moved.

        Costs O(replicas + log pages + pages to be computed).
        """
        home = self._homes.get(work.program) if work.program else None
        held = self._index.pages(work.digests, promised=True)
        nothing = MISS_WEIGHT * self._missing(work, 0)
        there = 0 if move_s is None else max(self._index.pages(work.digests).values(), default=0)
        takers = self._taking(only, prefill=False, draining=force)
        takers = takers or self._taking(only, prefill=True, draining=force)
        if not takers:
            raise NoReplica

        def cost(taker: tuple[str, _Replica]) -> float:
            name, replica = taker
            pages = held.get(name, 0)
            pace = self._pace_of(replica, now)
            missing_s = (MISS_WEIGHT * self._missing(work, pages) if pages else nothing) * pace
            if move_s is not None and (there - pages) * self.page_size >= LEAST_TOKENS:
                rest_s = MISS_WEIGHT * self._missing(work, there) * pace
                missing_s = min(missing_s, move_s(there - pages) + rest_s)
            left = replica.work if home in (None, name) else replica.work + STAY
            return left * pace + missing_s

        name, _ = min(takers, key=cost)
        self._reserve(work, name, held.get(name, 0), now)
        if work.program:
            self.set_home(work.program, name)
        return name

    def place_prefill(self, work: Work, now: float) -> str | None:
        """Choose the prefill replica that would finish the prompt of `work` first, and reserve its cost
        there. Returns None if there is no prefill replica."""
        held = self._index.pages(work.digests, promised=True)

        def cost(taker: tuple[str, _Replica]) -> float:
            name, replica = taker
            missing = self._missing(work, held.get(name, 0))
            return (replica.work + missing) * self._pace_of(replica, now)

        takers = self._taking(None, prefill=True)
        if not takers:
            return None
        name, _ = min(takers, key=cost)
        self._reserve(work, name, held.get(name, 0), now)
        return name

    def progress(self, rid: str, tokens: int, now: float) -> None:
        """Count `tokens` more output tokens of a request. The first call for a request also marks its prompt
        as computed."""
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
        replica.unanswered.pop(rid, None)
        replica.work -= found.prompt + found.output
        replica.ended[rid] = found.promised
        while len(replica.ended) > KEPT_PROMISES:
            self._index.break_promise(found.replica, replica.ended.pop(next(iter(replica.ended))))

    def program_ended(self, program: str) -> None:
        self._homes.pop(program, None)

    def work_of(self, replica: str) -> float:
        """Work left on the replica, in tokens."""
        return self._replicas[replica].work

    def held(self, replica: str, digests: Sequence[int]) -> int:
        """Number of the prompt's whole pages that the replica holds now."""
        return self._index.pages(digests).get(replica, 0)

    def others(self, replica: str, digests: Sequence[int]) -> list[tuple[str, int]]:
        """(name, number of pages) of each replica other than `replica` that holds pages of the prompt."""
        return [(name, pages) for name, pages in self._index.pages(digests).items() if name != replica]

    def has(self, replica: str) -> bool:
        return replica in self._replicas

    def takers(self) -> list[str]:
        """The replicas that take new requests, the one with the least work first."""
        takers = [name for name, _ in self._taking(None, prefill=False)]
        return sorted(takers, key=self.work_of)

    def set_home(self, program: str, replica: str) -> None:
        """Make `replica` the home of `program`: the replica that the program's next requests prefer."""
        self._homes.pop(program, None)
        self._homes[program] = replica
        while len(self._homes) > MOST_HOMES:
            del self._homes[next(iter(self._homes))]

    def missing(self, rid: str) -> int:
        """Prompt tokens that are still expected to be computed for the request; 0 for an unknown id."""
        found = self._reservations.get(rid)
        return 0 if found is None else int(found.prompt)

    def answered(self, replica: str) -> bool:
        """Whether the replica has computed at least one prompt."""
        return self._replicas[replica].answered

    def pace(self, replica: str, now: float) -> float:
        """Expected seconds per token of work on the replica."""
        return self._pace_of(self._replicas[replica], now)

    def fetched(self, rid: str, tokens: int, now: float) -> None:
        """Reduce the prompt tokens to be computed by `tokens`: their pages have arrived, and the request
        waited for them until `now`."""
        found = self._reservations.get(rid)
        if found is not None and found.prompt:
            saved = min(float(tokens), found.prompt - 1)
            found.prompt -= saved
            found.queued -= saved
            self._replicas[found.replica].work -= saved
            found.placed_at = now

    def _taking(
        self, only: str | None, *, prefill: bool, draining: bool = False
    ) -> list[tuple[str, _Replica]]:
        """The replicas that take new work. `prefill` selects the prefill replicas or the others, and `only` a
        single replica. With `draining`, draining replicas are included."""
        return [
            (name, replica)
            for name, replica in self._replicas.items()
            if replica.prefill == prefill and (draining or not replica.draining) and only in (None, name)
        ]

    def _missing(self, work: Work, pages: int) -> float:
        """The prompt tokens to be computed if `pages` pages of the prompt are held; at least 1."""
        return max(work.tokens - pages * self.page_size, 1)

    def _reserve(self, work: Work, name: str, pages: int, now: float) -> None:
        replica = self._replicas[name]
        prompt, output = self._missing(work, pages), work.output * OUTPUT_WEIGHT
        replica.work += prompt + output
        promised = work.digests[pages:]
        self._index.promise(name, promised)
        reservation = _Reservation(name, now, replica.work - output, prompt, output, promised)
        self._reservations[work.rid] = replica.unanswered[work.rid] = reservation

    def _pace_of(self, replica: _Replica, now: float) -> float:
        """The slower of the replica's expected pace and the pace that its oldest unanswered request
        implies."""
        pace = replica.pace.beside(self._pace.value, now) or 1.0
        for oldest in replica.unanswered.values():
            return max(pace, (now - oldest.placed_at) / (oldest.queued + STEP))
        return pace
