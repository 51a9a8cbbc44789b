"""The index of a cold store: which segment outside of the page pool holds which pages of which prefix.

Example with pages of 4 tokens. Segment X has pages 0, 1, 2 of prefix A. Prefix B differs from A at token 9;
segment Y has its page 2:

    find(B, "", 0)    [(X, 0, 2), (Y, 2, 1)]: pages 0 and 1 from X, page 2 from Y
    find(B, "s", 0)   []: another cache scope
    remove(X)
    find(B, "", 0)    []; a request whose first two pages are in the tree asks find(B, "", 2): [(Y, 2, 1)]

Pages are found by the digest of all tokens up to their end (`ramify.radix.digest`). Digests may collide, so
the tokens themselves are compared before a page counts as found.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ramify.radix.digest import Digests


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pages ``[first, len(ids) / page size)`` of the prefix `ids` in `scope`, kept under `name`."""

    name: str
    scope: str
    ids: npt.NDArray[np.int32]
    """(tokens,) int32: all tokens of the prefix, a multiple of the page size."""
    first: int


class Run(NamedTuple):
    """Pages ``[first, first + pages)`` of a prefix, all in `segment`."""

    segment: Segment
    first: int
    pages: int


class ColdIndex:
    """The segments of one store, and the pages in them. Not thread-safe."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._digests = Digests()
        self._pages: dict[int, tuple[Segment, int]] = {}
        """Digest of the tokens up to the end of a page → the newest segment that has the page, its number."""
        self.segments: dict[str, Segment] = {}
        """Segments by name, in the order of `add`."""

    def add(self, segment: Segment) -> None:
        self.segments[segment.name] = segment
        ends = self._ends(segment.ids, segment.scope)
        for page in range(segment.first, len(ends)):
            self._pages[ends[page]] = segment, page

    def remove(self, segment: Segment) -> None:
        """Forget `segment`. Does nothing if it is not in the index."""
        if self.segments.pop(segment.name, None) is None:
            return
        for digest in self._ends(segment.ids, segment.scope)[segment.first :]:
            if digest in self._pages and self._pages[digest][0] is segment:
                del self._pages[digest]

    def find(self, ids: npt.NDArray[np.int32], scope: str, first: int) -> list[Run]:
        """Where the whole pages of `ids` (n,) are, from page `first` on up to the first page that no segment
        has. Costs O(n)."""
        if not self._pages:
            return []
        runs: list[Run] = []
        shared = 0
        ends = self._ends(ids, scope)
        for page in range(first, len(ends)):
            segment, number = self._pages.get(ends[page], (None, -1))
            if segment is None or number != page:
                break
            if not runs or runs[-1].segment is not segment:
                shared = _shared(segment, ids, scope)
                runs.append(Run(segment, page, 0))
            if (page + 1) * self._page_size > shared:
                break
            runs[-1] = runs[-1]._replace(pages=runs[-1].pages + 1)
        return [run for run in runs if run.pages]

    def _ends(self, ids: npt.NDArray[np.int32], scope: str) -> list[int]:
        return self._digests.page_ends(ids, scope, self._page_size)


def _shared(segment: Segment, ids: npt.NDArray[np.int32], scope: str) -> int:
    """The number of first tokens of `ids` that are those of `segment`; 0 in another scope."""
    if segment.scope != scope:
        return 0
    count = min(len(ids), len(segment.ids))
    differs = segment.ids[:count] != ids[:count]
    return int(differs.argmax()) if differs.any() else count
