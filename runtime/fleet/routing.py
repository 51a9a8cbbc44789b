"""Routing: each request of a fleet finds a replica, is sent there, and is counted until it ends.

one replica    the request is sent as it arrives
several        the prompt is tokenised on some replica, `Placement` chooses a replica, the request is sent
abort          sent to the request's replica, after the request
suspect        runs on the isolation replica, which gets no other requests until `end_alone`
replica lost   its requests are dropped here, and sent again by the frontend

A request is in one of these states:

tokenising   `ids` is None: a tokenizer has been asked for the prompt's token ids
waiting      no replica has been found for the request yet
fetching     it has a replica, and is sent when its cached pages have been moved there or the move has failed
sent         its replica has received it
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from ramify.engine_messages import INTERNAL, Abort, Failed, StepText, Texts, ToFrontend, Tokenize
from ramify.messages import Generate
from ramify.radix.digest import Digests
from ramify.runtime.faults import errors_logged, unsendable
from ramify.runtime.fleet.control_calls import Answer, ControlCalls
from ramify.runtime.fleet.kv_connector import KVConnector, needs_states
from ramify.runtime.fleet.placement import NoReplica, Placement, Work
from ramify.runtime.fleet.replica import Replica
from ramify.runtime.lora_names import tree_scope

log = logging.getLogger("ramify")

MOST_PINS = 4096
"""Maximum number of token limits whose replica is remembered."""
PLACE = f"{INTERNAL}place-"
"""Prefix of the ids of control calls that tokenise a prompt for its placement."""

EXPECTED_OUTPUT = 64.0
"""Expected number of output tokens of a request. A smaller max_tokens is used instead."""
CHARACTERS = 4
"""Estimated characters per token in the texts of choices and questions."""


@dataclasses.dataclass(slots=True, eq=False)
class FleetRequest:
    request: Generate
    alone: bool = False
    """Whether the request is quarantined, so that it may run only on the isolation replica."""
    ids: tuple[int, ...] | None = None
    """Token ids of the prompt. None while they are being computed; empty if they are not needed, or if the
    tokenizer refused the prompt."""
    replica: str = ""
    """Name of the request's replica; "" before one has been chosen."""
    reserved: bool = False
    """Whether `Placement` has chosen the replica, and has reserved the request's work there."""
    sent: bool = False
    aborts: list[Abort] = dataclasses.field(default_factory=list)
    """Aborts that arrived before the request was sent."""

    @property
    def coalesced(self) -> bool:
        """Whether the request's chunks are held back for up to `every_s` seconds, and arrive joined."""
        return self.request.every_s > 0

    @property
    def limits(self) -> list[str]:
        """Ids of the token limits that the request counts against."""
        hint = self.request.hint
        return [] if hint is None else [one.id for one in hint.limits if one.max_total_tokens is not None]

    def work(self, digests: Digests, scope: str, page_size: int) -> Work:
        """The request's work for a replica. `scope` is the prefix tree's scope for the request."""
        request, ids = self.request, self.ids or ()
        try:
            tokens = np.array(ids, np.int32)
        except OverflowError:
            ends: list[int] = []  # an id does not fit into int32: the replica refuses the request
        else:
            ends = digests.page_ends(tokens, scope, page_size)
        most = request.sampling.max_tokens
        scored = 0 if request.choices is None else sum(map(len, request.choices.texts)) // CHARACTERS
        for question in () if request.decide is None else request.decide.questions:
            options = sum(len(one.name) + len(one.description) for one in question.options)
            scored += (len(question.instructions) + options) // CHARACTERS
        known = 0 if request.continues is None else len(request.continues.ids)
        return Work(
            rid=request.rid,
            digests=ends,
            tokens=len(ids) + scored + known,
            output=EXPECTED_OUTPUT if most is None else min(most, EXPECTED_OUTPUT),
            program="" if request.hint is None else request.hint.program,
        )


class Router:
    """Routes requests to the replicas.

    replicas : the fleet's replicas by name; the caller adds and removes entries
    connector : moves cached pages between replicas; None if pages are not moved
    prefill : names of the prefill replicas, which compute prompts for the others
    receive : called with the `Failed` message for the frontend if a request cannot be sent
    single : the fleet has one replica and gets no other, so its work is not counted for placement
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        placement: Placement,
        control_calls: ControlCalls,
        connector: KVConnector | None,
        *,
        prefill: frozenset[str],
        receive: Callable[[ToFrontend], None],
        single: bool = False,
    ) -> None:
        self._replicas = replicas
        self._single = single
        self._placement = placement
        self._control_calls = control_calls
        self._connector = connector
        self._prefill = prefill
        self._receive = receive
        self._digests = Digests()
        self._requests: dict[str, FleetRequest] = {}
        self._isolation_replica: str | None = None
        self._pins: dict[str, str] = {}
        """Token limit → its replica. All requests of a limit go to one replica, as one scheduler has to count
        all their tokens."""
        self._idle: dict[str, asyncio.Event] = {}
        """Replica → event that is set when the replica has no request left; only while `wait_idle` waits."""

    # --- a request arrives ------------------------------------------------------------------------

    def send(self, request: Generate) -> None:
        """Place a request, and send it to its replica. Raises the encoding error if it cannot be encoded."""
        self._admit(FleetRequest(request))

    def send_alone(self, request: Generate) -> None:
        """Send a suspect to the isolation replica, which gets no other requests until `end_alone`."""
        self._admit(FleetRequest(request, alone=True))

    def _admit(self, found: FleetRequest) -> None:
        request = found.request
        only = self._only_replica()
        if only is not None:
            found.ids = ()  # token ids are needed only to choose among replicas
            if self._replicas[only].up and self._isolation_replica is None and not found.alone:
                found.replica = only
                self._send(found)
                self._pin(found, only)
                self._requests[request.rid] = found
                return
        msgspec.msgpack.encode(request)  # raises here the error that sending it would raise later
        self._requests[request.rid] = found
        if only is not None:
            self._place(found)
            return
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

    def _only_replica(self) -> str | None:
        """Name of the replica of a `single` fleet, if it takes new requests; else None."""
        if not self._single:
            return None
        ((name, replica),) = self._replicas.items()
        return name if replica.usable else None

    def _tokenised(self, found: FleetRequest, answer: Answer) -> None:
        # A prompt that cannot be tokenised is placed without ids; its replica refuses it and says why.
        found.ids = answer.prompts[0].ids if isinstance(answer, Texts) else ()
        self._place(found)

    # --- it finds its replica ---------------------------------------------------------------------

    def place_all(self) -> None:
        """Place the requests that wait for a replica. Suspects come first, since the isolation replica must
        have no other requests."""
        for found in sorted(self._requests.values(), key=lambda one: not one.alone):
            if found.ids is not None and not found.replica:
                self._place(found)

    def _place(self, found: FleetRequest) -> None:
        """Choose a replica for a request, and send it there. If no replica takes it, the request goes on
        waiting; if placing it raises, the request fails."""
        try:
            self._find_place(found)
        except Exception as error:
            self._fail(found.request.rid, error)

    def _find_place(self, found: FleetRequest) -> None:
        request, page_size = found.request, self._placement.page_size
        isolated = self._free_for_suspects() if found.alone else None
        if not page_size or (found.alone and isolated is None):
            return
        scope = self._scope(request)
        work = found.work(self._digests, scope, page_size)
        pinned = next((self._pins[limit] for limit in found.limits if limit in self._pins), None)
        moves = None if found.alone or needs_states(request) else self._connector
        try:
            name = self._placement.place(
                work,
                time.monotonic(),
                isolated or pinned,
                force=found.alone,
                move_s=None if moves is None else moves.seconds_for,
            )
        except NoReplica:
            return
        self._pin(found, name)
        found.replica, found.reserved = name, True
        if self._connector is None or found.alone or found.aborts:
            self._send(found)
            return
        send = functools.partial(self._send_held, found)
        if not self._connector.fetch(name, work, request, found.ids or (), scope, send):
            send()

    def _free_for_suspects(self) -> str | None:
        """Name of the isolation replica, which is chosen if there is none yet. None while that replica still
        has other requests, or if no replica is up."""
        if self._isolation_replica is None:
            usable = [name for name, replica in self._replicas.items() if replica.up and replica.usable]
            free = [name for name in usable if name not in self._prefill] or usable
            if not free:
                return None
            self._isolation_replica = min(free, key=self.count)
            self._placement.drain(self._isolation_replica)
        name = self._isolation_replica
        others = any(one.replica == name and not one.alone for one in self._requests.values())
        return None if others else name

    def end_alone(self) -> None:
        """End the isolation: the isolation replica takes all requests again."""
        for found in self._requests.values():
            found.alone = False
        isolated, self._isolation_replica = self._isolation_replica, None
        if isolated is not None and not self._replicas[isolated].draining:
            self._placement.undrain(isolated)
        self.place_all()

    def _pin(self, found: FleetRequest, name: str) -> None:
        for limit in found.limits:
            self._pins.pop(limit, None)
            self._pins[limit] = name
        while len(self._pins) > MOST_PINS:
            del self._pins[next(iter(self._pins))]

    def _scope(self, request: Generate) -> str:
        adapters = (replica.loras for replica in self._replicas.values())
        adapter = next((own[request.lora] for own in adapters if request.lora in own), None)
        return tree_scope(str(request.scope), adapter if request.lora else None)

    # --- it is sent -------------------------------------------------------------------------------

    def _send_held(self, found: FleetRequest) -> None:
        """Send a request that has waited for pages. Does nothing if its replica has been lost meanwhile."""
        rid = found.request.rid
        if self._requests.get(rid) is found and not found.sent:
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
        """Send an abort to the replica of its request, after the request."""
        found = self._requests.get(abort.rid)
        if found is None:
            return
        if found.sent:
            self._replicas[found.replica].engine.send(abort)
            return
        found.aborts.append(abort)
        if found.replica and self._connector is not None:
            self._connector.stop_waiting(abort.rid)

    # --- it runs, and ends ------------------------------------------------------------------------

    def count(self, name: str) -> int:
        """Number of the replica's requests, including prompts that it computes for other replicas."""
        prompts = 0 if self._connector is None else self._connector.prompts(name)
        return prompts + sum(found.replica == name for found in self._requests.values())

    def placed(self, rid: str) -> bool:
        """Whether the request `rid` is known and has a replica."""
        found = self._requests.get(rid)
        return found is not None and bool(found.replica)

    def output_arrived(self, message: StepText) -> None:
        """Count the output in `message`, and end the requests that have finished."""
        now = time.monotonic()
        for chunk in message.chunks:
            found = self._requests.get(chunk.rid) if chunk.ids else None
            if found is not None and found.reserved:
                held_s = chunk.usage.decode_s if found.coalesced and chunk.usage is not None else 0.0
                with errors_logged("counting output"):
                    self._placement.progress(chunk.rid, len(chunk.ids), now - held_s)
            if chunk.finish is not None:
                if self._connector is not None:
                    with errors_logged("exporting a prompt"):
                        self._connector.prompt_computed(chunk.rid)
                self.ended(chunk.rid)
        self.check_idle()

    def ended(self, rid: str) -> None:
        """Forget a request that has ended in any way. Ids of requests without a replica are ignored."""
        found = self._requests.pop(rid) if self.placed(rid) else None
        with errors_logged("ending a request"):
            self._placement.ended(rid)
        if found is not None:
            self.check_idle()
            if found.replica == self._isolation_replica and not found.alone:
                self.place_all()

    def _fail(self, rid: str, error: Exception) -> None:
        log.error("a request could not be placed: %s", rid, exc_info=error)
        self.ended(rid)
        self._requests.pop(rid, None)
        self._receive(Failed(rid=rid, error=unsendable(error).to_info()))

    # --- a replica goes ---------------------------------------------------------------------------

    async def wait_idle(self, name: str, limit_s: float) -> None:
        """Wait until the replica has no requests, for at most `limit_s` seconds."""
        idle = self._idle[name] = asyncio.Event()
        try:
            self.check_idle()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), limit_s)
        finally:
            del self._idle[name]

    def check_idle(self) -> None:
        """Wake `wait_idle` for each replica that has no requests."""
        for name, idle in self._idle.items():
            if not self.count(name):
                idle.set()

    def unpin(self, name: str) -> None:
        """Let the token limits of the draining replica `name` move to other replicas."""
        self._pins = {limit: home for limit, home in self._pins.items() if home != name}

    def lose(self, name: str, *, died: bool) -> list[str]:
        """Forget the requests of a replica that takes no messages any more, and return their ids. If the
        replica died, they include requests that waited for a prompt computed there."""
        rids = [rid for rid, found in self._requests.items() if found.replica == name]
        for asked in self._control_calls.waiting_for(name):
            found = self._requests.get(asked.removeprefix(PLACE))
            if found is not None and found.ids is None:
                self._control_calls.forget(asked)
                rids.append(found.request.rid)
        if died and self._connector is not None:
            # The cause of the death may be a prompt that it computed for another replica.
            for rid in self._connector.asked_of(name):
                self._placement.ended(rid)
                rids.append(rid)
        for rid in rids:
            self._requests.pop(rid, None)
        if name == self._isolation_replica:
            self._isolation_replica = None
        self.unpin(name)
        self.check_idle()
        return rids

    def clear(self) -> None:
        """Forget the requests that wait for a replica, since the last replica is gone."""
        self._requests = {rid: found for rid, found in self._requests.items() if found.replica}
