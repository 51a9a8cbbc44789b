"""A node of the prefix tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ramify.radix.key import TOKEN_BYTES

if TYPE_CHECKING:
    from ramify.radix.states import NodeState

_NO_CHILDREN: dict[int, Node] = {}  # shared by all leaves, never written: an empty dict takes 64 bytes


class Node:
    """A node and the edge that leads to it. The edge covers tokens ``[start, end)`` of a sequence.

    `pages` are the pages of slots ``start // P`` to ``(end - 1) // P``, P being the page size. If `start` is
    not a multiple of P, an ancestor has a page for the first of these slots too. If several nodes of a path
    have a page for a slot, the page of the deepest node counts. The node's page for such a shared slot also
    holds the slot's tokens before `start`. The page is either the node's own copy or, with `borrows_head`,
    the ancestor's page.

    Every page is owned by one node, the topmost that has it. No reference counts are needed: a lock or a
    lease on a node is also on all of its ancestors, and only leaves are evicted.
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
        "pins",
        "queue_entry",
        "start",
        "state",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, tokens: bytes, start: int, pages: tuple[int, ...], borrows_head: bool
    ) -> None:
        self.parent = parent
        """Parent node; None for a root, and for a node that has left the tree."""
        self.tokens = tokens
        """Tokens of the edge, encoded by `ramify.radix.key`. Only roots have none."""
        self.start = start
        self.pages = pages
        self.borrows_head = borrows_head
        self.children = _NO_CHILDREN
        """Children by their first token. Only `adopt` and `disown` change the mapping."""
        self.locks = 0
        """Locks that end here or below."""
        self.leases = 0
        """Leases that end here or below."""
        self.pins = 0
        """Pins among these leases."""
        self.last_used = 0
        """Sequence number of the last release of a path through this node."""
        self.queue_entry = 0
        """Id of the live entry in the eviction queue; 0 when not queued."""
        self.digest: int | None = None
        """Digest of tokens ``[0, end)`` (`ramify.radix.digest`); None until it is first computed."""
        self.state: NodeState | None = None
        """The state after tokens ``[0, end)``, if the node holds one (`ramify.radix.states`)."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def owned(self) -> int:
        """Number of pages that this node owns."""
        return len(self.pages) - self.borrows_head

    @property
    def owned_pages(self) -> tuple[int, ...]:
        return self.pages[1:] if self.borrows_head else self.pages

    def adopt(self, first: int, child: Node) -> None:
        """Make `child`, whose first token is `first`, a child of this node, in place of any other child with
        that first token."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[first] = child
        child.parent = self

    def disown(self, first: int) -> None:
        """Take the child with first token `first` out of the tree."""
        self.children.pop(first).parent = None
        if not self.children:
            self.children = _NO_CHILDREN


class Root(Node):
    """The empty prefix of one cache scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: str) -> None:
        super().__init__(None, b"", 0, (), False)
        self.scope = scope
