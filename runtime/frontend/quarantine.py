"""Quarantine: requests that may be the cause of an engine core's deaths run one at a time, apart from others.

deaths 1, 2     the requests of the engine core are sent again at once, together with others
then            a request that was in flight at both deaths, without progress in between, is a suspect
one at a time   a suspect runs alone until it has produced `PROGRESS` more tokens, or has ended
a death there   counts only for the suspect that ran; after two such deaths that suspect fails
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
    """The queue of suspects. One is sent at a time, by `send_alone`. `end_alone` is called when none is left.

    Between the first `send_alone` and `end_alone`, the engine core that runs the suspects gets no other
    requests.
    """

    def __init__(self, send_alone: Callable[[Generate], None], end_alone: Callable[[], None]) -> None:
        self._send_alone = send_alone
        self._end_alone = end_alone
        self._waiting: deque[OutputQueue] = deque()
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
        """Queue suspects to run one at a time. The one that was interrupted by the death goes first."""
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
        """Send the next suspect, unless one is still running that has not made enough progress."""
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
