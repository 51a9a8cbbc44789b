"""What changed in the tree, as digests of page ends: for those who place requests on several trees.

A page ends in the tree with token n if tokens ``[0, n)`` are in it, n a multiple of the page size.
"""

from __future__ import annotations

from collections.abc import Iterable

from ramify.radix.key import TOKEN_BYTES
from ramify.radix.node import Node
from ramify.radix.observe.digest import MASK, Digests


class TreeLog:
    """Collects digests that were added and removed since the last `take`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._digests = Digests()
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def added(self, node: Node) -> None:
        """`node` is new in the tree."""
        for digest in self._ends(node, node.start):
            self._removed.pop(digest, None)
            self._added[digest] = None

    def removing(self, leaf: Node, start: int) -> None:
        """Tokens ``[start, leaf.end)`` are about to leave the tree."""
        for digest in self._ends(leaf, start):
            if digest in self._added:
                del self._added[digest]
            else:
                self._removed[digest] = None

    def take(self) -> tuple[list[int], list[int]]:
        """(added, removed) since the last call."""
        taken = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return taken

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

    def whole(self, nodes: Iterable[Node]) -> list[int]:
        """The digests of all page ends in the tree of these nodes."""
        below = [node for node in nodes if node.parent is not None]
        return [digest for node in below for digest in self._ends(node, node.start)]
