"""A process as one rank of a model: the ranks meet here, and the first rank leads them through every pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ramify.errors import EngineError
from ramify.messages import Message
from ramify.runtime.parallel.group import RankGroup
from ramify.runtime.processes.ipc import Outbox, Sockets


class Ranks:
    """The process as rank `index` of `count`. The first rank sends every pass to the others."""

    def __init__(self, index: int, count: int, sockets: Sockets) -> None:
        self.index, self.count = index, count
        self._folder: Path = sockets.directory
        others = range(1, count) if index == 0 else ()
        self._outboxes = [Outbox(sockets.rank(other)) for other in others]
        self._group: RankGroup | None = None
        self._in_step = True

    def connect(self, device: torch.device, *, deterministic: bool) -> None:
        """Join the group, once all ranks have loaded their weights."""
        self._group = RankGroup(self._folder, self.index, self.count, device, ordered=deterministic)

    @property
    def group(self) -> RankGroup:
        assert self._group is not None, "connect was not called"
        return self._group

    def sum(self, term: Tensor) -> Tensor:
        return self.group.sum(term)

    @contextlib.contextmanager
    def leading(self, order: Message, next_ids: Tensor | None) -> Iterator[None]:
        """Context in which the first rank runs a pass. The other ranks get `order`, and `next_ids` through
        the group.

        After an error in the context, the other ranks may wait for sums that never come. From then on `check`
        raises.
        """
        self.check()
        self._in_step = False
        for outbox in self._outboxes:
            outbox.send(order)
        if next_ids is not None:
            self.group.from_first(next_ids)
        yield
        self._in_step = True

    def check(self) -> None:
        """Raise `EngineError` if a pass has failed: only a new engine core brings the ranks together
        again."""
        if not self._in_step:
            raise EngineError("A pass has failed on this rank, and the other ranks are out of step with it.")
