"""A process as one rank of a model: the ranks meet here, and the first rank leads them through every pass.

The ranks sum by torch.distributed: gloo on the CPU, NCCL on CUDA devices.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ramify.errors import EngineError
from ramify.messages import Message
from ramify.runtime.processes.ipc import Outbox, Sockets

START_S = 1800.0
"""Seconds that ranks wait for each other to load their weights."""
STEP_S = 120.0
"""Seconds that ranks wait for each other in a pass. If a rank's process ends, the supervisor notices at
once."""


class RankGroup:
    """Rank `index` of `count` ranks, which meet through a file in `folder`. The folder is private to the
    engine core. The constructor waits for the other ranks.

    ordered : whether terms are summed in the order of the ranks, as is always done on the CPU. The bits of an
    ordered sum depend on its terms alone. The bits of NCCL's sum also depend on the place in the tensor, and
    so on the batch.
    """

    def __init__(self, folder: Path, index: int, count: int, device: torch.device, *, ordered: bool) -> None:
        if not dist.is_available():
            raise EngineError("tensor_parallel needs torch.distributed, which this torch was built without.")
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, loopback)  # all ranks are on this machine
        self.count = count
        self._device = device
        self._ordered = ordered or device.type != "cuda"
        store = dist.FileStore(str(folder / "ranks"), count)  # type: ignore[attr-defined]
        store.set(f"loaded-{index}", "1")
        start = datetime.timedelta(seconds=START_S)
        store.wait([f"loaded-{each}" for each in range(count)], start)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=index,
            world_size=count,
            timeout=datetime.timedelta(seconds=STEP_S),
        )

    def sum(self, term: Tensor) -> Tensor:
        """The sum of all ranks' terms, in the term's dtype: the same bits on every rank."""
        if not self._ordered:
            dist.all_reduce(term)
            return term
        terms = term.new_empty((self.count, *term.shape))
        dist.all_gather(list(terms), term.contiguous())
        total = terms[0].float()
        for other in terms[1:]:
            total += other
        return total.to(term.dtype)

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first rank's `tensor`, broadcast into `tensor` of every other rank."""
        dist.broadcast(tensor, 0)
        return tensor

    def least(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)


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
