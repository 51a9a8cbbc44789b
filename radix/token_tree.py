"""The tree of a set of token sequences: how many distinct tokens they are."""

from __future__ import annotations

from ramify.radix.key import TOKEN_BYTES, Tokens, encode
from ramify.radix.tree import RadixTree


class TokenTree:
    """Knows the prefixes of all sequences that were inserted. Holds each distinct token once."""

    def __init__(self) -> None:
        self._tree = RadixTree(page_size=1)
        self.tokens = 0
        """Distinct tokens: those that differ in themselves or in what comes before them."""

    def insert(self, tokens: Tokens) -> int:
        """Insert `tokens` (n,). Returns how many of them, from the first on, were known. Costs O(n)."""
        key = encode(tokens)
        node, matched = self._tree.walk(self._tree.root(""), key)
        known = matched // TOKEN_BYTES
        if matched < len(key):
            if node.end > known:
                node = self._tree.split(node, known)
            self._tree.append(node, key[matched:], (), borrows_head=False)
            self.tokens += len(key) // TOKEN_BYTES - known
        return known
