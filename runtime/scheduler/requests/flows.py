"""Fair queueing by flow: requests that were sent together count as one flow beside the flows of others.

The requests of one program are a flow, and so are the prompts and choices of one body (`Generate.flow`). Any
other request is a flow of its own.

Example, with chunks of 512 tokens:

    chat    1 request, decoding                                      light
    list    1,000 prompts of one body; 128 of them run               heavy: more than 8 requests
    essay   1 request, 5,000 tokens of its prompt to be computed     heavy: more than 8 chunks,
                                                                     until all of them are computed

While the chat is there, list and essay yield: `Request.rank` puts these two between the chat's priority and
the next lower one. So they give up places and pages, and sit out steps, as requests of lower priority do. Two
of three flows yield, so these two together get two thirds of the time. Without the chat no flow yields.
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
    """One flow: the requests of one program, of one body, or a single request, of one priority and scope."""

    priority: int = 0
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
    """True if the flow's requests go behind other requests of the same priority."""
    newest: Request | None = None
    """The request of the flow whose first enqueueing was the latest; None if that request has ended."""


class Flows:
    """All flows with open requests.

    chunk_tokens : the most prompt tokens of a step
    light_requests : the most requests of a light flow
    """

    def __init__(self, chunk_tokens: int, light_requests: int = 8) -> None:
        self._light_requests = light_requests
        self._most_tokens = CHUNKS * chunk_tokens
        self._flows: dict[tuple[int, str, str, str], Flow] = {}
        self.share = 0.0
        """The share of the flows of the highest priority that yield, from 0 to 1."""
        self.settled = False
        """True if `judge` would find what it found last: nothing waits or prefills, and the same requests
        run. Set to False whenever a request arrives, waits, starts or stops to run, or ends."""

    def __len__(self) -> int:
        return len(self._flows)

    def join(self, request: Request) -> None:
        """Put `request`, which has arrived, into its flow."""
        request.flow = self._flows.setdefault(request.flow_key, Flow(request.priority))
        request.flow.open_requests += 1
        self.settled = False

    def leave(self, request: Request) -> None:
        """Take `request`, which ends, out of its flow."""
        request.flow.open_requests -= 1
        self.settled = False
        if request.flow.newest is request:
            request.flow.newest = None
        if not request.flow.open_requests:
            del self._flows[request.flow_key]

    def judge(self, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Decide which flows yield, and set the ranks of their requests. Returns True if a flow has
        begun or ceased to yield."""
        flows = self._flows.values()
        if len(flows) < 2 and not any(flow.yields for flow in flows):
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
        light: set[int] = set()
        self.settled = not waiting and not any(flow.prefill_tokens for flow in flows)
        for flow in flows:
            flow.queued += flow.running
            flow.heavy = flow.queued > self._light_requests or flow.prefill_tokens > self._most_tokens
            if flow.queued and not flow.heavy:
                light.add(flow.priority)
        changed = False
        for flow in flows:
            yields = flow.heavy and flow.priority in light
            changed = changed or yields != flow.yields
            flow.yields = yields
        top = max((flow.priority for flow in flows if flow.queued), default=0)
        highest = [flow.yields for flow in flows if flow.queued and flow.priority == top]
        self.share = sum(highest) / len(highest) if highest else 0.0
        if changed:
            for requests in (running, waiting):
                for request in requests:
                    request.take_rank()
        return changed
