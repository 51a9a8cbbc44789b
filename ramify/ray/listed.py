"""The list of replicas that Ray Serve has. Serve's router updates the list, and the fleet listens to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

Listener = Callable[[list[str]], object]


class ListedReplicas:
    """A list of replica names, which is passed to one listener.

    It is thread-safe, as Serve's router has a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._listener: Listener | None = None
        self._needed: frozenset[str] = frozenset()

    def listen(self, listener: Listener) -> None:
        """Call `listener` with the names now, and again after each change, in order.

        The listener must not call this object.
        """
        with self._lock:
            self._listener = listener
            listener(list(self._names))

    def update(self, names: list[str]) -> None:
        with self._lock:
            self._names = names
            if self._listener is not None:
                self._listener(list(names))

    def need(self, names: Collection[str]) -> None:
        """Set the names of the fleet's replicas.

        A replica that drains is needed for further calls, although Serve no longer lists it.
        """
        self._needed = frozenset(names)

    def kept(self, before: Collection[Any], names: Collection[str]) -> list[Any]:
        """The replicas in `before` that the fleet still needs and that are not in `names`."""
        needed = self._needed
        return [one for one in before if name_of(one) in needed and name_of(one) not in names]


here = ListedReplicas()
"""The list of this process. One is enough, as Ray Serve gives each frontend a process of its own."""


class ReplicaGone(Exception):
    """The replica that a call names has ended."""


def name_of(replica: Any) -> str:
    """Name of a `RunningReplica` of Ray Serve."""
    return str(replica.replica_id.unique_id)


def choose(name: str, candidates: Sequence[Any]) -> Any | None:
    """The candidate called `name`; None if there is none."""
    return next((one for one in candidates if name_of(one) == name), None)
