"""The pool of page numbers."""

from __future__ import annotations

from collections.abc import Collection


class PagePool:
    """Hands out the page numbers ``0 … num_pages - 1`` and takes them back. Both cost O(pages moved)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 1.")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken: set[int] = set()

    def __len__(self) -> int:
        """Pages that are free."""
        return len(self._free)

    @property
    def free_pages(self) -> frozenset[int]:
        return frozenset(self._free)

    def allocate(self, n: int) -> list[int]:
        """`n` pages. Raises `ValueError`, and takes nothing, where fewer are free."""
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} pages asked for; {len(self._free)} are free.")
        if n == 0:
            return []
        pages = self._free[: -n - 1 : -1]
        del self._free[-n:]
        self._taken.update(pages)
        return pages

    def free(self, pages: Collection[int]) -> None:
        """Take `pages` back. Raises `ValueError`, and takes none, where one is not handed out."""
        returned = set(pages)
        if len(returned) != len(pages) or not returned <= self._taken:
            raise ValueError(
                f"Pages freed that are not handed out, or freed twice: {_wrong(pages, self._taken)}."
            )
        self._taken -= returned
        self._free.extend(pages)


def _wrong(pages: Collection[int], allowed: set[int]) -> list[int]:
    seen: set[int] = set()
    wrong = []
    for page in pages:
        if page in seen or page not in allowed:
            wrong.append(page)
        seen.add(page)
    return wrong
