"""The number of KV pages, from the configured size or from the memory that a device has left; the sizes of
steps and of pages that the configuration leaves to the device.

Imports no torch, because `ramify inspect` computes these numbers as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, get_type_hints

from ramify.errors import EngineError, UnsupportedField
from ramify.kernels.arguments.pages import PageDtype
from ramify.model_info import KvRoom
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.host_memory import host_memory
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
"""The most memory for KV pages on the CPU that is kept by default, however long no request uses it."""
CPU_CONTEXTS = 2
CPU_TOKENS = 20_480
"""By default the KV pages on the CPU hold `CPU_CONTEXTS` contexts of the model, or `CPU_TOKENS` tokens if
that is more, as far as free memory goes."""


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


class PageBudget(NamedTuple):
    """Numbers of KV pages.

    pages : pages that requests may use. On the CPU a page takes no memory before a request uses it.
    kept : pages whose memory is kept for ever. The memory of others is returned to the system when no request
        has used them for some time, or when the machine needs it (`ramify.runtime.scheduler.residency`).
    bound : the reason why there are no more pages: an option, the model's context, or free memory
    """

    pages: int
    kept: int
    bound: Literal["option", "context", "memory"]


def free_for_pages(total: int, free: int) -> int:
    """Bytes that KV pages may take, of `free` bytes of the host's `total`: a share is left to others
    (`FRACTION`)."""
    return max(0, free - int((1 - FRACTION) * total))


def pages_in(
    config: EngineConfig,
    model: ModelShape,
    dtype: PageDtype,
    device: torch.device,
    draft: ModelShape | None = None,
    *,
    available: int = 0,
) -> PageBudget | None:
    """The pages by `config`; None if the memory left on the CUDA device decides.

    A page holds KV of `model` and, if given, of the draft model of shape `draft`.

    available : bytes that pages on the CPU may take (`free_for_pages`). Several engines may count the same
        bytes: pages that nobody uses take none, and each engine watches the free memory. Below `CPU_BYTES` it
        is not looked at, so that an engine with little memory still starts.
    """
    assert config.page_size is not None
    size = page_bytes(model, config.page_size, dtype, draft)
    given = config.num_pages
    if given is None and config.kv_memory_gb is not None:
        given = int(config.kv_memory_gb * 2**30) // size
    if given is not None:
        return PageBudget(enough(given), given, "option")
    if device.type != "cpu":
        return None
    tokens = max(CPU_TOKENS, CPU_CONTEXTS * model.context_length)
    wanted = -(-tokens // config.page_size) + COW_PAGES
    # Memory is returned in the process of the scheduler only, not in those of other ranks.
    fitting = max(CPU_BYTES, available if config.tensor_parallel == 1 else 0) // size
    kept = min(wanted, CPU_BYTES // size)
    return PageBudget(enough(min(wanted, fitting)), kept, "context" if wanted <= fitting else "memory")


def room_of(
    config: EngineConfig,
    model: ModelShape,
    dtype: PageDtype,
    device: str,
    budget: PageBudget,
    draft: ModelShape | None = None,
) -> KvRoom:
    """The room of `budget`, for `model` with the context of the engine.

    dtype : of the pages
    device : cpu or cuda
    """
    assert config.page_size is not None
    context, size = model.context_length, page_bytes(model, 1, dtype, draft)
    tokens, kept = ((pages - COW_PAGES) * config.page_size for pages in budget[:2])
    option = "kv_memory_gb" if config.num_pages is None else "num_pages"
    bound = {
        "option": f"as {option} {getattr(config, option)} says",
        "context": "as the context needs",
        "memory": "as the free memory allows",
    }[budget.bound]
    smaller = _smaller(config, size, model, device, draft)
    more = [f"kv_cache_dtype {name} holds {times:.1f} times as many" for name, times in smaller]
    if tokens < context:
        whole = (context + COW_PAGES * config.page_size) * size
        more.insert(0, f"the whole context needs kv_memory_gb {math.ceil(100 * whole / 2**30) / 100:g}")
    text = f"KV memory for {tokens:,} tokens, {tokens / context:.1f} contexts, {bound}: {_gib(tokens * size)}"
    if kept < tokens:
        text += f", of which {_gib(kept * size)} stay when unused"
    remedy = f"give the engine a context_length above {context:,}, if the model can have it"
    if tokens < context:
        remedy = f"give the engine more KV memory ({'; '.join(more)})"
    return KvRoom(
        tokens=tokens,
        kept_tokens=kept,
        bytes_per_token=size,
        bound=budget.bound,
        text="; ".join([text, *more]),
        remedy=remedy,
    )


def _smaller(
    config: EngineConfig, size: int, model: ModelShape, device: str, draft: ModelShape | None
) -> Iterator[tuple[str, float]]:
    """(page dtype, tokens in the memory of one token of `size` bytes) of each dtype of the device that takes
    less."""
    for name in get_args(get_type_hints(EngineConfig)["kv_cache_dtype"]):
        if name == {"cpu": "int8", "cuda": "fp8"}[device] and name != config.kv_cache_dtype:
            one_byte = SimpleNamespace(itemsize=1, is_floating_point=name == "fp8")
            times = size / page_bytes(model, 1, one_byte, draft)
            if times > 1:
                yield name, times


def states_in(config: EngineConfig, model: ModelShape, kv_bytes: int, device: torch.device) -> int:
    """The number of slots for states, beside KV pages of `kv_bytes`; 0 for a model without states.

    By default states take as much memory as KV pages: on the CPU, as the pages that are kept. On the CPU
    states take more, up to `CPU_BYTES`, if one slot for each of `max_running` requests needs more: with a
    short context the KV pages are small.

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
    total, free, _ = host_memory()
    if kv_bytes + state_bytes <= total:
        return
    names = ("kv_memory_gb", "num_pages") if kv_bytes >= state_bytes else ("state_memory_gb", "num_states")
    size, count = names
    name = size if getattr(config, count) is None else count
    raise EngineError(
        f"{name} is {getattr(config, name)}: KV pages take {_gib(kv_bytes)} and states {_gib(state_bytes)}; "
        f"this machine has {_gib(total)}, of which {_gib(free)} are free.",
        remedy=f"Give the engine a smaller {name}, or leave it out.",
    )


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
