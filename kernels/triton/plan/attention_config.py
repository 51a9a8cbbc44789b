"""The tiles of the attention kernel (rows, columns, warps, blocks in flight) by shape and device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch

from ramify.kernels.triton.tiles import launch

CHUNK = 512
"""Positions of one state in deterministic plans: 4k tokens of 8 KV heads make 64 programs."""
GRAIN = 128
"""In plans that are not deterministic, parts begin at multiples of GRAIN positions. The number of columns of
every tile divides GRAIN."""

_BLOCK_BYTES = 16384
"""Bytes of a block of keys."""
_RESERVE = 6144
"""Shared memory left for the compiler's own use."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the kernel; each tile is compiled on its own.

    rows : query rows; a row is one query head of one token
    columns : positions of a block of keys and values, at least 16
    warps : of 32 threads
    depth : blocks of keys and values in flight while another block is computed
    """

    rows: int
    columns: int
    warps: int
    depth: int

    @property
    def stages(self) -> int:
        """Triton's pipeline stages: two for each block in flight, for the page table and for the block."""
        return 2 * self.depth + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that a plan needs. Rates are what attention is assumed to reach
    (`figures_of`); the defaults are an H100's.

    processors : multiprocessors
    shared_bytes : of shared memory for a program
    memory, cache : bytes a second from memory, and from the L2 cache for repeated reads
    cache_bytes : repeated reads of at most this size come from the cache
    flops : operations a second of attention in tiles of many rows
    """

    processors: int
    shared_bytes: int
    memory: float = 3.0e12
    cache: float = 5.0e12
    cache_bytes: int = 32 << 20
    flops: float = 4.0e14


H100 = Device(132, 232448)
CARDS = {
    80: ("A100", Device(108, 166912)),
    86: ("RTX 3090", Device(82, 101376)),
    89: ("L40S", Device(142, 101376)),
    90: ("H100", H100),
    100: ("B200", Device(148, 232448)),
    120: ("RTX PRO 6000", Device(188, 101376)),
}
"""A card of each compute capability (CUDA programming guide, "compute capabilities"), for compiling ahead."""


def device_of(device: torch.device) -> Device:
    """The properties of a CUDA device. For another device, those of the card in `CARDS` that kernels are
    compiled for; in the interpreter, those of an H100."""
    if device.type == "cuda":
        return _found(device)
    wanted = launch.absent_capability or 90
    return CARDS[max((known for known in CARDS if known <= wanted), default=min(CARDS))][1]


@functools.cache
def _found(device: torch.device) -> Device:
    from triton.runtime import driver

    found = driver.active.utils.get_device_properties(device.index or 0)
    capability = torch.cuda.get_device_capability(device)
    return figures_of(found, capability, torch.cuda.get_device_properties(device).L2_cache_size)


_FLOPS = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
"""Dense 16-bit operations of a multiprocessor a cycle, by compute capability (NVIDIA's white papers)."""
_REACHED = 0.9, 0.4
"""The assumed shares of peak memory bandwidth and of peak tensor-core speed that attention reaches. Not
measured: see docs/kernels.md."""
_CACHE_BYTES = 19
"""The assumed bytes that a multiprocessor reads from the L2 cache in a cycle. Not measured."""


def figures_of(found: Mapping[str, int], capability: tuple[int, int], cache_bytes: int) -> Device:
    """The `Device` of a GPU, from the properties `found` that Triton's driver reports (clock rates in
    kHz)."""
    processors, cycles = found["multiprocessor_count"], 1e3 * found["sm_clock_rate"]
    memory = 2e3 * found["mem_clock_rate"] * found["mem_bus_width"] / 8  # two transfers a cycle
    plain = Device(processors, found["max_shared_mem"])
    if not memory or not cycles:
        return plain  # the driver reports no rates
    number = 10 * capability[0] + capability[1]
    flops = _FLOPS[max((known for known in _FLOPS if known <= number), default=80)]
    return dataclasses.replace(
        plain,
        memory=_REACHED[0] * memory,
        cache=max(_CACHE_BYTES * processors * cycles, _REACHED[0] * memory),
        cache_bytes=cache_bytes * 2 // 3,
        flops=_REACHED[1] * flops * processors * cycles,
    )


def tiles(
    head_dim: int, dtype: torch.dtype, device: Device, *, deterministic: bool = False
) -> tuple[Tile, ...]:
    """Tiles in ascending order of rows. Deterministic plans have a single tile, as bits depend on the tile.

    A block of keys is 16 KiB: fewer columns would mean more softmax reductions, more columns more registers.
    Tensor cores need at least 16 rows, `wgmma` 64. One or two blocks are in flight, as the remaining shared
    memory allows. With two, and 3 programs of 16 rows on a multiprocessor of an H100, 192 KiB are in flight.
    float32 has no exact tensor cores, so its tiles are small enough for the registers.
    """
    block_d = block_dim(head_dim)
    size = dtype.itemsize
    columns = max(16, min(128, _BLOCK_BYTES // (block_d * size)))
    found: list[Tile] = []
    if size == 4:
        sizes: tuple[int, ...] = (16,)
    else:
        sizes = (64,) if deterministic else (16, 64, 128)
    for rows in sizes:
        room = device.shared_bytes - _RESERVE - rows * block_d * size
        buffers = room // (2 * columns * block_d * size)
        if found and not buffers:
            break  # 128 rows of 256 numbers are 64 KiB, and cards have 99 KiB or more
        depth = max(1, min(2, buffers - 1))
        wide = rows == 128 or size == 4 or (deterministic and block_d == 256)
        found.append(Tile(rows, columns, 8 if wide else 4, depth))
    return tuple(found)


def block_dim(head_dim: int) -> int:
    """`head_dim` padded to a power of two, 16 or more. The padding is computed, but not read or written."""
    return max(16, 1 << (head_dim - 1).bit_length())
