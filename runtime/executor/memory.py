"""The number of KV pages: from the size that was asked for, or from the memory that a device has left."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from ramify.errors import EngineError, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.model.config import ModelShape

COW_PAGES = 2
"""Pages that a lone request may need beyond those of its tokens: source and destination of a
copy-on-write."""
LEAST_PAGES = COW_PAGES + 1
FRACTION = 0.9
"""Share of a CUDA device's memory that is used by default; the driver and fragmentation need the rest."""
CPU_BYTES = 1 << 30
"""The most memory for KV pages on the CPU, by default."""
CPU_CONTEXTS = 2
CPU_TOKENS = 20_480
"""KV pages on the CPU hold this number of the model's longest contexts, or of tokens if that is more. Pages
are kept after their request has ended, so any load touches all of them in the end, and touched pages stay
resident."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device.

    total : its memory
    used : taken before there are pages, by weights, the driver and other processes
    workspace : taken by the largest step beside these
    """

    total: int
    used: int
    workspace: int


def check_memory(config: EngineConfig, device: torch.device) -> None:
    """Raises `UnsupportedField` for an option that has no meaning on `device`."""
    if config.memory_fraction is not None and device.type != "cuda":
        raise UnsupportedField(
            f"memory_fraction is {config.memory_fraction}, which counts on a CUDA device; this is the CPU.",
            field="memory_fraction",
            remedy="Give kv_memory_gb, in GiB.",
        )


def pages_in(config: EngineConfig, model: ModelShape, dtype: torch.dtype, device: torch.device) -> int | None:
    """The number of pages by the configuration; None where the memory left on the device decides."""
    if config.num_pages is not None:
        return enough(config.num_pages)
    size = page_bytes(model, config.page_size, dtype)
    if config.kv_memory_gb is not None:
        return enough(int(config.kv_memory_gb * 2**30) // size)
    if device.type != "cpu":
        return None
    tokens = max(CPU_TOKENS, CPU_CONTEXTS * model.context_length)
    return enough(min(CPU_BYTES // size, -(-tokens // config.page_size)))


def enough(num_pages: int) -> int:
    """`num_pages`. Raises `EngineError` where no request could run on that few."""
    if num_pages < LEAST_PAGES:
        raise EngineError(
            f"The KV memory holds {num_pages} pages; at least {LEAST_PAGES} are needed.",
            remedy="Give the engine a larger kv_memory_gb or num_pages.",
        )
    return num_pages


@contextlib.contextmanager
def fitting(what: str, device: torch.device) -> Iterator[None]:
    """Turns an out-of-memory error while `what` is allocated on `device` into `EngineError` with figures."""
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
    """The number of pages of `page` bytes that fit into `fraction` of the memory beside what is used.

    One more page is allocated for the padding of decoding steps. Raises `EngineError` with the figures where
    fewer than `LEAST_PAGES` fit.
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
