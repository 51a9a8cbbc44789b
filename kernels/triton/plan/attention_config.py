"""The tiles of the attention kernel (rows, columns, warps, blocks in flight) by shape and device."""

from __future__ import annotations

import dataclasses
import functools

import torch

CHUNK = 512
"""Positions of one state in deterministic plans: 4k tokens of 8 KV heads make 64 programs."""
GRAIN = 128
"""Parts of other plans begin at multiples of GRAIN, itself a multiple of every tile's columns."""

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
    depth : blocks of keys and values in flight while one is computed
    """

    rows: int
    columns: int
    warps: int
    depth: int

    @property
    def stages(self) -> int:
        """Triton's pipeline stages: for each block in flight one for the page table and one for the block."""
        return 2 * self.depth + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that a plan needs: multiprocessors, and bytes of shared memory a program."""

    processors: int
    shared_bytes: int


H100 = Device(132, 232448)


@functools.cache
def device_of(device: torch.device) -> Device:
    """The properties of a CUDA device; an H100's for the interpreter, which so runs an H100's plans."""
    if device.type != "cuda":
        return H100
    from triton.runtime import driver

    found = driver.active.utils.get_device_properties(device.index or 0)
    return Device(found["multiprocessor_count"], found["max_shared_mem"])


def tiles(
    head_dim: int, dtype: torch.dtype, device: Device, *, deterministic: bool = False
) -> tuple[Tile, ...]:
    """Tiles in ascending order of rows. Deterministic plans have a single tile, as bits depend on the tile.

    A block of keys is 16 KiB: fewer columns mean more softmax reductions, more columns more registers.
    Tensor cores need at least 16 rows, `wgmma` 64. One or two blocks are in flight, as the remaining shared
    memory allows. With two, and 3 programs of 16 rows on a multiprocessor of an H100, 190 KB are in flight;
    40 KB cover the latency of its memory. float32 has no exact tensor cores, so its tiles are small enough
    for the registers.
    """
    block_d = block_dim(head_dim)
    size = dtype.itemsize
    columns = max(16, min(128, _BLOCK_BYTES // (block_d * size)))
    found = []
    if size == 4:
        sizes: tuple[int, ...] = (16,)
    else:
        sizes = (64,) if deterministic else (16, 64, 128)
    for rows in sizes:
        room = device.shared_bytes - _RESERVE - rows * block_d * size
        buffers = room // (2 * columns * block_d * size)
        depth = max(1, min(2, buffers - 1))
        wide = rows == 128 or size == 4 or (deterministic and block_d == 256)
        found.append(Tile(rows, columns, 8 if wide else 4, depth))
    return tuple(found)


def block_dim(head_dim: int) -> int:
    """`head_dim` padded to a power of two, 16 or more. The padding is computed, but not read or written."""
    return max(16, 1 << (head_dim - 1).bit_length())
