"""A cold store in the host's memory, for pages of a CUDA device."""

from __future__ import annotations

import secrets
import time

import numpy as np
import torch

from ramify.radix.cold import ColdIndex, Segment
from ramify.runtime.cold.store import Finished, SegmentWriter


class MemoryStore:
    """Segments in the host's memory. `pinned` memory is copied to the device without another copy between,
    and is allocated in powers of two. The least recently used segments are dropped beyond `most_bytes`."""

    def __init__(self, *, page_size: int, page_bytes: int, most_bytes: int, pinned: bool) -> None:
        self.index = ColdIndex(page_size)
        self.damaged = 0
        self._page_size, self._page_bytes = page_size, page_bytes
        self._most_bytes, self._pinned = most_bytes, pinned
        self.most_pages = most_bytes // (2 * page_bytes if pinned else page_bytes)
        self._data: dict[str, torch.Tensor] = {}
        """Pages of a segment by its name, (pages, page_bytes) uint8; the least recently used one first."""
        self.bytes = 0

    def begin(self, scope: str, ids: np.ndarray, first: int) -> SegmentWriter:
        pages = len(ids) // self._page_size - first
        if pages * self._page_bytes > self._most_bytes:
            raise OSError(f"a segment of {pages} pages is larger than the store")
        return _MemoryWriter(self, Segment(secrets.token_hex(8), scope, ids, first), pages)

    def read(self, segment: Segment, first: int, count: int) -> torch.Tensor:
        if segment.name not in self._data:
            raise FileNotFoundError(segment.name)
        return self._data[segment.name][first - segment.first :][:count]

    def drop(self, segment: Segment) -> None:
        data = self._data.pop(segment.name, None)
        self.bytes -= 0 if data is None else self._size(data)

    def _size(self, data: torch.Tensor) -> int:
        """The bytes that `data` takes."""
        return 1 << (data.nbytes - 1).bit_length() if self._pinned else data.nbytes

    def touch(self, segment: Segment) -> None:
        if segment.name in self._data:
            self._data[segment.name] = self._data.pop(segment.name)

    def seconds_a_byte(self, segment: Segment) -> float:
        began = time.perf_counter()
        size = self.read(segment, segment.first, 1 << 30).clone().nbytes
        return (time.perf_counter() - began) / max(1, size)

    def keep_pace(self, token_s: float | None) -> None:
        pass

    def kept_pace(self) -> float | None:
        return None


class _MemoryWriter:
    def __init__(self, store: MemoryStore, segment: Segment, pages: int) -> None:
        self._store, self._segment = store, segment
        shape = pages, store._page_bytes
        self._data = torch.empty(shape, dtype=torch.uint8, pin_memory=store._pinned)
        self._done = 0

    def write(self, data: torch.Tensor) -> None:
        self._data[self._done : self._done + len(data)] = data
        self._done += len(data)

    def finish(self) -> Finished:
        store, removed = self._store, []
        size = store._size(self._data)
        while store._data and store.bytes + size > store._most_bytes:
            oldest = next(iter(store._data))
            store.bytes -= store._size(store._data.pop(oldest))
            removed.append(oldest)
        store._data[self._segment.name] = self._data
        store.bytes += size
        return Finished(self._segment, tuple(removed))

    def cancel(self) -> None:
        pass
