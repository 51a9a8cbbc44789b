"""The token tree (trie) of a set of sequences: how many distinct tokens the sequences have together."""

from __future__ import annotations

from ramify.radix.key import TOKEN_BYTES, Tokens, encode
from ramify.radix.tree import RadixTree


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
