"""The prefixes that a tree's owner would miss most: those under leases, then the most recently used ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ramify.radix.key import ids
from ramify.radix.node import Node, Root
from ramify.radix.tree import RadixTree


class HeldPrefix(NamedTuple):
    scope: str
    ids: tuple[int, ...]
    owners: tuple[str, ...]
    """Of the leases at its end."""


def prefixes(tree: RadixTree, owners: Callable[[Node], Iterable[str]], most: int) -> list[HeldPrefix]:
    """At most `most` tokens in all; none that is the beginning of one before it. Costs O(tree)."""
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
