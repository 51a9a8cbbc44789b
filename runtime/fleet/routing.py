"""The requests of a fleet: each finds a replica, is sent there, and is counted until it ends.

arrives      its prompt's ids from some tokenizer, then `Placement`, then its replica; or it waits for one
aborted      its replica is told, or it is when it is sent
runs alone   on a replica that has none but such ones, the ward, until `end_alone`
loses it     its replica is gone: the record goes, and the frontend sends the request again
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from ramify.engine_messages import INTERNAL, Abort, Failed, StepText, Texts, ToFrontend, Tokenize
from ramify.messages import Generate
from ramify.radix.digest import Digests
from ramify.runtime.faults import errors_logged, unsendable
from ramify.runtime.fleet.control_calls import Answer, ControlCalls
from ramify.runtime.fleet.kv_connector import KVConnector, needs_states
from ramify.runtime.fleet.placement import NoReplica, Placement
from ramify.runtime.fleet.replica import Replica
from ramify.runtime.fleet.request import FleetRequest
from ramify.runtime.lora_names import tree_scope

log = logging.getLogger("ramify")

MOST_PINS = 4096
"""Limits of programs whose replica is remembered."""
PLACE = f"{INTERNAL}place-"
"""Begins the ids of questions for the tokens of a prompt that is to be placed."""


class Router:
    """Routes requests to the replicas.

    replicas : those of the fleet, by name, now
    receive : takes the message for the frontend where a request cannot be sent
    less : called with the name of a replica that has a request less
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        placement: Placement,
        control_calls: ControlCalls,
        *,
        receive: Callable[[ToFrontend], None],
        less: Callable[[str], None],
    ) -> None:
        self._replicas = replicas
        self._placement = placement
        self._control_calls = control_calls
        self._receive = receive
        self._less = less
        self._digests = Digests()
        self.requests: dict[str, FleetRequest] = {}
        """All that have arrived and have not ended, by id."""
        self.connector: KVConnector | None = None
        self.prefill: frozenset[str] = frozenset()
        """The replicas that compute prompts for the others."""
        self.isolation_replica: str | None = None
        """The replica of those that run alone."""
        self._pins: dict[str, str] = {}
        """The replica of each limit of tokens: one scheduler has to count all that its requests cost."""

    # --- a request arrives ------------------------------------------------------------------------

    def send(self, request: Generate) -> None:
        """Place a request, and send it to its replica."""
        self._begin(FleetRequest(request))

    def send_alone(self, request: Generate) -> None:
        """As `send`, to a replica that has none but such requests, and gets no others until `end_alone`."""
        self._begin(FleetRequest(request, alone=True))

    def _begin(self, found: FleetRequest) -> None:
        """Place a request, after its prompt has been tokenised."""
        request = found.request
        msgspec.msgpack.encode(request)  # raises at once what sending it would raise later
        self.requests[request.rid] = found
        ids = [part for part in request.prompt if not isinstance(part, str)]
        if request.chat is None and not request.preambles and len(ids) == len(request.prompt):
            found.ids = tuple(itertools.chain(*ids))
            self._place(found)
        else:
            message = Tokenize(
                rid=PLACE + request.rid,
                prompts=(request,),
                special=request.chat is None,
                entries=False,
            )
            self._control_calls.ask(message, functools.partial(self._tokenised, found))

    def _tokenised(self, found: FleetRequest, answer: Answer) -> None:
        # A prompt that no tokenizer takes is refused by the replica's, in words that are about the request.
        found.ids = answer.prompts[0].ids if isinstance(answer, Texts) else ()
        self._place(found)

    # --- it finds its replica ---------------------------------------------------------------------

    def place_all(self) -> None:
        """Send the requests that have waited for a replica."""
        for found in list(self.requests.values()):
            if found.ids is not None and not found.replica:
                self._place(found)

    def _place(self, found: FleetRequest) -> None:
        """Send a request to its replica; it goes on waiting where none is up, and fails where that raises."""
        try:
            self._find_place(found)
        except Exception as error:
            self._fail(found.request.rid, error)

    def _find_place(self, found: FleetRequest) -> None:
        request, page_size = found.request, self._placement.page_size
        isolation_replica = self._isolation_replica_for() if found.alone else None
        if not page_size or (found.alone and isolation_replica is None):
            return
        scope = self._scope(request)
        work = found.work(self._digests, scope, page_size)
        pinned = next((self._pins[limit] for limit in found.limits if limit in self._pins), None)
        moves = None if found.alone or needs_states(request) else self.connector
        try:
            name = self._placement.place(
                work,
                time.monotonic(),
                isolation_replica or pinned,
                force=found.alone,
                move_s=None if moves is None else moves.seconds_for,
            )
        except NoReplica:
            return
        self._pin(found, name)
        found.replica = name
        if self.connector is None or found.alone or found.aborts:
            self._send(found)
            return
        send = functools.partial(self._send_held, found)
        if not self.connector.fetch(name, work, request, found.ids or (), scope, send):
            send()

    def _isolation_replica_for(self) -> str | None:
        """The replica for a request that is to run alone; None while there is none, or it has others."""
        if self.isolation_replica is None:
            usable = [name for name, replica in self._replicas.items() if replica.up and replica.usable]
            free = [name for name in usable if name not in self.prefill] or usable
            if not free:
                return None
            self.isolation_replica = min(free, key=self.count)
            self._placement.drain(self.isolation_replica)
        others = any(
            one.replica == self.isolation_replica and not one.alone for one in self.requests.values()
        )
        return None if others else self.isolation_replica

    def end_alone(self) -> None:
        """Send other requests to the ward again."""
        for found in self.requests.values():
            found.alone = False
        isolation_replica, self.isolation_replica = self.isolation_replica, None
        if isolation_replica is not None and not self._replicas[isolation_replica].draining:
            self._placement.undrain(isolation_replica)
        self.place_all()

    def _pin(self, found: FleetRequest, name: str) -> None:
        for limit in found.limits:
            self._pins.pop(limit, None)
            self._pins[limit] = name
        while len(self._pins) > MOST_PINS:
            del self._pins[next(iter(self._pins))]

    def _scope(self, request: Generate) -> str:
        """The prefix tree's scope for the request."""
        adapters = (replica.loras for replica in self._replicas.values())
        adapter = next((own[request.lora] for own in adapters if request.lora in own), None)
        return tree_scope(str(request.scope), adapter if request.lora else None)

    # --- it is sent -------------------------------------------------------------------------------

    def _send_held(self, found: FleetRequest) -> None:
        """Send a request that has waited for pages; nothing where its replica has gone meanwhile."""
        rid = found.request.rid
        if self.requests.get(rid) is found and not found.sent:
            try:
                self._send(found)
            except Exception as error:
                self._fail(rid, error)

    def _send(self, found: FleetRequest) -> None:
        engine = self._replicas[found.replica].engine
        found.sent = True
        engine.send(found.request)
        for abort in found.aborts:
            engine.send(abort)

    def abort(self, abort: Abort) -> None:
        found = self.requests.get(abort.rid)
        if found is None:
            return
        if found.sent:
            self._replicas[found.replica].engine.send(abort)
            return
        found.aborts.append(abort)
        if found.replica and self.connector is not None:
            self.connector.forget(abort.rid)

    # --- it runs, and ends ------------------------------------------------------------------------

    def count(self, name: str) -> int:
        """How many requests the replica has, prompts that it computes for others among them."""
        prompts = 0 if self.connector is None else self.connector.prompts(name)
        return prompts + sum(found.replica == name for found in self.requests.values())

    def placed(self, rid: str) -> bool:
        """There is a request of this id, and it has a replica."""
        found = self.requests.get(rid)
        return found is not None and bool(found.replica)

    def heard(self, message: StepText) -> None:
        """Output of requests has come."""
        now = time.monotonic()
        for chunk in message.chunks:
            if chunk.ids and self.placed(chunk.rid):
                coalesced = self.requests[chunk.rid].coalesced
                held_s = chunk.usage.writing_s if coalesced and chunk.usage is not None else 0.0
                with errors_logged("counting output"):
                    self._placement.progress(chunk.rid, len(chunk.ids), now - held_s)
            if chunk.finish is not None:
                if self.connector is not None:
                    with errors_logged("exporting a prompt"):
                        self.connector.prefilled(chunk.rid)
                self.ended(chunk.rid)

    def ended(self, rid: str) -> None:
        """A request has ended, in any way. Nothing where it has no replica."""
        found = self.requests.pop(rid) if self.placed(rid) else None
        with errors_logged("ending a request"):
            self._placement.ended(rid)
        if found is not None:
            self._less(found.replica)
            if found.replica == self.isolation_replica and not found.alone:
                self.place_all()

    def _fail(self, rid: str, error: Exception) -> None:
        """A request cannot be sent: it ends, and others go on."""
        log.error("a request could not be placed: %s", rid, exc_info=error)
        self.ended(rid)
        self.requests.pop(rid, None)
        self._receive(Failed(rid=rid, error=unsendable(error).to_info()))

    # --- its replica goes -------------------------------------------------------------------------

    def unpin(self, name: str) -> None:
        """The replica drains: limits of tokens find another one."""
        self._pins = {limit: home for limit, home in self._pins.items() if home != name}

    def lose(self, name: str, *, died: bool) -> list[str]:
        """The replica takes nothing any more. Returns the requests that it had, which are forgotten."""
        rids = [rid for rid, found in self.requests.items() if found.replica == name]
        for asked in self._control_calls.waiting_for(name):
            found = self.requests.get(asked.removeprefix(PLACE))
            if found is not None and found.ids is None:
                self._control_calls.forget(asked)
                rids.append(found.request.rid)
        if (
            died and self.connector is not None
        ):  # what has killed it may be a prompt that it computed for others
            for rid in self.connector.asked_of(name):
                self._placement.ended(rid)
                rids.append(rid)
        for rid in rids:
            self.requests.pop(rid, None)
        if name == self.isolation_replica:
            self.isolation_replica = None
        self.unpin(name)
        return rids

    def clear(self) -> None:
        """The fleet is gone: what waits for a replica is forgotten."""
        self.requests = {rid: found for rid, found in self.requests.items() if found.replica}
