"""Prefix trees of tokens as arrays in depth-first order.

The subtree of node i consists of the nodes from i up to ``end[i]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from ramify.grammar.automaton.numba_types import BYTES, INTS, array_dtypes, pack, tuple_type

_LONGS = numba.types.Array(numba.int64, 1, "C", readonly=True)


class Trie(NamedTuple):
    """A trie as arrays by node, (nodes,), except `token_start`, (nodes + 1,), and `token_ids`, (tokens,).

    byte         the last byte of the text that the node spells
    depth        the number of bytes before `byte`
    end          the first node after the subtree
    longest      length, in characters of one kind, of the longest token in the subtree
    token_ids    the tokens that node i spells are ``token_ids[token_start[i] : token_start[i + 1]]``
    """

    byte: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    longest: np.ndarray
    token_start: np.ndarray
    token_ids: np.ndarray


TRIE = tuple_type(Trie, array_dtypes(Trie, uint8=("byte", "longest")))


class Spellings(NamedTuple):
    """Tokens sorted by spelling. `data`, (bytes,) uint8, is the concatenation of their spellings; `sizes`,
    (tokens,) int64, has the number of bytes of each, and `ids`, (tokens,) int32, the token ids."""

    data: np.ndarray
    sizes: np.ndarray
    ids: np.ndarray

    def only(self, chosen: np.ndarray) -> Spellings:
        """The tokens for which `chosen`, (tokens,) bool, is True."""
        return Spellings(self.data[np.repeat(chosen, self.sizes)], self.sizes[chosen], self.ids[chosen])


def spellings(spelled: list[tuple[bytes, int]]) -> Spellings:
    """`spelled`, sorted pairs of text and token, as arrays."""
    data = np.frombuffer(b"".join([text for text, _ in spelled]), np.uint8)
    sizes = np.array([len(text) for text, _ in spelled], np.int64)
    return Spellings(data, sizes, np.array([token for _, token in spelled], np.int32))


def build_trie(tokens: Spellings, lengths: np.ndarray) -> Trie:
    """The trie of `tokens`. `lengths`, (tokens,) uint8, has the number of characters of each token for
    `Trie.longest`."""
    byte, depth, end, token_start = _nodes(tokens.data, tokens.sizes)
    return Trie(byte, depth, end, longest_below(end, token_start, lengths), token_start, tokens.ids)


def first_nodes(trie: Trie) -> np.ndarray:
    """(256,) int32: for each byte the node at depth 0, or -1 if there is none."""
    nodes = np.full(256, -1, np.int32)
    top = np.flatnonzero(trie.depth == 0)
    nodes[trie.byte[top]] = top
    return nodes


# The signatures make numba compile at import (cached on disk), not under the first request.
@numba.njit((BYTES, _LONGS), cache=True, nogil=True)
def _nodes(data: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`byte`, `depth`, `end` and `token_start` of `Trie`. `data` is the concatenation of the sorted texts,
    which have `sizes` bytes."""
    byte = np.empty(data.size, np.uint8)
    depth = np.empty(data.size, np.int32)
    end = np.empty(data.size, np.int32)
    token_start = np.zeros(data.size + 1, np.int32)
    path = np.empty(max(1, data.size), np.int32)
    nodes = 0
    height = 0
    before = 0  # where the previous text begins
    begin = 0
    for i in range(sizes.size):
        common = 0
        while common < min(height, sizes[i]) and data[before + common] == data[begin + common]:
            common += 1
        for level in range(common, height):
            end[path[level]] = nodes
        for position in range(common, sizes[i]):
            byte[nodes] = data[begin + position]
            depth[nodes] = position
            path[position] = nodes
            token_start[nodes] = i
            nodes += 1
        token_start[nodes] = i + 1
        height = sizes[i]
        before = begin
        begin += sizes[i]
    for level in range(height):
        end[path[level]] = nodes
    return byte[:nodes].copy(), depth[:nodes].copy(), end[:nodes].copy(), token_start[: nodes + 1].copy()


def pack_trie(trie: Trie) -> np.ndarray:
    """Pack `byte`, `depth`, `end`, `token_start`, `token_ids` and `first_nodes` into one array for `walk`."""
    return pack((trie.byte, trie.depth, trie.end, trie.token_start, trie.token_ids, first_nodes(trie)))


@numba.njit((INTS, INTS, BYTES), cache=True, nogil=True)
def longest_below(end: np.ndarray, token_start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`Trie.longest` from the `lengths` of the tokens."""
    longest = np.zeros(end.size, np.uint8)
    for i in range(end.size):
        node = end.size - 1 - i
        for token in range(token_start[node], token_start[node + 1]):
            longest[node] = max(longest[node], lengths[token])
        child = node + 1
        while child < end[node]:
            longest[node] = max(longest[node], longest[child])
            child = end[child]
    return longest
