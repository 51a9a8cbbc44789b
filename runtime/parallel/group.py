"""The sums over the ranks, by torch.distributed: gloo on the CPU, NCCL on CUDA devices."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ramify.errors import EngineError

START_S = 1800.0
"""Seconds that ranks wait for each other to load their weights."""
STEP_S = 120.0
"""Seconds that ranks wait for each other in a pass. If a rank's process ends, the supervisor notices at
once."""


class RankGroup:
    """Rank `index` of `count` ranks, which meet through a file in `folder`. The folder is private to the
    engine core. The constructor waits for the other ranks.

    ordered : whether terms are summed in the order of the ranks, as they always are on the CPU. Then the
        bits of a sum depend on its terms alone. The bits of NCCL's own sum also depend on the place in the
        tensor, and so on the batch.
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
        """The first rank's `tensor`, on every rank."""
        dist.broadcast(tensor, 0)
        return tensor

    def least(self, number: int) -> int:
        """The smallest `number` of all ranks."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)
