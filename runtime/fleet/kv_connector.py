"""Moves cached pages between replicas, and lets requests wait for them.

    a request for replica 1    ExportPrefix → replica 0 ─ KV snapshot ─ ImportPrefix → replica 1
                               then the request

The KV snapshot is a file in shared memory on one machine, and an object of Ray's store on a cluster
(`SnapshotStore`).

A request waits for its pages without delaying other requests. The request is sent without the pages, and
computes them, if the move takes longer than computing would, or if one of the two replicas dies or refuses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ramify.engine_messages import (
    INTERNAL,
    Abort,
    ExportPrefix,
    Failed,
    GetPrefixes,
    HeldPrefix,
    ImportPrefix,
    Reply,
    Texts,
    ToTokenizer,
)
from ramify.errors import InvalidRequest
from ramify.messages import Generate
from ramify.radix.digest import Digests
from ramify.runtime.faults import errors_logged
from ramify.runtime.fleet.moves import (
    LEAST_TOKENS,
    MOST_LIMIT_S,
    Move,
    MovePace,
    choose,
    limited,
)
from ramify.runtime.fleet.placement import Placement, Work
from ramify.runtime.fleet.replica import Later, Timer
from ramify.runtime.kv_transfer.files import SnapshotStore
from ramify.sampling_params import SamplingParams

log = logging.getLogger("ramify")


PATIENCE = 4.0
"""Time limit of a prompt on a prefill replica, as a multiple of the expected time."""
_NO_TOKENS = SamplingParams(max_tokens=0, temperature=0.0)
MOST_BYTES = 2 << 30
"""Maximum total size of the KV snapshots in transfer to or from one replica, in bytes; a single snapshot may
be larger. On a Ray cluster a snapshot is for moments in its machine's memory three times: as a file, as the
actor's copy, and as an object."""
EVACUATE_S = 10.0
"""Time limit for moving the prefixes of a draining replica, in seconds."""
EVACUATED_TOKENS = 1 << 16
PREFIXES = f"{INTERNAL}prefixes"
"""Id of the control call for the prefixes of a draining replica."""
MOST_REFUSALS = 3
"""Number of refusals in a row after which a replica gets no more KV snapshots from another replica. Refusals
occur between machines with different processors, where the same model has different keys and values."""


@dataclasses.dataclass(slots=True, eq=False)
class _InProgress:
    move: Move
    target: str
    end: int
    """The digest of the last page."""
    snapshot: str
    """Name of the KV snapshot in the store."""
    bytes: int
    began: float
    waiting: list[tuple[str, Callable[[], None]]]
    """(request id, function that sends the request) of each request that waits for the move."""
    export: ExportPrefix | None = None
    """The message to send when the source has computed the prompt; None if it has been sent, or if the source
    computes no prompt."""
    prefill: bool = False
    """Whether the source, a prefill replica, computes the prompt first."""
    exporting: bool = False
    """Whether the source has been asked for the KV snapshot and has not answered yet."""
    importing: bool = False
    timer: Timer | None = None


class KVConnector:
    """The moves in progress.

    send : sends a message to a replica that is up
    page_bytes : returns the bytes of one page, 0 if the replicas do not transfer pages
    make_store : makes the store for the KV snapshots; called with the first move
    later : schedules a function to run after a number of seconds; None for `call_later` of the running loop
    """

    def __init__(
        self,
        placement: Placement,
        *,
        send: Callable[[str, ToTokenizer], None],
        page_bytes: Callable[[], int],
        make_store: Callable[[], SnapshotStore],
        later: Later | None = None,
    ) -> None:
        self._placement = placement
        self._send = send
        self._page_bytes = page_bytes
        self._later = later
        self._pace = MovePace()
        self._moves: dict[str, _InProgress] = {}
        self._late: dict[str, _InProgress] = {}
        """Moves that have ended although their source may still be writing the KV snapshot. Each is removed
        when the source has answered."""
        self._make_store = make_store
        self._store: SnapshotStore | None = None
        self._refusals: dict[tuple[str, str], int] = {}
        """(source, target) → number of KV snapshots in a row that the target has refused."""
        self._digests = Digests()
        self._asked: dict[str, asyncio.Future[Sequence[HeldPrefix]]] = {}
        """Draining replica → future of the prefixes in its tree, for which `evacuate` waits."""
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()

    def seconds_for(self, pages: int) -> float:
        """Expected seconds for moving `pages` pages between replicas; infinite if pages are not moved."""
        page_bytes = self._page_bytes()
        return self._pace.seconds_for(pages * page_bytes) if page_bytes else math.inf

    def fetch(
        self,
        target: str,
        work: Work,
        request: Generate,
        ids: Sequence[int],
        scope: str,
        then: Callable[[], None],
    ) -> bool:
        """Move pages of the prompt of `work` to `target`, the replica on which `work` is placed. The pages
        come from a replica that holds them, if moving is faster than computing. Otherwise a prefill replica,
        if there is one, computes them.

        ids : token ids of the prompt of `request`
        scope : the prefix tree's scope for `request`
        then : sends the request

        Returns True if `then` will be called once, later; False if the caller has to send the request now.
        """
        page_bytes = self._page_bytes()
        if not work.digests or not page_bytes or needs_states(request):
            return False
        now, size = time.monotonic(), self._placement.page_size
        held = self._placement.held(target, work.digests)
        expected = (work.tokens - self._placement.missing(work.rid)) // size
        if joined := self._joined(target, work.digests[held:]):
            joined.waiting.append((work.rid, then))
            return True
        expected = max(held, expected)
        sources = [
            (name, pages)
            for name, pages in self._placement.others(target, work.digests)
            if self._takes(target, name)
        ]
        pace = self._placement.pace(target, now)
        move = choose(held, expected, pace, sources, self._pace, size, page_bytes)
        if move is None:
            return self._prefill(target, work, request, ids, scope, held, expected, then)
        if not self._has_room(move, target):
            return False
        self._start(move, target, work.digests[move.end - 1], ids, scope, (work.rid, then))
        return True

    def _prefill(
        self,
        target: str,
        work: Work,
        request: Generate,
        ids: Sequence[int],
        scope: str,
        held: int,
        expected: int,
        then: Callable[[], None],
    ) -> bool:
        """Let a prefill replica compute the whole pages that `target` lacks, and move them to `target`.
        `held` and `expected` are those of `choose`; the other parameters and the result are those of
        `fetch`."""
        end, now = len(work.digests), time.monotonic()
        gained = (end - expected) * self._placement.page_size
        if gained < LEAST_TOKENS:
            return False
        rid = self._new_rid()
        tokens = end * self._placement.page_size
        part = dataclasses.replace(work, rid=rid, tokens=tokens, output=0.0, program="")
        source = self._placement.place_prefill(part, now)
        if source is None:
            return False
        # The time that the source takes for its queue, which includes this prompt.
        queue_s = self._placement.work_of(source) * self._placement.pace(source, now)
        # An engine core's first prompts are slower than the fleet's pace: kernels are loaded, pages are
        # touched.
        limit_s = limited(PATIENCE * queue_s) if self._placement.answered(source) else MOST_LIMIT_S
        move = Move(source, held, end, gained, limit_s)
        if source == target or not self._has_room(move, target):
            self._placement.ended(rid)
            return False
        prompt = msgspec.structs.replace(
            Generate(rid=rid, prompt=(tuple(ids[:tokens]),), sampling=_NO_TOKENS),
            scope=request.scope,
            lora=request.lora,
            lora_revision=request.lora_revision,
            priority=request.priority,
        )
        self._start(move, target, work.digests[-1], ids, scope, (work.rid, then), rid, prompt)
        return True

    def prompt_computed(self, rid: str) -> None:
        """Ask for the export of a prompt that has been computed. Ignored unless `rid` is the id of a prompt
        computed for another replica."""
        found = self._moves.get(rid)
        if found is None or found.export is None:
            return
        self._placement.progress(rid, 0, time.monotonic())
        message, found.export, found.began = found.export, None, time.monotonic()
        if found.waiting:
            self._ask(rid, found.move.source, message)
        else:
            self._end(rid, 0)

    def prompts(self, name: str) -> int:
        """Number of prompts that the replica computes for others, or has computed and is exporting."""
        moves = self._moves.values()
        return sum(one.prefill and not one.importing and one.move.source == name for one in moves)

    def asked_of(self, name: str) -> list[str]:
        """Ids of the requests for which the replica `name` is computing a prompt."""
        moves = self._moves.values()
        computing = [one for one in moves if one.export is not None and one.move.source == name]
        return [rid for one in computing for rid, _ in one.waiting]

    def stop_waiting(self, rid: str) -> None:
        """Send the aborted request `rid` at once, if it waits for a move. Other requests go on waiting."""
        for found in list(self._moves.values()):
            own = [waiting for waiting in found.waiting if waiting[0] == rid]
            if own == found.waiting:
                self._release(found, 0)
            elif own:
                found.waiting = [waiting for waiting in found.waiting if waiting[0] != rid]
                self._send_waiting(own, 0)

    async def evacuate(self, name: str) -> None:
        """Move prefixes of the draining replica `name` to the replicas where their programs' next requests
        will go.

        Leased prefixes come first. A prefix that is cheaper to compute than to move is left out. Takes at
        most `EVACUATE_S` seconds.
        """
        until = time.monotonic() + EVACUATE_S
        takers = [taker for taker in self._placement.takers() if taker != name]
        if not takers or not self._page_bytes():
            return
        self._asked[name] = asked = asyncio.get_running_loop().create_future()
        self._send(name, GetPrefixes(rid=PREFIXES, most=EVACUATED_TOKENS))
        try:
            prefixes = await asyncio.wait_for(asked, EVACUATE_S)
        except TimeoutError:
            return
        homes: dict[str, str] = {}
        for prefix in prefixes:
            program = prefix.owners[0] if prefix.owners else ""
            if program not in homes:
                takers.append(takers.pop(0))
                homes[program] = takers[-1]
            if program:
                self._placement.set_home(program, homes[program])
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._placement.has(name):
                return
            await self._take_over(name, homes[program], prefix, left_s)

    async def _take_over(self, name: str, target: str, prefix: HeldPrefix, left_s: float) -> None:
        if not self._placement.has(target) or not self._takes(target, name):
            return
        size, page_bytes = self._placement.page_size, self._page_bytes()
        digests = self._digests.page_ends(np.array(prefix.ids, np.int32), prefix.scope, size)
        held = self._placement.held(target, digests)
        pace = self._placement.pace(target, time.monotonic())
        move = choose(held, held, pace, [(name, len(digests))], self._pace, size, page_bytes)
        if move is None or not self._has_room(move, target):
            return
        done = asyncio.Event()
        move = dataclasses.replace(move, limit_s=min(move.limit_s, left_s))
        self._start(move, target, digests[-1], prefix.ids, prefix.scope, ("", done.set))
        await done.wait()

    def _has_room(self, move: Move, target: str) -> bool:
        """Whether the KV snapshot of `move` fits beside those in transfer: into the store, and into
        `MOST_BYTES` of both replicas."""
        size = self._size(move)
        others = [*self._moves.values(), *self._late.values()]
        for name in (move.source, target):
            at_once = sum(one.bytes for one in others if name in (one.move.source, one.target))
            if at_once and at_once + size > MOST_BYTES:
                return False
        try:
            self._store = self._store or self._make_store()
            return self._store.has_room(size + sum(one.bytes for one in others))
        except OSError as error:
            log.warning("cached pages are not moved: %s", error)
            return False

    def _size(self, move: Move) -> int:
        return (move.end - move.first) * self._page_bytes()

    def _start(
        self,
        move: Move,
        target: str,
        end: int,
        ids: Sequence[int],
        scope: str,
        waiting: tuple[str, Callable[[], None]],
        rid: str = "",
        prompt: Generate | None = None,
    ) -> None:
        """Start a move. `end` is the digest of its last page, and `waiting` the first request that waits for
        it. `prompt`: a request that the source computes first, with the id `rid`; None if the source holds
        the pages."""
        assert self._store is not None
        rid = rid or self._new_rid()
        snapshot, now = self._store.new(), time.monotonic()
        found = _InProgress(move, target, end, snapshot, self._size(move), now, [waiting])
        self._moves[rid] = found
        later = self._later or asyncio.get_running_loop().call_later
        found.timer = later(move.limit_s, lambda: self._release(found, 0))
        size = self._placement.page_size
        message = ExportPrefix(
            rid=rid,
            ids=tuple(ids[: move.end * size]),
            scope=scope,
            path=found.snapshot,
            skip=move.first * size,
        )
        found.prefill = prompt is not None
        found.export = None if prompt is None else message
        self._ask(rid, move.source, prompt or message)

    def _ask(self, rid: str, name: str, message: ToTokenizer) -> None:
        """Send a message of the move `rid`. If sending fails, the move ends."""
        try:
            self._send(name, message)
            self._moves[rid].exporting = isinstance(message, ExportPrefix)
        except Exception:
            log.exception("cached pages are not moved: replica %s could not be asked", name)
            self._end(rid, 0)

    def _new_rid(self) -> str:
        return f"{INTERNAL}move-{self._name}-{next(self._numbers)}"

    def answered(self, name: str, answer: Reply | Texts | Failed) -> bool:
        """Handle the answer of the replica `name`. Returns False if it does not belong to a move."""
        if answer.rid == PREFIXES:
            self._tell(name, answer.prefixes if isinstance(answer, Reply) else ())
            return True
        if answer.rid in self._late:
            self._remove(self._late.pop(answer.rid).snapshot)
            return True
        found = self._moves.get(answer.rid)
        if found is None:
            return False
        found.exporting = False
        done = answer.transferred if isinstance(answer, Reply) else None
        if found.importing:
            self._count_refusal(found, answer)
            if done is not None:
                self._pace.learn(time.monotonic() - found.began, done.bytes)
            self._end(answer.rid, 0 if done is None else found.move.gained)
        elif done is None or not found.waiting:
            self._end(answer.rid, 0)  # no request waits any more, or there is nothing to import
        else:
            found.importing = True
            self._ask(answer.rid, found.target, ImportPrefix(rid=answer.rid, path=found.snapshot))
        return True

    def _takes(self, target: str, source: str) -> bool:
        """Whether `target` has refused fewer than `MOST_REFUSALS` snapshots in a row from `source`."""
        return self._refusals.get((source, target), 0) < MOST_REFUSALS

    def _count_refusal(self, found: _InProgress, answer: Reply | Texts | Failed) -> None:
        pair = found.move.source, found.target
        if not isinstance(answer, Failed):
            self._refusals.pop(pair, None)
        elif answer.error.code == InvalidRequest.code:
            self._refusals[pair] = self._refusals.get(pair, 0) + 1
            if not self._takes(found.target, found.move.source):
                message = answer.error.message
                log.warning("cached pages are not moved from %s to %s any more: %s", *pair, message)

    def left(self, name: str) -> None:
        """End the moves from and to the replica `name`, which takes no messages any more."""
        self._tell(name, ())
        self._refusals = {pair: count for pair, count in self._refusals.items() if name not in pair}
        for rid, found in list(self._moves.items()):
            if name in (found.target, found.move.source):
                self._end(rid, 0)
        for rid in [rid for rid, one in self._late.items() if one.move.source == name]:
            self._remove(self._late.pop(rid).snapshot)

    def close(self) -> None:
        """Drop all moves, and remove the store with its KV snapshots."""
        for found in self._moves.values():
            if found.timer is not None:
                found.timer.cancel()
        self._moves.clear()
        self._late.clear()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _tell(self, name: str, prefixes: Sequence[HeldPrefix]) -> None:
        asked = self._asked.pop(name, None)
        if asked is not None and not asked.done():
            asked.set_result(prefixes)

    def _joined(self, target: str, missing: Sequence[int]) -> _InProgress | None:
        """A move to `target` that has waiting requests and ends in one of `missing`; None if there is
        none."""
        wanted = set(missing)
        moves = self._moves.values()
        return next(
            (one for one in moves if one.waiting and one.target == target and one.end in wanted), None
        )

    def _end(self, rid: str, gained: int) -> None:
        found = self._moves.pop(rid)
        with errors_logged("ending a move"):
            self._placement.ended(rid)
        self._remove(found.snapshot)
        if found.exporting:
            self._late[rid] = found
        self._release(found, gained)

    def _remove(self, snapshot: str) -> None:
        if self._store is not None:
            with errors_logged("removing a KV snapshot"):
                self._store.remove(snapshot)

    def _release(self, found: _InProgress, gained: int) -> None:
        """Send the requests that wait for the move `found`. Each has `gained` tokens fewer to compute."""
        if found.timer is not None:
            found.timer.cancel()
            found.timer = None
        if found.export is not None and not gained and self._placement.has(found.move.source):
            rid = next((rid for rid, one in self._moves.items() if one is found), None)
            if rid is not None:  # its time limit has passed
                with errors_logged("aborting a prompt"):
                    self._send(found.move.source, Abort(rid=rid))
        waiting, found.waiting = found.waiting, []
        self._send_waiting(waiting, gained)

    def _send_waiting(self, waiting: Sequence[tuple[str, Callable[[], None]]], gained: int) -> None:
        for rid, send in waiting:
            with errors_logged("counting pages that have come"):
                self._placement.fetched(rid, gained, time.monotonic())
            send()


def needs_states(request: Generate) -> bool:
    """Whether the answer needs hidden states of the prompt itself, which have to be computed even if its
    pages are cached."""
    return request.pooling is not None or request.sampling.prompt_logprobs_start is not None
