"""The tiles of the attention kernel: rows, columns, warps and blocks in flight, by shape and device."""

from __future__ import annotations

import dataclasses
import functools

import torch

CHUNK = 512
"""Positions that the deterministic form reduces on their own: 4k tokens of 8 KV heads make 64 programs."""
GRAIN = 128
"""Parts of other plans begin at multiples of it, which are multiples of every tile's columns."""

_BLOCK_BYTES = 16384
_RESERVE = 6144


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """One compiled form of the kernel.

    rows : query rows, a row being one query head of one token
    columns : positions of a block of keys and values, at least 16
    warps : of 32 threads
    depth : blocks of keys and values on their way while one is computed
    """

    rows: int
    columns: int
    warps: int
    depth: int

    @property
    def stages(self) -> int:
        """Triton spends one stage on the page table and one on the block, for each block in flight."""
        return 2 * self.depth + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """What the plan needs to know of a device: multiprocessors, and bytes of shared memory a program."""

    processors: int
    shared_bytes: int


H100 = Device(132, 232448)


@functools.cache
def device_of(device: torch.device) -> Device:
    """The CUDA device's own figures; an H100's for the interpreter, so that it runs what an H100 would."""
    if device.type != "cuda":
        return H100
    from triton.runtime import driver

    found = driver.active.utils.get_device_properties(device.index or 0)
    return Device(found["multiprocessor_count"], found["max_shared_mem"])


def tiles(
    head_dim: int, dtype: torch.dtype, device: Device, *, deterministic: bool = False
) -> tuple[Tile, ...]:
    """Tiles of ascending rows; the deterministic form has one for all, so that one row has one program.

    A block of keys is 16 KiB: fewer columns mean more trips through the softmax's reductions, more columns
    more registers. Tensor cores want 16 rows at least, `wgmma` 64. Blocks in flight fill the shared memory
    that remains, two being enough: 3 programs of 16 rows then share a multiprocessor of an H100, so 190 KB
    are on their way, and 40 KB would cover the latency of its memory. float32 has no exact tensor cores:
    its tiles stay small enough for the registers.
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
    """`head_dim` padded to what a tile can have; the padding is computed with but never read or written."""
    return max(16, 1 << (head_dim - 1).bit_length())
