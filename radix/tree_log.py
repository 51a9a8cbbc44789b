"""Changes of the tree, as digests of page ends. The frontend uses them to place requests on replicas.

A page end is a multiple n of the page size for which the tree has tokens ``[0, n)``; its digest is the digest
of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ramify.radix.digest import MASK, Digests
from ramify.radix.key import TOKEN_BYTES
from ramify.radix.node import Node, Root


class Page(NamedTuple):
    """A whole page of tokens, ``[end - page size, end)``, of a sequence of which the tree has
    ``[0, end)``."""

    digest: int
    """Digest of tokens ``[0, end)``."""
    before: int | None
    """Digest of the tokens before the page; None for the first page of a sequence."""
    tokens: bytes
    """Tokens of the page, encoded by `ramify.radix.key`."""
    scope: str


class TreeLog:
    """Collects the page ends that were added and removed since the last `take`.

    With `tokens` the log keeps the added pages in full, for `take_pages`.
    """

    def __init__(self, page_size: int, *, tokens: bool = False) -> None:
        self._page_size = page_size
        self._tokens = tokens
        self._digests = Digests()
        self._added: dict[int, Page | None] = {}
        self._removed: dict[int, None] = {}

    def added(self, node: Node) -> None:
        """Note that `node` is new in the tree."""
        if self._tokens:
            pages: Iterable[tuple[int, Page | None]] = ((page.digest, page) for page in self._pages(node))
        else:
            pages = ((digest, None) for digest in self._ends(node, node.start))
        for digest, page in pages:
            if digest in self._removed:
                del self._removed[digest]
            else:
                self._added[digest] = page

    def removing(self, leaf: Node, start: int) -> None:
        """Note that tokens ``[start, leaf.end)`` are about to leave the tree."""
        for digest in self._ends(leaf, start):
            if digest in self._added:
                del self._added[digest]
            else:
                self._removed[digest] = None

    def take(self) -> tuple[list[int], list[int]]:
        """(added, removed): digests of the page ends that entered and left the tree since the last call. An
        added page end stands before those that continue it."""
        taken = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return taken

    def take_pages(self) -> tuple[list[Page], list[int]]:
        """Like `take`, with the added pages in full in place of their digests. The log must have been made
        with `tokens`."""
        pages = [page for page in self._added.values() if page is not None]
        return pages, self.take()[1]

    def _ends(self, node: Node, start: int) -> list[int]:
        """The digests of the page ends in ``(start, node.end]``."""
        size = self._page_size
        assert node.parent is not None
        digest = self._digests.of(node.parent)
        found = []
        place = node.start
        for end in range(node.start - node.start % size + size, node.end + 1, size):
            tokens = node.tokens[(place - node.start) * TOKEN_BYTES : (end - node.start) * TOKEN_BYTES]
            digest = (digest + self._digests.weigh(tokens, place)) & MASK
            place = end
            if end > start:
                found.append(digest)
        return found

    def _pages(self, node: Node) -> Iterator[Page]:
        """The pages that end in ``(node.start, node.end]``."""
        size = self._page_size
        assert node.parent is not None
        head, scope = _above(node, node.start % size)
        first = node.start - node.start % size
        before = (self._digests.of(node.parent) - self._digests.weigh(head, first)) & MASK
        tokens = head + node.tokens
        for start in range(first, node.end - size + 1, size):
            page = tokens[(start - first) * TOKEN_BYTES :][: size * TOKEN_BYTES]
            digest = (before + self._digests.weigh(page, start)) & MASK
            yield Page(digest, before if start else None, page, scope)
            before = digest

    def whole(self, nodes: Iterable[Node]) -> list[int]:
        """The digests of all page ends inside `nodes`."""
        below = [node for node in nodes if node.parent is not None]
        return [digest for node in below for digest in self._ends(node, node.start)]

    def whole_pages(self, nodes: Iterable[Node]) -> list[Page]:
        """All pages that end inside `nodes`. If `nodes` has parents before their children, a page stands
        before the pages that continue it."""
        return [page for node in nodes if node.parent is not None for page in self._pages(node)]


def _above(node: Node, count: int) -> tuple[bytes, str]:
    """The last `count` tokens before the edge of `node`, and the scope of `node`."""
    tokens = b""
    step = node
    while step.parent is not None:
        step = step.parent
        if (short := count * TOKEN_BYTES - len(tokens)) > 0:
            tokens = step.tokens[-short:] + tokens
    assert isinstance(step, Root)
    return tokens, step.scope
