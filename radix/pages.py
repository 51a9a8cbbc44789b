"""The pool of page numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection


class PagePool:
    """Allocates the page numbers 0 to ``num_pages - 1``. Allocating and freeing n pages cost O(n)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1.")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def free_pages(self) -> frozenset[int]:
        return frozenset(self._free)

    def allocate(self, n: int) -> list[int]:
        """`n` free pages. Raises `ValueError`, and takes none, if fewer are free."""
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} pages asked for; {len(self._free)} are free.")
        if n == 0:
            return []
        pages = self._free[: -n - 1 : -1]
        del self._free[-n:]
        self._taken.update(pages)
        return pages

    def free(self, pages: Collection[int]) -> None:
        """Take `pages` back. Raises `ValueError`, and takes none, if one is not allocated or is named
        twice."""
        returned = set(pages)
        if len(returned) != len(pages) or not returned <= self._taken:
            counts = Counter(pages)
            wrong = [page for page, count in counts.items() if count > 1 or page not in self._taken]
            raise ValueError(f"Pages freed that are not handed out, or freed twice: {wrong}.")
        self._taken -= returned
        self._free.extend(pages)
