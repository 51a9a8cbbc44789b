"""The requests in flight of a frontend: their outputs, from the sending of the request to the last chunk.

In the engine core a request has the client's id with "~" and a number appended. A client may use an id again
while the last chunks of the earlier request are in transit: the number keeps them apart.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
from collections.abc import Iterable, Sequence

import msgspec

from ramify.engine_messages import Abort, flow_key
from ramify.errors import RamifyError, WorkerDied
from ramify.messages import Generate, TextChunk
from ramify.runtime.faults import unsendable
from ramify.runtime.fleet.fleet import ReplicaFleet
from ramify.runtime.frontend.output_queue import OutputQueue
from ramify.runtime.frontend.quarantine import Quarantine
from ramify.text import not_unicode

log = logging.getLogger("ramify")


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
        """The number of requests in flight that share a place in the queue with `request`."""
        return self._flows[_flow_of(request)]

    # --- begin and end ----------------------------------------------------------------------------

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
        if flow := _flow_of(request):
            self._flows[flow] += 1
        return output

    def close(self, rid: str) -> None:
        """Forget a request whose chunks nobody reads any more, and abort the request unless it has ended."""
        output = self.outputs.pop(rid, None)
        if output is not None and (flow := _flow_of(output.request)):
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
        """Ids of the requests in flight that are `rid_prefix` or begin with it and "-" or "#"."""
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

    # --- messages of the engine core -----------------------------------------------------------------------

    def _of(self, engine_id: str) -> OutputQueue | None:
        """The output of the request with the id `engine_id` in the engine core; None if it has no reader any
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

    # --- deaths -----------------------------------------------------------------------------------

    def move(self, error: WorkerDied | None, rids: Sequence[str]) -> bool:
        """Send again the requests of a replica that has died, or that is drained if `error` is None.

        rids : ids of the requests in the engine core

        Returns whether a request that ran alone is to blame for the death.
        """
        outputs = [output for rid in rids if (output := self._of(rid)) is not None]
        to_blame = error is not None and self.quarantine.died(outputs, error)
        self._resend(outputs)
        return to_blame

    def _resend(self, outputs: Iterable[OutputQueue]) -> None:
        """Send again the requests of an engine core that is gone. Suspects go to the quarantine instead."""
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


def _flow_of(request: Generate) -> tuple[str, ...]:
    """(scope, kind, id) of the request's flow, the requests that share its place in the queue; () if it has a
    place of its own."""
    kind, name = flow_key("" if request.hint is None else request.hint.program, request.flow, request.rid)
    return () if kind == "request" else (request.scope, kind, name)
