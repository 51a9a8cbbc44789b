"""The requests in flight of a frontend: their outputs, from the sending of the request to the last chunk.

In the engine core a request has the client's id with "~" and a number appended. A client may use an id again
while the last chunks of the earlier request are in transit: the number keeps them apart.

Quarantine: requests that may be the cause of an engine core's deaths run one at a time, apart from others.

after a death   the requests of the engine core are sent again at once, except suspects
a suspect       was in flight at two deaths, without progress in between
one at a time   a suspect runs alone until it has produced `PROGRESS` more tokens, or has ended
a death there   counts only for the suspect that ran; after two such deaths that suspect fails
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ramify.engine_messages import Abort, flow_key
from ramify.errors import RamifyError, WorkerDied
from ramify.messages import Generate, TextChunk
from ramify.runtime.faults import unsendable
from ramify.runtime.fleet.fleet import ReplicaFleet
from ramify.runtime.frontend.output_queue import PROGRESS, OutputQueue
from ramify.text import not_unicode

log = logging.getLogger("ramify")


class Quarantine:
    """The queue of suspects. One is sent at a time, by `send_alone`. `end_alone` is called when none is left.

    Between the first `send_alone` and `end_alone`, the engine core that runs the suspects gets no other
    requests.
    """

    def __init__(self, send_alone: Callable[[Generate], None], end_alone: Callable[[], None]) -> None:
        self._send_alone = send_alone
        self._end_alone = end_alone
        self._waiting: collections.deque[OutputQueue] = collections.deque()
        self._probe: OutputQueue | None = None
        self._until = 0

    def died(self, outputs: Iterable[OutputQueue], error: WorkerDied) -> bool:
        """Count the death of an engine core that had the requests `outputs`. Returns whether the suspect that
        ran alone is to blame."""
        found = list(outputs)
        probe = self._probe if self._probe in found else None
        for output in found if probe is None else [probe]:
            output.count_death(error, alone=probe is not None)
        return probe is not None

    def add_suspects(self, outputs: Iterable[OutputQueue]) -> None:
        """Queue suspects to run one at a time. The suspect that ran alone before the death goes first."""
        for output in outputs:
            if output is self._probe:
                self._probe = None
                self._waiting.appendleft(output)
            elif output not in self._waiting:
                self._waiting.append(output)
        self.send_next()

    def waits(self, output: OutputQueue) -> bool:
        """Whether the request waits in the queue of suspects."""
        return any(output is waiting for waiting in self._waiting)

    def send_next(self) -> None:
        """Send the next suspect, unless a suspect is running that has not made enough progress."""
        probe = self._probe
        if probe is not None and not probe.ended and probe.size < self._until:
            return
        was_busy, self._probe = probe is not None, None
        while self._waiting:
            suspect = self._waiting.popleft()
            if not suspect.ended:
                self._probe, self._until = suspect, suspect.size + PROGRESS
                try:
                    self._send_alone(suspect.rest())
                    return
                except Exception as error:
                    log.exception("a request could not be sent alone: %s", suspect.request.rid)
                    suspect.fail(unsendable(error))
                    was_busy, self._probe = True, None
        if was_busy:
            self._end_alone()

    @property
    def busy(self) -> bool:
        return self._probe is not None


class Requests:
    """The requests in flight, which `fleet` runs. Everything runs on one event loop."""

    def __init__(self, fleet: ReplicaFleet) -> None:
        self._fleet = fleet
        self.outputs: dict[str, OutputQueue] = {}
        """Client's request id → output."""
        self._flows: collections.Counter[tuple[str, ...]] = collections.Counter()
        """Flow → number of requests in flight."""
        self._numbers = itertools.count()
        self.quarantine = Quarantine(fleet.send_alone, fleet.end_alone)
        self._empty = asyncio.Event()

    def in_flow(self, request: Generate) -> int:
        """The number of requests in flight of the same flow as `request`, or of the same API key if that is
        more."""
        return max((self._flows[flow] for flow in _flows_of(request)), default=0)

    def send_request(self, request: Generate) -> OutputQueue:
        """Send a request, and return its output. If the request cannot be sent, it is forgotten, and an error
        such as `InvalidRequest` is raised."""
        in_engine = msgspec.structs.replace(request, rid=f"{request.rid}~{next(self._numbers)}")
        output = self.outputs[request.rid] = OutputQueue(in_engine, rid=request.rid)
        try:
            self._fleet.send(in_engine)
        except UnicodeEncodeError:
            self.outputs.pop(request.rid, None)
            raise not_unicode(msgspec.to_builtins(request)) from None
        except Exception as error:
            self.outputs.pop(request.rid, None)
            raise unsendable(error) from error
        self._flows.update(_flows_of(request))
        return output

    def close(self, rid: str) -> None:
        """Forget a request whose chunks nobody reads any more, and abort the request unless it has ended."""
        output = self.outputs.pop(rid, None)
        for flow in () if output is None else _flows_of(output.request):
            self._flows[flow] -= 1
            if not self._flows[flow]:
                del self._flows[flow]
        if output is not None and not output.ended:
            self._fleet.send(Abort(rid=output.request.rid))
            output.ended = True
            self.quarantine.send_next()
        if not self.outputs:
            self._empty.set()

    def abort(self, rids: Sequence[str]) -> int:
        """Abort the requests `rids`. Their last chunks still arrive. Returns the number of requests."""
        for rid in rids:
            output = self.outputs[rid]
            output.aborted = True
            if self.quarantine.waits(output):  # no engine core has it
                output.end_aborted()
            else:
                self._fleet.send(Abort(rid=output.request.rid))
        return len(rids)

    def named(self, rid_prefix: str) -> list[str]:
        """Ids in flight that are `rid_prefix`, or begin with `rid_prefix` followed by "-" or "#"."""
        begins = (rid_prefix + "-", rid_prefix + "#")
        return [rid for rid in self.outputs if rid == rid_prefix or rid.startswith(begins)]

    async def wait_empty(self, seconds: float) -> None:
        """Wait until no request is in flight, for at most `seconds`."""
        if self.outputs:
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), seconds)
            except TimeoutError:
                log.warning("requests that were still running after %g s: %d", seconds, len(self.outputs))

    def _of(self, engine_id: str) -> OutputQueue | None:
        """The output of the request with the id `engine_id` in the engine core; None if nobody reads it any
        more."""
        output = self.outputs.get(engine_id.rpartition("~")[0])
        return output if output is not None and output.request.rid == engine_id else None

    def take(self, chunks: Iterable[TextChunk]) -> None:
        for chunk in chunks:
            output = self._of(chunk.rid)
            if output is not None and not output.ended:
                output.put(chunk)
                if output.ended and chunk.finish is None:  # it failed: its text differs
                    self._fleet.send(Abort(rid=chunk.rid))
        if self.quarantine.busy:
            self.quarantine.send_next()

    def fail(self, rid: str, error: RamifyError) -> None:
        """Fail the request whose id in the engine core is `rid`."""
        output = self._of(rid)
        if output is not None:
            output.fail(error)
            self.quarantine.send_next()

    def fail_all(self, error: RamifyError) -> None:
        for output in list(self.outputs.values()):
            output.fail(error)

    def move(self, error: WorkerDied | None, rids: Sequence[str]) -> bool:
        """Send again the requests of a replica that has died with `error`. None: the replica is drained.

        rids : ids of the requests in the engine core

        Returns whether a suspect that ran alone is to blame for the death.
        """
        outputs = [output for rid in rids if (output := self._of(rid)) is not None]
        to_blame = error is not None and self.quarantine.died(outputs, error)
        self._resend(outputs)
        return to_blame

    def _resend(self, outputs: Iterable[OutputQueue]) -> None:
        going_on = [output for output in outputs if not output.ended]
        for output in going_on:
            if output.suspect and output.aborted:
                output.end_aborted()
        going_on = [output for output in going_on if not output.ended]
        self.quarantine.add_suspects([output for output in going_on if output.suspect])
        for output in going_on:
            try:
                if not output.suspect:
                    self._fleet.send(output.rest())
                if output.aborted:
                    self._fleet.send(Abort(rid=output.request.rid))
            except Exception as error:
                log.exception("a request could not be sent again: %s", output.request.rid)
                output.fail(unsendable(error))


def _flows_of(request: Generate) -> list[tuple[str, ...]]:
    """The request's flow, unless it is one by itself, and its API key: (key, scope, kind, id) and (key)."""
    kind, name = flow_key("" if request.hint is None else request.hint.program, request.flow, request.rid)
    found: list[tuple[str, ...]] = [] if kind == "request" else [(request.key, request.scope, kind, name)]
    return [*found, (request.key,)] if request.key else found
