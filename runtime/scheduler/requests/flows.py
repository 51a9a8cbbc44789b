"""Fair queueing by API key and by flow: requests that were sent together count as one beside those of others.

The requests of one program are a flow, and so are the prompts and choices of one body (`Generate.flow`). Any
other request is a flow of its own. The flows of one API key are a flow too, beside those of other keys.

Example, with chunks of 512 tokens:

    chat    1 request, decoding                                      light
    list    1,000 prompts of one body; 128 of them run               heavy: more than 8 requests
    essay   1 request, 5,000 tokens of its prompt to be computed     heavy: more than 8 chunks,
                                                                     until all of them are computed

While the chat is there, list and essay yield: `Request.rank` puts these two between the chat's priority and
the next lower one. So they give up places and pages, and sit out steps, as requests of lower priority do. Two
of three flows yield, so these two together get two thirds of the time. Without the chat no flow yields.

Flows are compared with the flows of the same key, and keys with keys. If the three above are of one key, and
another key has a chat, the first key is heavy: all of its flows yield to the other's chat, list and essay
twice. One of two keys yields, so it gets half of the time, whatever the number of its flows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramify.runtime.scheduler.requests.request import Request

CHUNKS = 8
"""A light flow has at most this number of chunks of prompt tokens to compute. So prompts of usual length stay
light, and are computed beside decoding requests. With 2 chunks as the limit, flows with prompts of 2,000
tokens got only a third of the time while others decoded."""


@dataclasses.dataclass(slots=True, eq=False)
class Flow:
    """One flow: the requests of one program or body, or a single request, of one priority, key and scope; or
    all requests of one key and priority."""

    priority: int = 0
    key: Flow | None = None
    """The flow of the key; None for the flow of a key itself."""
    open_requests: int = 0
    """Requests that have not ended."""
    running: int = 0
    queued: int = 0
    """Number of running and waiting requests. Spans of choices count as requests, so `queued` may exceed
    `open_requests`."""
    prefill_tokens: int = 0
    """The sum of `Request.uncached` of the flow's waiting and prefilling requests, and of requests whose
    questions are computed. A long prompt counts in full until all of it is computed."""
    heavy: bool = False
    yields: bool = False
    """True if the flow's requests go behind other requests of the same priority: of the same key, for the
    flow of a key behind those of other keys."""
    newest: Request | None = None
    """The request of the flow whose first enqueueing was the latest; None if that request has ended."""

    @property
    def levels(self) -> tuple[Flow, ...]:
        """The flow, and the flow of its key."""
        return (self,) if self.key is None else (self, self.key)

    @property
    def rank(self) -> int:
        """The rank of the flow's requests: three times the priority, less one for each level that yields."""
        return 3 * self.priority - sum([flow.yields for flow in self.levels])


class Flows:
    """All flows with open requests.

    chunk_tokens : the most prompt tokens of a step
    light_requests : the most requests of a light flow
    """

    def __init__(self, chunk_tokens: int, light_requests: int = 8) -> None:
        self._light_requests = light_requests
        self._most_tokens = CHUNKS * chunk_tokens
        self._flows: dict[tuple[int, str, str, str, str], Flow] = {}
        self._keys: dict[tuple[int, str], Flow] = {}
        self.share = 0.0
        """The share of the flows of the highest priority that yield, from 0 to 1. Keys count alike, and so do
        the flows of one key."""
        self.settled = False
        """True if `judge` would find what it found last: nothing waits or prefills, and the same requests
        run. Set to False whenever a request arrives, waits, starts or stops to run, or ends."""

    def __len__(self) -> int:
        return len(self._flows)

    def join(self, request: Request) -> None:
        """Put `request`, which has arrived, into its flow."""
        if (flow := self._flows.get(request.flow_key)) is None:
            key = self._keys.setdefault(request.flow_key[:2], Flow(request.priority))
            flow = self._flows[request.flow_key] = Flow(request.priority, key)
        request.flow = flow
        for level in flow.levels:
            level.open_requests += 1
        self.settled = False

    def leave(self, request: Request) -> None:
        """Take `request`, which ends, out of its flow."""
        self.settled = False
        if request.flow.newest is request:
            request.flow.newest = None
        for level in request.flow.levels:
            level.open_requests -= 1
            if not level.open_requests:
                if level.key is None:
                    del self._keys[request.flow_key[:2]]
                else:
                    del self._flows[request.flow_key]

    def judge(self, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Decide which flows yield, and set the ranks of their requests. Returns True if a flow has
        begun or ceased to yield."""
        flows = (*self._flows.values(), *self._keys.values())
        if len(self._flows) < 2 and not any(flow.yields for flow in flows):
            self.settled = True
            return False
        for flow in flows:
            flow.running = flow.queued = flow.prefill_tokens = 0
        for request in running:
            flow = request.flow
            flow.running += 1
            if request.prefilling or request.branching:
                flow.prefill_tokens += request.uncached
        for request in waiting:
            request.flow.queued += 1
            request.flow.prefill_tokens += request.uncached
        for flow in self._flows.values():
            if (key := flow.key) is not None:
                key.running += flow.running
                key.queued += flow.queued
                key.prefill_tokens += flow.prefill_tokens
        light: set[tuple[int, Flow | None]] = set()
        self.settled = not waiting and not any(flow.prefill_tokens for flow in flows)
        for flow in flows:
            flow.queued += flow.running
            flow.heavy = flow.queued > self._light_requests or flow.prefill_tokens > self._most_tokens
            if flow.queued and not flow.heavy:
                light.add((flow.priority, flow.key))
        changed = False
        for flow in flows:
            yields = flow.heavy and (flow.priority, flow.key) in light
            changed = changed or yields != flow.yields
            flow.yields = yields
        self.share = self._yielding()
        if changed:
            for requests in (running, waiting):
                for request in requests:
                    request.take_rank()
        return changed

    def _yielding(self) -> float:
        """The value of `share`."""
        top = max((key.priority for key in self._keys.values() if key.queued), default=0)
        yields: dict[Flow, list[bool]] = {}
        for flow in self._flows.values():
            if flow.queued and flow.priority == top and flow.key is not None:
                yields.setdefault(flow.key, []).append(flow.yields or flow.key.yields)
        return sum(sum(each) / len(each) for each in yields.values()) / max(len(yields), 1)
