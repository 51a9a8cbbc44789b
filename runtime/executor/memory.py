"""The number of KV pages, from the configured size or from the memory that a device has left; the sizes of
steps and of pages that the configuration leaves to the device.

Imports no torch, because `ramify inspect` computes these numbers as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ramify.errors import EngineError, UnsupportedField
from ramify.kernels.arguments.pages import PageDtype
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.model.shape.config import ModelShape

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ramify")


class DeviceDefaults(NamedTuple):
    """Defaults for the options of the same names."""

    max_running: int
    chunk_tokens: int
    page_size: int


ON_CPU = DeviceDefaults(128, 512, 16)
ON_CUDA = (
    (64 << 30, DeviceDefaults(1024, 8192, 64)),
    (32 << 30, DeviceDefaults(512, 8192, 64)),
    (0, DeviceDefaults(256, 2048, 64)),
)
"""(least bytes of device memory, defaults). As in vLLM and SGLang, these are 256 to 1,024 requests and 8,192
tokens a step, or 2,048 tokens on cards of 16 and 24 GiB. On such a card 8,192 tokens of an 8B model would
take over a second: 131 TFLOP at the 121 TFLOP/s of an L4's data sheet."""


def with_defaults(config: EngineConfig, memory: int | None) -> EngineConfig:
    """`config` in which each unset option of `DeviceDefaults` has the device's default.

    memory : bytes of the CUDA device; None: the device is the CPU
    """
    found = ON_CPU
    if memory is not None:
        found = next(defaults for least, defaults in ON_CUDA if memory >= least)
    missing = {name: number for name, number in found._asdict().items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing) if missing else config


def with_defaults_of(config: EngineConfig, device: torch.device) -> EngineConfig:
    """`config` with the defaults of a device of this machine."""
    if device.type != "cuda":
        return with_defaults(config, None)
    import torch

    return with_defaults(config, torch.cuda.get_device_properties(device).total_memory)


COW_PAGES = 2
"""Pages that a lone request may need in addition to those of its tokens: source and destination of a
copy-on-write."""
LEAST_PAGES = COW_PAGES + 1
FRACTION = 0.9
"""Share of a CUDA device's memory that is used by default; the driver and fragmentation need the rest."""
LEAST_STATES = 2
"""Least number of state slots: one for a running request, one for the state that it leaves for later
requests."""
CPU_BYTES = 1 << 30
"""The most memory for KV pages on the CPU, by default."""
CPU_CONTEXTS = 2
CPU_TOKENS = 20_480
"""By default the KV pages on the CPU hold `CPU_CONTEXTS` contexts of the model, or `CPU_TOKENS` tokens if
that is more, within `CPU_BYTES`. More pages would take more memory under any load: pages are kept after their
request has ended, so all pages are touched in the end, and touched pages stay resident."""
_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_MEMINFO = Path("/proc/meminfo")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device.

    total : the device's memory
    used : memory taken before the KV pages are allocated: by weights, the driver and other processes
    workspace : memory that the largest step takes in addition
    """

    total: int
    used: int
    workspace: int


def check_memory(config: EngineConfig, device: torch.device) -> None:
    """Raise `UnsupportedField` for an option that has no meaning on `device`."""
    if config.memory_fraction is not None and device.type != "cuda":
        raise UnsupportedField(
            f"memory_fraction is {config.memory_fraction}, which counts on a CUDA device; this is the CPU.",
            field="memory_fraction",
            remedy="Give kv_memory_gb, in GiB.",
        )


def pages_in(
    config: EngineConfig,
    model: ModelShape,
    dtype: PageDtype,
    device: torch.device,
    draft: ModelShape | None = None,
) -> int | None:
    """The number of pages by `config`; None if the memory left on the CUDA device decides.

    A page holds KV of `model` and, if given, of the draft model of shape `draft`.
    """
    if config.num_pages is not None:
        return enough(config.num_pages)
    assert config.page_size is not None
    size = page_bytes(model, config.page_size, dtype, draft)
    if config.kv_memory_gb is not None:
        return enough(int(config.kv_memory_gb * 2**30) // size)
    if device.type != "cpu":
        return None
    tokens = max(CPU_TOKENS, CPU_CONTEXTS * model.context_length)
    return enough(min(CPU_BYTES // size, -(-tokens // config.page_size)))


def states_in(config: EngineConfig, model: ModelShape, kv_bytes: int, device: torch.device) -> int:
    """The number of slots for states, beside KV pages of `kv_bytes`; 0 for a model without states.

    By default states take as much memory as KV pages. On the CPU states take more, up to `CPU_BYTES`, if one
    slot for each of `max_running` requests needs more: with a short context the KV pages are small.

    Raises `EngineError` if the slots are too few for any request.
    """
    if model.states is None:
        return 0
    if config.num_states is not None:
        return config.num_states
    if config.state_memory_gb is None:
        most = config.max_running or ON_CPU.max_running
        running = min(most, CPU_BYTES // model.states.bytes) if device.type == "cpu" else 0
        return max(LEAST_STATES, running, kv_bytes // model.states.bytes)
    slots = int(config.state_memory_gb * 2**30) // model.states.bytes
    if slots < LEAST_STATES:
        raise EngineError(
            f"state_memory_gb is {config.state_memory_gb:g}, which holds {slots} states of"
            f" {model.states.bytes / 2**20:.1f} MiB; at least {LEAST_STATES} are needed.",
            remedy="Give the engine a larger state_memory_gb.",
        )
    return slots


def check_states(config: EngineConfig, model: ModelShape) -> EngineConfig:
    """`config` without the options that linear attention states rule out.

    Raises `UnsupportedField` if such an option was asked for, or if options of states are set for a model
    without states.
    """
    if model.states is None:
        given = [name for name in ("num_states", "state_memory_gb") if getattr(config, name) is not None]
        if given:
            raise UnsupportedField(
                f"{given[0]} is set; {model.family} has no linear attention layers, and no states.",
                field=given[0],
                remedy="Leave it out.",
            )
        return config
    if config.overlap:
        raise UnsupportedField(
            f"overlap is set; {model.family} has linear attention layers, and its state would have to go back"
            " behind a token that ends a request.",
            field="overlap",
            remedy="Leave it out.",
        )
    log.info("%s has states: overlap is off", model.family)
    return dataclasses.replace(config, overlap=False)


def enough(num_pages: int) -> int:
    """Return `num_pages`. Raises `EngineError` if it is too small for any request."""
    if num_pages < LEAST_PAGES:
        raise EngineError(
            f"The KV memory holds {num_pages} pages; at least {LEAST_PAGES} are needed.",
            remedy="Give the engine a larger kv_memory_gb or num_pages.",
        )
    return num_pages


def check_host(config: EngineConfig, kv_bytes: int, state_bytes: int) -> None:
    """Raise `EngineError` if KV pages and states on the CPU are larger than the host's memory."""
    total = host_memory()
    if kv_bytes + state_bytes <= total:
        return
    names = ("kv_memory_gb", "num_pages") if kv_bytes >= state_bytes else ("state_memory_gb", "num_states")
    size, count = names
    name = size if getattr(config, count) is None else count
    free = free_host_memory()
    raise EngineError(
        f"{name} is {getattr(config, name)}: KV pages take {_gib(kv_bytes)} and states {_gib(state_bytes)}; "
        f"this machine has {_gib(total)}, of which {_gib(free)} are free.",
        remedy=f"Give the engine a smaller {name}, or leave it out.",
    )


def host_memory() -> int:
    """Bytes of memory of this host, or the limit of its container if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUPS:
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total


def free_host_memory() -> int:
    """Bytes that can be allocated without swapping; `host_memory` if the system does not report them."""
    total = host_memory()
    text = _MEMINFO.read_text() if _MEMINFO.is_file() else ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return total if found is None else min(total, int(found[1]) * 1024)


@contextlib.contextmanager
def fitting(what: str, device: torch.device) -> Iterator[None]:
    """Context, in which `what` is allocated on `device`, that turns an out-of-memory error into `EngineError`
    with figures."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise EngineError(
            f"{what} do not fit the device's memory: of {_gib(total)} there were {_gib(free)} left when more "
            "were needed.",
            remedy="Give it a smaller model, fewer KV pages, or free the device's memory.",
        ) from error


def pages_left(memory: DeviceMemory, fraction: float, page: int) -> int:
    """The number of pages of `page` bytes that fit into `fraction` of the device's memory beside its other
    uses. Room is left for one more page, the padding page. Raises `EngineError`, with the figures, if fewer
    than `LEAST_PAGES` fit.
    """
    room = int(memory.total * fraction) - memory.used - memory.workspace
    pages = room // page - 1
    if pages >= LEAST_PAGES:
        return pages
    needed = memory.used + memory.workspace + (LEAST_PAGES + 1) * page
    figures = (
        f"{_gib(memory.used)} are taken by weights and others, a step needs {_gib(memory.workspace)}, and "
        f"{LEAST_PAGES + 1} KV pages {_gib((LEAST_PAGES + 1) * page)}: together {_gib(needed)}. "
        f"memory_fraction {fraction:g} of the device's {_gib(memory.total)} allows "
        f"{_gib(int(memory.total * fraction))}."
    )
    remedy = "Give it a smaller model, smaller chunk_tokens or max_running, or free the device's memory."
    if needed <= memory.total:
        remedy = f"A memory_fraction of {-(-1000 * needed // memory.total) / 1000:g} would do. {remedy}"
    raise EngineError(f"The model does not fit the device's memory: {figures}", remedy=remedy)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
