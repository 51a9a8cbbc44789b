"""A node of the prefix tree."""

from __future__ import annotations

from ramify.radix.key import TOKEN_BYTES

_NO_CHILDREN: dict[int, Node] = {}  # shared by all leaves, never written: an empty dict takes 64 bytes


class Node:
    """The edge that leads to a node, and the node. It covers tokens ``[start, end)`` of its sequence.

    `pages` are those of slots ``start // P … (end - 1) // P``. Where `start` is not a multiple of the
    page size P, the first of these slots also belongs to an ancestor, and on a path the deepest node
    that has a slot says which page it is. That page holds the slot's earlier tokens as well: it is
    either this node's own copy, or (`borrows_head`) a page that an ancestor accounts for.

    Every page is accounted for by one node, the topmost that has it. That needs no reference counts:
    a lock or a lease on a node is also on all of its ancestors, and leaves are evicted first.
    """

    __slots__ = (
        "borrows_head",
        "children",
        "digest",
        "last_used",
        "leases",
        "locks",
        "pages",
        "parent",
        "start",
        "ticket",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, tokens: bytes, start: int, pages: tuple[int, ...], borrows_head: bool
    ) -> None:
        self.parent = parent
        """None for a root, and for a node that has left the tree."""
        self.tokens = tokens
        """Encoded by `ramify.radix.key`; empty for a root only."""
        self.start = start
        self.pages = pages
        self.borrows_head = borrows_head
        self.children = _NO_CHILDREN
        """By first token. Written by `adopt` and `disown` only."""
        self.locks = 0
        """Holds that end here or below."""
        self.leases = 0
        """Leases that end here or below."""
        self.last_used = 0
        """Number of the release that last had this node on its path."""
        self.ticket = 0
        """Of the live entry in the eviction queue; 0 when not queued."""
        self.digest: int | None = None
        """Of the tokens up to `end`, once an eviction has asked for it (`ramify.radix.evicted`)."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def owned(self) -> int:
        """Pages that this node accounts for."""
        return len(self.pages) - self.borrows_head

    @property
    def owned_pages(self) -> tuple[int, ...]:
        return self.pages[1:] if self.borrows_head else self.pages

    def adopt(self, first: int, child: Node) -> None:
        """Make `child`, whose first token is `first`, a child, in the place of one with that token."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[first] = child
        child.parent = self

    def disown(self, first: int) -> None:
        """Take the child with that first token out of the tree."""
        self.children.pop(first).parent = None
        if not self.children:
            self.children = _NO_CHILDREN


class Root(Node):
    """The empty prefix of one cache scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: str) -> None:
        super().__init__(None, b"", 0, (), False)
        self.scope = scope
