"""The KV pages of all layers, and the slots that hold the states of linear attention layers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ramify.kernels.arguments.pages import PageDtype, row_bytes
from ramify.runtime.config import EngineConfig
from ramify.runtime.model.shape.config import ModelShape, StateShape

if TYPE_CHECKING:
    import torch


HUGE = 2 << 20
"""Bytes of a huge page of Linux on x86; on other processors a multiple of the page size as well."""


class KvPool:
    """`k` and `v`: (layers, num_pages + 1, kv_heads, page_size, head_dim) in `page_dtype`, which is `dtype`,
    float8_e4m3fn or int8. int8 rows have head_dim + 4 bytes: the codes, then their float32 scale
    (`kernels.reference.kv_store.quantise_rows`).

    The part of a page that belongs to one head is contiguous, so that attention reads this part without
    strides over other heads. No request is given the last page (`padding_page`): padded steps write the KV of
    their padding to this page.
    """

    def __init__(
        self,
        model: ModelShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_dtype: torch.dtype | None = None,
    ) -> None:
        import torch  # not above: `page_bytes` is asked before torch is needed

        kept = page_dtype or dtype
        row = row_bytes(model.head_dim, kept) // kept.itemsize
        shape = (model.num_layers, num_pages + 1, model.num_kv_heads, page_size, row)
        # Pages that no request has used take no physical memory: on the CPU in steps of 2 MiB a layer, for
        # keys and for values. No row is read before it is written.
        if torch.device(device).type == "cpu":
            self.k, self.v = (_in_huge_pages(shape, kept) for _ in range(2))
        else:
            self.k, self.v = (torch.empty(shape, dtype=kept, device=device) for _ in range(2))
        self.dtype = dtype
        """The dtype of new keys and values, and of queries."""
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def padding_page(self) -> int:
        return self.num_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.k[:, 0].nbytes

    def read_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """The bytes of `pages` in the host's memory: (pages, page_bytes) uint8, the keys of all layers before
        the values.

        On a CUDA device, waits for all passes launched before.
        """
        import torch

        index = torch.tensor(pages, dtype=torch.int64, device=self.k.device)
        read = torch.cat(
            [each.index_select(1, index).transpose(0, 1).flatten(1) for each in self._bytes()], 1
        )
        if read.device.type != "cuda":
            return read
        host = torch.empty(read.shape, dtype=read.dtype, pin_memory=True)
        return host.copy_(read)

    def write_pages(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill `pages` with `data`, the result of `read_pages` on a pool of the same page shape and
        dtypes."""
        import torch

        index = torch.tensor(pages, dtype=torch.int64, device=self.k.device)
        if self.k.device.type == "cuda":
            data = data.pin_memory().to(self.k.device)
        # index_copy_ moves an element at a time: 3.8 GB/s in words, 1 GB/s in bytes.
        word = torch.uint8 if self.page_bytes % (16 * len(self.k)) else torch.int64
        for pool, part in zip(self._bytes(), data.view(word).chunk(2, dim=1), strict=True):
            pool.view(word).index_copy_(1, index, part.reshape(len(part), len(pool), -1).transpose(0, 1))

    def return_memory(self, pages: Sequence[int]) -> None:
        """Return the memory of `pages`, whose contents are lost, to the system: on the CPU, in whole huge
        pages of `HUGE` bytes. So runs of neighbours are returned, and a single page is not."""
        import numpy as np

        ids = np.sort(np.array(pages))
        cuts = np.flatnonzero(np.diff(ids) != 1)
        runs = np.stack([ids[np.append(0, cuts + 1)], ids[np.append(cuts, len(ids) - 1)] + 1], axis=1)
        for pool in (self.k, self.v):
            size = pool.stride(1) * pool.itemsize
            long = runs[(runs[:, 1] - runs[:, 0]) * size >= HUGE] * size
            for base in (layer.data_ptr() for layer in pool):
                for start, stop in long.tolist():
                    first, last = -(-(base + start) // HUGE) * HUGE, (base + stop) // HUGE * HUGE
                    if last > first and _libc().madvise(first, last - first, mmap.MADV_DONTNEED):
                        raise OSError(ctypes.get_errno(), "madvise")

    def _bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`k` and `v` as (layers, num_pages + 1, bytes of the page in a layer) uint8."""
        import torch

        k, v = (each.flatten(2).view(torch.uint8) for each in (self.k, self.v))
        return k, v


def page_dtype_of(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV pages of a model of `dtype`."""
    import torch

    return {"auto": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[config.kv_cache_dtype]


def pool_for(
    config: EngineConfig, shape: ModelShape, pages: int, dtype: torch.dtype, device: torch.device
) -> KvPool:
    """A pool with the page size and the page dtype of `config`. New keys and values have `dtype`."""
    size, kept = config.page_size, page_dtype_of(config, dtype)
    assert size is not None
    return KvPool(shape, num_pages=pages, page_size=size, dtype=dtype, device=device, page_dtype=kept)


def page_bytes(model: ModelShape, page_size: int, dtype: PageDtype, draft: ModelShape | None = None) -> int:
    """Bytes of one page of `dtype` over all layers, keys and values: for `model`, and for `draft` if
    given."""
    if draft is not None:
        return page_bytes(model, page_size, dtype) + page_bytes(draft, page_size, dtype)
    return 2 * model.num_layers * model.num_kv_heads * page_size * row_bytes(model.head_dim, dtype)


def _in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the CPU's memory, in huge pages of 2 MiB if Linux has them.

    KV pages lie scattered. With memory pages of 4 KiB nearly each read of a KV page misses the TLB: decodes
    of 1,000 tokens take 1.3 times as long.
    """
    import torch

    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


class StepStates(NamedTuple):
    """The states of a step's sequences, on the pool's device.

    slots : (S,) int64; query_starts : (S + 1,) int32; kv_lens : (S,) int32, as in `ForwardBatch`
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor


class StatePool:
    """The states in all slots, float32: `conv` (layers, num_slots + 1, channels, width - 1) and
    `recurrent` (layers, num_slots + 1, heads, key_dim, value_dim).

    No request is given the last slot (`padding_slot`): padded steps write their padding's state to it.
    """

    def __init__(self, shape: StateShape, *, num_slots: int, device: torch.device | str = "cpu") -> None:
        import torch

        # Not zeroed: a slot that no request has used takes no physical memory, and a sequence begins from
        # zeros whatever its slot holds.
        rows = shape.layers, num_slots + 1
        self.conv = torch.empty((*rows, *shape.conv), dtype=torch.float32, device=device)
        self.recurrent = torch.empty((*rows, *shape.recurrent), dtype=torch.float32, device=device)
        self.num_slots = num_slots

    @property
    def padding_slot(self) -> int:
        return self.num_slots

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots in place, all at once: ``(source, destination)`` pairs, no destination twice.

        A slot may be a source and a destination: all sources are read before any slot is written.
        """
        import numpy as np

        from ramify.kernels.machine.transfers import to_device

        if not copies:
            return
        sources, destinations = (
            to_device(np.array(slots, np.int64), self.conv.device) for slots in zip(*copies, strict=True)
        )
        for states in (self.conv, self.recurrent):
            if len(copies) == 1:  # without memory for a copy between
                states[:, copies[0][1]] = states[:, copies[0][0]]
            else:
                states.index_copy_(1, destinations, states.index_select(1, sources))
