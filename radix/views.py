"""Views of the tree: a sample of its nodes for dashboards, and the prefixes that are most worth keeping."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from ramify.radix.key import TOKEN_BYTES, ids
from ramify.radix.node import Node, Root
from ramify.radix.tree import RadixTree

OWNERS = 4
"""Most owners of leases that a `NodeView` names."""


@dataclasses.dataclass(slots=True)
class NodeView:
    """A node at the time of the snapshot. `parent` is the index of its parent in the snapshot, -1 for a
    root."""

    parent: int
    start: int
    tokens: int
    pages: int
    """Number of pages that the node owns."""
    state: Literal["in_use", "leased", "evictable"]
    locks: int
    owners: tuple[str, ...]
    """Owners of the leases that end at this node, at most `OWNERS`."""
    hidden: int = 0
    """Number of children that are not in the snapshot."""
    has_state: bool = False
    """The node holds a state at its end (`ramify.radix.states`)."""


def snapshot(tree: RadixTree, owners: Callable[[Node], Iterable[str]], most: int) -> list[NodeView]:
    """A sample of at most `most` nodes, parents before their children.

    Nodes in use are preferred, then the most recently used ones. Looks at no more than the `most` newest
    children of a node, and at 4 * `most` nodes in all: so the cost is O(most * log most) for any tree.
    """
    views: list[NodeView] = []
    heap: list[tuple[bool, int, int, Node, int]] = []
    numbers = itertools.count()
    looks = 4 * most

    def push(nodes: Iterable[Node], count: int, parent: int) -> None:
        nonlocal looks
        taken = min(count, looks, most)
        for node in itertools.islice(nodes, taken):
            heapq.heappush(heap, (not node.locks, -node.last_used, next(numbers), node, parent))
        looks -= taken
        if parent >= 0:
            views[parent].hidden += count - taken

    push(reversed(tree.roots.values()), len(tree.roots), -1)
    while heap and len(views) < most:
        _, _, _, node, parent = heapq.heappop(heap)
        views.append(
            NodeView(
                parent,
                node.start,
                node.end - node.start,
                node.owned,
                "in_use" if node.locks else "leased" if node.leases else "evictable",
                node.locks,
                tuple(itertools.islice(owners(node), OWNERS)),
                has_state=node.state is not None,
            )
        )
        push(reversed(node.children.values()), len(node.children), len(views) - 1)
    for _, _, _, _, parent in heap:
        if parent >= 0:
            views[parent].hidden += 1
    return views


class Prefix(NamedTuple):
    """The tokens from the first of a sequence to the end of a node."""

    scope: str
    tokens: int
    pages: int
    """Number of pages of the path that no lock and no lease keeps."""
    ids: tuple[int, ...]
    """The last of the tokens."""


def prefix(node: Node, count: int) -> Prefix:
    """The prefix that ends at `node`, with its last `count` tokens. Costs O(nodes on the path)."""
    tokens, pages, end = b"", 0, node.end
    while node.parent is not None:
        if len(tokens) < count * TOKEN_BYTES:
            tokens = node.tokens + tokens
        pages += 0 if node.locks or node.leases else node.owned
        node = node.parent
    assert isinstance(node, Root)
    last = ids(tokens)[-count:] if count else ()
    return Prefix(node.scope, end, pages, tuple(map(int, last)))


def covered(ends: Iterable[Node | None]) -> set[Node]:
    """The nodes on the paths to `ends`."""
    found: set[Node] = set()
    for end in ends:
        node = end
        while node is not None and node not in found:
            found.add(node)
            node = node.parent
    return found


class HeldPrefix(NamedTuple):
    scope: str
    ids: tuple[int, ...]
    owners: tuple[str, ...]
    """Owners of the leases that end at the end of the prefix."""


def prefixes(tree: RadixTree, owners: Callable[[Node], Iterable[str]], most: int) -> list[HeldPrefix]:
    """The prefixes most worth keeping: leased ones first, then the most recently used.

    They have at most `most` tokens in all. No prefix in the list is a prefix of an earlier one. Costs
    O(tree).
    """
    leased = {node: tuple(owners(node)) for node in tree.nodes() if node.parent is not None}
    nodes = [node for node, own in leased.items() if own or not node.children]
    nodes.sort(key=lambda node: (not leased[node], -node.last_used))
    found: list[HeldPrefix] = []
    covered: set[Node] = set()
    for node in nodes:
        if node in covered or node.end > most:
            continue
        most -= node.end
        path = [node]
        while (above := path[-1].parent) is not None:
            path.append(above)
        covered.update(path)
        root = path[-1]
        assert isinstance(root, Root)
        tokens = b"".join(step.tokens for step in reversed(path))
        found.append(HeldPrefix(root.scope, tuple(ids(tokens)), leased[node]))
    return found
