"""Quarantine: requests that may be what kills an engine core go on one at a time, apart from others.

deaths 1, 2     the requests of the engine core go on at once, together with others
then            each one that was in flight at both, and had not gone on in between, is a suspect
one at a time   a suspect runs alone until it has gone on by `PROGRESS` tokens, or has ended
a death there   is counted against it alone; at the second one it fails
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from ramify.errors import WorkerDied
from ramify.messages import Generate
from ramify.runtime.faults import unsendable
from ramify.runtime.frontend.output_queue import PROGRESS, OutputQueue

log = logging.getLogger("ramify")


class Quarantine:
    """The suspects. One is sent at a time, by `send_alone`; `end_alone` is called when none is left.

    From a `send_alone` to `end_alone`, the engine core that has the suspect gets no request but suspects.
    """

    def __init__(self, send_alone: Callable[[Generate], None], end_alone: Callable[[], None]) -> None:
        self._send_alone = send_alone
        self._end_alone = end_alone
        self._waiting: deque[OutputQueue] = deque()
        self._probe: OutputQueue | None = None
        self._until = 0

    def died(self, outputs: Iterable[OutputQueue], error: WorkerDied) -> bool:
        """An engine core has died that had these requests. Returns whether one that ran alone is to blame."""
        found = list(outputs)
        probe = self._probe if self._probe in found else None
        for output in found if probe is None else [probe]:
            output.count_death(error, alone=probe is not None)
        return probe is not None

    def add_suspects(self, outputs: Iterable[OutputQueue]) -> None:
        """Queue suspects to run singly; the interrupted one is the first again."""
        for output in outputs:
            if output is self._probe:
                self._probe = None
                self._waiting.appendleft(output)
            elif output not in self._waiting:
                self._waiting.append(output)
        self.send_next()

    def waits(self, output: OutputQueue) -> bool:
        """Whether the request waits here to be sent."""
        return any(output is waiting for waiting in self._waiting)

    def send_next(self) -> None:
        """Send the next suspect if the one that runs has ended or has gone on."""
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
