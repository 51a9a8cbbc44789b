"""Cold stores: KV pages outside of the page pool, by prefix.

A store keeps segments (`ramify.radix.cold.Segment`). A segment is written once, in pieces, and is found after
its end. The scheduler reads and changes `index`; all other methods are called by one other thread.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from ramify.radix.cold import ColdIndex, Segment


class Finished(NamedTuple):
    """A segment that can be read now, and the names of segments that left the store for it."""

    segment: Segment
    removed: tuple[str, ...] = ()


class SegmentWriter(Protocol):
    """A segment that is being written. Each method raises `OSError`."""

    def write(self, data: torch.Tensor) -> None:
        """Write the next pages, (pages, page_bytes) uint8."""

    def finish(self) -> Finished: ...

    def cancel(self) -> None: ...


class ColdStore(Protocol):
    index: ColdIndex
    most_pages: int
    """Most pages of one prefix, so that its last segment does not remove its first one."""
    damaged: int
    """Number of damaged segments that were found when the store was opened."""

    def begin(self, scope: str, ids: np.ndarray, first: int) -> SegmentWriter:
        """Begin a segment of the pages of `ids` from page `first` on. Raises `OSError`."""

    def read(self, segment: Segment, first: int, count: int) -> torch.Tensor:
        """Pages ``[first, first + count)`` of the prefix, (count, page_bytes) uint8. Raises `BadSnapshot` or
        `OSError` if the segment is damaged or gone."""

    def drop(self, segment: Segment) -> None:
        """Remove the data of `segment`."""

    def touch(self, segment: Segment) -> None:
        """Make `segment` the most recently used one."""

    def seconds_a_byte(self, segment: Segment) -> float:
        """Seconds for each byte of `segment` that is read. Raises `OSError`."""

    def keep_pace(self, token_s: float | None) -> None:
        """Keep the measured seconds of computing a token, if they are known, for the next process, if the
        store outlives this one. Raises `OSError`."""

    def kept_pace(self) -> float | None:
        """Seconds of computing a token, as an earlier process has measured them; None if not known."""
