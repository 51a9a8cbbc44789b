"""Bytes that a model needs, by its headers, and bytes that are free for one more.

On the CPU a model's packed weights are mapped files, which the system counts as available memory although the
next step reads them. So what is free for a further model is::

    available memory                            12.0 GiB    MemAvailable, within the container's limit
    + resident and no file, of loaded models     1.5        /proc/PID/status: RssAnon + RssShmem
    - needs of loaded and loading models         6.0        weights, KV pages that stay, a workspace
    = free                                       7.5
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ramify.errors import RamifyError
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.memory import CPU_BYTES, FRACTION
from ramify.runtime.host_memory import host_memory
from ramify.runtime.inspect.machine import Machine, this_machine
from ramify.runtime.inspect.refusals import native_shape
from ramify.runtime.inspect.report import WORKSPACE, inspected
from ramify.runtime.inspect.resolve import resolve
from ramify.runtime.model.checkpoint import ModelFiles, splits_of

Free = Callable[[int, Iterable[int]], int]
"""Function of (bytes that loaded and loading models need together, process ids of these models) that returns
the bytes that a further model may need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """Bytes that are set aside for a loaded model. `kv`: KV pages and states when all of them are used, but
    only pages whose memory stays with the engine (`PageBudget.kept`)."""

    weights: int
    kv: int
    workspace: int = WORKSPACE
    context_length: int | None = None
    """Tokens of prompt and output together; None if the files do not tell it."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace

    def __str__(self) -> str:
        return (
            f"{gib(self.total)} (weights {gib(self.weights)}, KV {gib(self.kv)}, workspace"
            f" {gib(self.workspace)})"
        )


def need_of(config: EngineConfig, download: bool) -> Need:
    """The need of `config.model` on this machine, as `ramify inspect` reports it. Blocks: reads headers, and
    fetches the model if `download` allows it. Raises the errors of `resolve`."""
    machine = this_machine(config.device)
    files = resolve(config.model, download=download, weights=config.load_format != "dummy")
    draft = None if config.draft_model is None else resolve(config.draft_model, download=download)
    return need_of_files(config, files, machine, draft)


def need_of_files(
    config: EngineConfig, files: ModelFiles, machine: Machine, draft: ModelFiles | None = None
) -> Need:
    """The need of the model in `files`. If its headers cannot be read, or if it is run by transformers' code,
    which this process does not import: the size of its files, and `CPU_BYTES` for KV pages."""
    try:
        shape, _ = native_shape(files.weights, config.rope_scaling)
        found = None if shape is None else inspected(files, machine, config, draft=draft, chat=False)
    except (RamifyError, OSError):
        found = None
    if found is None:
        paths = splits_of(files.weights) if files.weights.is_file() else files.weights.glob("*.safetensors")
        return Need(sum(path.stat().st_size for path in paths), CPU_BYTES)
    kv = found.kv_kept_tokens * found.kv_bytes_per_token
    if found.state_bytes:  # as `states_in` does
        kv += max(kv, min(CPU_BYTES, found.state_bytes * found.max_running))
    return Need(found.weight_bytes, kv, context_length=found.context_length)


def free_memory(config: EngineConfig) -> Free:
    """The function that says how much memory a further model may need on the device of `config`."""
    machine = this_machine(config.device)
    if machine.device == "cuda":
        most = int((config.memory_fraction or FRACTION) * machine.memory)
        return lambda needed, _: most - needed

    def free(needed: int, pids: Iterable[int]) -> int:
        return host_memory().available + sum(map(_resident, with_children(pids))) - needed

    return free


def with_children(pids: Iterable[int]) -> list[int]:
    """The processes `pids` and all that they have started."""
    found = list(pids)
    for pid in found:  # grows meanwhile
        try:
            files = [*Path(f"/proc/{pid}/task").iterdir()]
            found += [int(child) for file in files for child in (file / "children").read_text().split()]
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    """Bytes of a process that are resident and belong to no file; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(size) * 1024 for size in re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB", text, re.MULTILINE))


def proportional_size(pids: Iterable[int]) -> int:
    """Resident bytes of the processes and their children (PSS: a page that several processes share counts in
    parts). Blocks for some milliseconds for each GiB. 0 if the system does not report it."""
    total = 0
    for pid in with_children(pids):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s*(\d+) kB", text, re.MULTILINE)
        total += 0 if found is None else int(found[1]) * 1024
    return total


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
