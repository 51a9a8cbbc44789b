"""The replicas that Ray Serve lists, as its router hears of them and the fleet needs to know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

Listener = Callable[[list[str]], object]


class ListedReplicas:
    """Names of replicas, told to one listener. Any thread may call: Serve's router has its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._listener: Listener | None = None
        self._needed: frozenset[str] = frozenset()

    def listen(self, listener: Listener) -> None:
        """Call `listener` with the names now, and again at each change, in order. It calls nothing here."""
        with self._lock:
            self._listener = listener
            listener(list(self._names))

    def update(self, names: list[str]) -> None:
        with self._lock:
            self._names = names
            if self._listener is not None:
                self._listener(list(names))

    def need(self, names: Collection[str]) -> None:
        """Calls may name these although Serve has stopped listing them: they drain."""
        self._needed = frozenset(names)

    def kept(self, before: Collection[Any], names: Collection[str]) -> list[Any]:
        """Those of the replicas `before` that are needed and not in `names`."""
        needed = self._needed
        return [one for one in before if name_of(one) in needed and name_of(one) not in names]


here = ListedReplicas()
"""Of this process: a frontend of Ray Serve's is alone in its process."""


class ReplicaGone(Exception):
    """The replica that a call names has ended."""


def name_of(replica: Any) -> str:
    """The name of one of Ray Serve's `RunningReplica`."""
    return str(replica.replica_id.unique_id)


def choose(name: str, candidates: Sequence[Any]) -> Any | None:
    """The candidate of this name; None where there is none."""
    return next((one for one in candidates if name_of(one) == name), None)
