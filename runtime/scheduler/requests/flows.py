"""Fair queueing by flow: requests that came together share one place beside those of others.

The requests of one program are a flow, and so are the prompts and choices of one body (`Generate.flow`). Any
other request is a flow of its own.

Example, with chunks of 512 tokens:

    chat    1 request, decoding                                      light
    list    1,000 prompts of one body, of which 128 run              heavy: more than 8 requests
    essay   1 request, 5,000 tokens of its prompt to be computed     heavy: more than 8 chunks,
                                                                     until all of them are computed

Beside the chat, list and essay yield: `Request.rank` puts them between its priority and the one below. So
they give up places and pages, and sit out steps, as lower priorities do. Two of three flows yield, and have
two thirds of the time. Without the chat nobody yields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramify.runtime.scheduler.requests.request import Request

CHUNKS = 8
"""Most chunks of prompts that a light flow has to compute. Usual prompts are computed beside decoding
requests: with 2, those of 2,000 tokens had a third of the time wherever others decode."""


@dataclasses.dataclass(slots=True, eq=False)
class Flow:
    """One flow: requests of one priority that share one place."""

    priority: int = 0
    open_requests: int = 0
    """Requests that have not ended."""
    running: int = 0
    queued: int = 0
    """Number of running and waiting requests. Spans of choices count, so it may exceed `open_requests`."""
    prefill_tokens: int = 0
    """Prompt tokens of its waiting and prefilling requests that were uncached when these were enqueued. So a
    long prompt counts in full until all of it is computed."""
    heavy: bool = False
    yields: bool = False
    """Its requests go behind others of their priority."""
    newest: Request | None = None
    """The last request that was enqueued, if it has not ended."""


class Flows:
    """The flows that have requests.

    chunk_tokens : most prompt tokens of a step
    light_requests : most requests of a light flow
    """

    def __init__(self, chunk_tokens: int, light_requests: int = 8) -> None:
        self._light_requests = light_requests
        self._most_tokens = CHUNKS * chunk_tokens
        self._flows: dict[tuple[int, str, str, str], Flow] = {}
        self.share = 0.0
        """Share of the highest priority's flows that yield, from 0 to 1."""

    def __len__(self) -> int:
        return len(self._flows)

    def join(self, request: Request) -> None:
        """Put `request`, which has arrived, into its flow."""
        request.flow = self._flows.setdefault(request.flow_key, Flow(request.priority))
        request.flow.open_requests += 1

    def leave(self, request: Request) -> None:
        """Take `request`, which ends, out of its flow."""
        request.flow.open_requests -= 1
        if request.flow.newest is request:
            request.flow.newest = None
        if not request.flow.open_requests:
            del self._flows[request.flow_key]

    def judge(self, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Decide which flows yield; True where that has changed the rank of a request."""
        flows = self._flows.values()
        if len(flows) < 2 and not any(flow.yields for flow in flows):
            return False
        for flow in flows:
            flow.running = flow.queued = flow.prefill_tokens = 0
        for request in running:
            flow = request.flow
            flow.running += 1
            if request.prefilling:
                flow.prefill_tokens += request.uncached
        for request in waiting:
            request.flow.queued += 1
            request.flow.prefill_tokens += request.uncached
        light: set[int] = set()
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
