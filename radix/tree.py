"""The shape of the prefix tree: matching, splitting, appending and joining nodes.

Locks, leases and the order of eviction are decided elsewhere. When the tree splits a node, it copies the
counts of locks, leases and pins to the new node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from ramify.radix.key import TOKEN_BYTES, Tokens, encode, first_token, ids, shared_bytes
from ramify.radix.node import Node, Root


class RadixTree:
    """A radix tree of token sequences, with one root per cache scope.

    `version` changes whenever a node is split, trimmed, added, joined or removed, and whenever a node gains
    or loses a state.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.version = 0
        self.roots: dict[str, Root] = {}

    def root(self, scope: str) -> Root:
        """The root of `scope`, created if there is none."""
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = Root(scope)
        return root

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before their children."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def walk(self, node: Node, key: bytes) -> tuple[Node, int]:
        """Match `key` against the edges below `node`; changes nothing.

        Returns the node in which the match ends (`node` itself if nothing matches) and the number of bytes of
        `key` that match. The match may end inside the edge of the returned node.
        """
        firsts = ids(key)
        position, size = 0, len(key)
        while position < size:
            child = node.children.get(firsts[position // TOKEN_BYTES])
            if child is None:
                break
            edge = child.tokens
            if not key.startswith(edge, position):
                return child, position + shared_bytes(edge, key, position)
            position += len(edge)
            node = child
        return node, position

    def following(self, node: Node, position: int, count: int) -> list[int]:
        """At most `count` tokens of the tree from `position`, which lies in `node`. Follows the most recently
        used child at each fork."""
        found = ids(node.tokens)[position - node.start :][:count].tolist()
        while len(found) < count and node.children:
            node = max(node.children.values(), key=attrgetter("last_used"))
            found += ids(node.tokens)[: count - len(found)].tolist()
        return found

    def path_pages(self, node: Node, above: Node | None = None, table: Sequence[int] = ()) -> list[int]:
        """The page of every slot of ``[0, node.end)``.

        With `above`, an ancestor of `node`, only the path below `above` is read. `table` then has the pages
        of the slots of ``[0, above.end)``.
        """
        path = []
        step: Node | None = node
        while step is not above:
            assert step is not None
            path.append(step)
            step = step.parent
        pages = list(table)
        for step in reversed(path):
            pages[step.start // self.page_size :] = step.pages
        return pages

    def split(self, node: Node, at: int) -> Node:
        """Split `node` before token `at`, ``start < at < end``, and return the new upper part.

        `node` becomes the lower part, so locks, leases and a state at the end of `node` stay valid.
        """
        parent = node.parent
        assert parent is not None
        assert node.start < at < node.end
        cut = (at - node.start) * TOKEN_BYTES
        head = node.start // self.page_size
        upper = Node(
            parent,
            node.tokens[:cut],
            node.start,
            node.pages[: -(-at // self.page_size) - head],
            node.borrows_head,
        )
        upper.locks, upper.leases, upper.pins = node.locks, node.leases, node.pins
        upper.last_used = node.last_used
        parent.adopt(first_token(upper.tokens), upper)
        node.tokens = node.tokens[cut:]
        node.start = at
        node.pages = node.pages[at // self.page_size - head :]
        node.borrows_head = at % self.page_size > 0
        upper.adopt(first_token(node.tokens), node)
        self.version += 1
        return upper

    def append(self, parent: Node, tokens: bytes, pages: tuple[int, ...], borrows_head: bool) -> Node:
        """Add a leaf under `parent`, and return it. `parent` has no child with the same first token."""
        first = first_token(tokens)
        assert first not in parent.children
        leaf = Node(parent, tokens, parent.end, pages, borrows_head)
        leaf.last_used = parent.last_used
        parent.adopt(first, leaf)
        self.version += 1
        return leaf

    def trim(self, leaf: Node, count: int) -> tuple[int, ...]:
        """Cut the last `count` pages, fewer than all, off `leaf`, and return the cut pages."""
        assert not leaf.children
        assert 0 < count < len(leaf.pages)
        kept, cut = leaf.pages[:-count], leaf.pages[-count:]
        end = (leaf.start // self.page_size + len(kept)) * self.page_size
        leaf.tokens = leaf.tokens[: (end - leaf.start) * TOKEN_BYTES]
        leaf.pages = kept
        leaf.digest = None
        self.version += 1
        return cut

    def remove(self, leaf: Node) -> Node:
        """Take `leaf` out of the tree and return its parent. The caller frees the pages of `leaf`."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        parent.disown(first_token(leaf.tokens))
        self.version += 1
        return parent

    def prune(self, node: Node) -> None:
        """Remove `node` if it is a root without children and locks."""
        if isinstance(node, Root) and not node.children and not node.locks:
            del self.roots[node.scope]
            self.version += 1

    def join(self, child: Node) -> tuple[int, ...] | None:
        """Join `child` and its parent into one node, `child`, if the parent has no other child and no state,
        and both nodes have the same number of locks, of leases and of pins.

        The caller makes sure that both nodes were last used together. Joining undoes a split after one branch
        is gone, so that paths stay short. Returns the pages that are no longer needed: (), or the parent's
        page for the slot in which the nodes meet. Returns None if the nodes cannot be joined.
        """
        parent = child.parent
        assert parent is not None
        grandparent = parent.parent
        if (
            grandparent is None
            or len(parent.children) != 1
            or parent.state is not None
            or parent.locks != child.locks
            or parent.leases != child.leases
            or parent.pins != child.pins
        ):
            return None
        pages, borrows_head = parent.pages, parent.borrows_head
        spare: tuple[int, ...] = ()
        if child.start % self.page_size:
            meeting = pages[-1]
            if meeting != child.pages[0]:
                if not self._supersedes(child):
                    return None
                if len(pages) > 1 or not borrows_head:
                    spare = (meeting,)
                borrows_head = borrows_head and len(pages) > 1
            pages = pages[:-1]
        child.tokens = parent.tokens + child.tokens
        child.start = parent.start
        child.pages = pages + child.pages
        child.borrows_head = borrows_head
        grandparent.adopt(first_token(child.tokens), child)
        parent.parent = None
        self.version += 1
        return spare

    def _supersedes(self, child: Node) -> bool:
        """Whether the parent's page for the slot in which `child` and its parent meet can be freed.

        `child` has another page for that slot. The parent's page may still be needed: it may be in the page
        table of a request that locks `child`, or nodes below `child` that begin in that slot may borrow it.
        """
        slot_end = (child.start // self.page_size + 1) * self.page_size
        return not (child.borrows_head or child.locks) and (not child.children or child.end >= slot_end)


class TokenTree:
    """A trie of the inserted sequences, compressed as a radix tree."""

    def __init__(self) -> None:
        self._tree = RadixTree(page_size=1)
        self.tokens = 0
        """The number of distinct tokens. Tokens of two sequences count once if they and all tokens before
        them are equal."""

    def insert(self, tokens: Tokens) -> int:
        """Insert `tokens` (n,). Returns the length of their longest prefix that was in the trie before. Costs
        O(n)."""
        key = encode(tokens)
        node, matched = self._tree.walk(self._tree.root(""), key)
        known = matched // TOKEN_BYTES
        if matched < len(key):
            if node.end > known:
                node = self._tree.split(node, known)
            self._tree.append(node, key[matched:], (), borrows_head=False)
            self.tokens += len(key) // TOKEN_BYTES - known
        return known
