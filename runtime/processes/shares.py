"""Shares of this machine: the cores of each replica, and on CUDA its GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
from pathlib import Path

from ramify.errors import UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.cores import bind, usable_cores

log = logging.getLogger("ramify")

_TOPOLOGY = Path("/sys/devices/system/cpu")
_NVIDIA = Path("/dev/nvidiactl")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The cores of a replica, and its GPUs as a value for CUDA_VISIBLE_DEVICES, one for each rank. If `gpu`
    is None (on the CPU, and for the whole machine), the parent's value stays."""

    cores: tuple[int, ...]
    gpu: str | None = None

    def env(self) -> dict[str, str]:
        """Environment variables that the replica's processes get in addition to the parent's."""
        return {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}

    def bind(self, pid: int) -> None:
        """Keep a process that has just been started, and its threads and children, on the cores."""
        with contextlib.suppress(ProcessLookupError):  # it has died, which its supervisor notices
            bind(pid, self.cores)

    def of_ranks(self, count: int) -> list[Share]:
        """The share's cores divided among the ranks of a replica."""
        return [Share(own, self.gpu) for own in split_cores(list(self.cores), count, "ranks")]


def whole() -> Share:
    """The share of everything that this process may use."""
    return Share(tuple(_by_topology(usable_cores())))


def shares(config: EngineConfig) -> list[Share]:
    """The shares of the replicas that the engine starts with.

    Raises `UnsupportedField` if there are not enough GPUs.
    """
    count = config.replicas
    cores = split_cores(list(whole().cores), count, "replicas")
    gpus = _gpus(config)
    if not gpus and config.device != "cuda":
        return [Share(own) for own in cores]
    ranks = config.tensor_parallel
    if len(gpus) < count * ranks:
        each = "one" if ranks == 1 else f"{ranks}, one for each rank of tensor_parallel"
        raise UnsupportedField(
            f"replicas is {count}; this process can use {len(gpus)} GPUs, and each replica needs {each}.",
            field="replicas",
            remedy="Ask for as many replicas as there are GPUs, or for device='cpu'."
            if ranks == 1
            else f"Ask for at most {len(gpus) // ranks} replicas, for fewer ranks, or for device='cpu'.",
        )
    of_replicas = (gpus[start : start + ranks] for start in range(0, count * ranks, ranks))
    return [Share(own, ",".join(some)) for own, some in zip(cores, of_replicas, strict=True)]


def share_of(config: EngineConfig, index: int) -> Share:
    """The share of replica number `index`, whether the engine starts with this replica or adds it later.

    An added replica gets the next GPU. On the CPU it shares cores with others, as the shares of running
    replicas stay: it gets the last of `index` + 1 parts of the cores.

    Raises `UnsupportedField` if every GPU or core has a replica.
    """
    if index < config.replicas:
        return shares(config)[index]
    if index >= (cores := len(usable_cores())):
        raise UnsupportedField(
            f"There are {index} replicas, and this process can use {cores} cores.",
            field="replicas",
            remedy="Drain a replica first, or give this process more cores and start it again.",
        )
    share = shares(dataclasses.replace(config, replicas=index + 1))[index]
    if share.gpu is None:
        log.warning("replica %d shares cores with others: each is slower than alone", index)
    return share


def split_cores(cores: list[int], count: int, what: str) -> list[tuple[int, ...]]:
    """`cores` divided into `count` runs of neighbouring cores, of sizes as equal as possible. `what` names
    the parts in the log.

    If there are fewer cores than parts, each part gets one core, and parts share cores.
    """
    if len(cores) < count:
        log.warning("%d %s share %d cores: each is slower than one alone", count, what, len(cores))
        return [(cores[index % len(cores)],) for index in range(count)]
    ends = [len(cores) * index // count for index in range(count + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(ends)]


def _by_topology(cores: list[int]) -> list[int]:
    """`cores` in an order that puts hyperthreads of one core next to each other, and cores of one package."""

    def place(core: int) -> tuple[int, ...]:
        folder = _TOPOLOGY / f"cpu{core}" / "topology"
        try:
            names = ("physical_package_id", "core_id")
            return (*(int((folder / name).read_text()) for name in names), core)
        except (OSError, ValueError):
            return (0, core, core)

    return sorted(cores, key=place)


def on_cpu(config: EngineConfig) -> bool:
    """Whether it is certain without torch that replicas run on the CPU. If False, only torch can tell whether
    a GPU is usable."""
    return config.device == "cpu" or (config.device == "auto" and not _NVIDIA.exists())


def _gpus(config: EngineConfig) -> list[str]:
    """The usable GPUs, as CUDA_VISIBLE_DEVICES names them; empty if replicas run on the CPU.

    Imports torch only if there may be a GPU.
    """
    if on_cpu(config):
        return []
    import torch

    count = torch.cuda.device_count()  # needs no context on a device
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(index) for index in range(count)]
