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
    """A full page: tokens ``[end - page size, end)`` of a sequence whose tokens ``[0, end)`` are in the
    tree."""

    digest: int
    """Digest of tokens ``[0, end)``."""
    before: int | None = None
    """Digest of the tokens before the page; None for the first page of a sequence."""
    tokens: bytes = b""
    """Tokens of the page, encoded by `ramify.radix.key`."""
    scope: str = ""


class TreeLog:
    """Collects the page ends that were added and removed since the last `take`. If `tokens` is False, a
    `Page` has only its digest."""

    def __init__(self, page_size: int, *, tokens: bool = False) -> None:
        self.tokens = tokens
        self._page_size = page_size
        self._digests = Digests()
        self._added: dict[int, Page] = {}
        self._removed: dict[int, None] = {}

    def added(self, node: Node) -> None:
        """Note that `node` is new in the tree."""
        for page in self._pages(node):
            if page.digest in self._removed:
                del self._removed[page.digest]
            else:
                self._added[page.digest] = page

    def removing(self, leaf: Node, start: int) -> None:
        """Note that tokens ``[start, leaf.end)`` are about to leave the tree."""
        for digest in self._ends(leaf, start):
            if digest in self._added:
                del self._added[digest]
            else:
                self._removed[digest] = None

    def take(self) -> tuple[list[Page], list[int]]:
        """(added, removed): the pages that entered the tree since the last call, and the digests of those
        that left the tree. An added page comes before the pages that continue it."""
        taken = list(self._added.values()), list(self._removed)
        self._added, self._removed = {}, {}
        return taken

    def whole(self, nodes: Iterable[Node]) -> list[Page]:
        """All pages that end inside `nodes`. If `nodes` has parents before their children, a page stands
        before the pages that continue it."""
        return [page for node in nodes if node.parent is not None for page in self._pages(node)]

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
        if not self.tokens:
            yield from map(Page, self._ends(node, node.start))
            return
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
