"""The prefix tree of all tokens, walked against a pushdown automaton to find which tokens it allows.

Nodes lie in depth-first order, so that the subtree of node i is ``[i, end[i])``: a walk is one loop
that jumps over a subtree when the automaton cannot read its first byte.

Where any n characters of a kind may come (`runs`), the tokens of up to n such characters are allowed
together, from a bitmask made beforehand, and only the others are walked.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import NamedTuple

import numba
import numpy as np

from ramify.grammar.automaton.byte_edges import Edges
from ramify.grammar.automaton.costs import token_costs
from ramify.grammar.automaton.nondeterministic_walk import MOST_STEPS, walk_nondeterministic
from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.automaton.runs import KINDS, kind_lengths
from ramify.grammar.automaton.walk import walk
from ramify.grammar.matcher import mask_words
from ramify.grammar.vocabulary import Vocabulary

MAX_GROUP = 32
"""Characters of the longest tokens that are allowed together, in masks of 6 to 32 KB for each length."""

LONG = (10, MAX_GROUP)
"""Where so many characters of a kind may come, only the tokens of other kinds and longer ones are walked."""

NO_LIMIT = 1 << 30

_tries: weakref.WeakKeyDictionary[Vocabulary, TokenTrie] = weakref.WeakKeyDictionary()


class Walk(NamedTuple):
    """What a walk found besides the mask."""

    examined: int
    """States on the stack that made a difference, from the top; one more than there are if its end did."""
    rise: int
    """No allowed token makes the cost of completion grow by more."""


class _Trie(NamedTuple):
    """A prefix tree as arrays, (nodes,) but for `token_start`, (nodes + 1,), and `token_ids`, (tokens,).

    `byte[i]` is the last byte of what node i spells, `depth[i]` the number of bytes before it. The tokens
    that are spelled so are ``token_ids[token_start[i] : token_start[i + 1]]``; the subtree ends before node
    `end[i]`. `longest[i]` is the length, in characters of one kind, of the longest token in the subtree.
    """

    byte: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    longest: np.ndarray
    token_start: np.ndarray
    token_ids: np.ndarray


class _Group(NamedTuple):
    """For one kind of characters: `masks[n]`, (MAX_GROUP + 1, words), allows the tokens of up to n characters
    of the kind; `tries[n]`, for 0 and the lengths of `LONG`, has all other tokens, which must be walked."""

    masks: np.ndarray
    tries: dict[int, _Trie]


class TokenTrie:
    """All tokens of a vocabulary that have bytes. `ids_of`: the tokens by what they spell; `ids`: the first
    one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._spelled = vocabulary.spelled
        self._words = mask_words(vocabulary.size)
        lengths = np.array([kind_lengths(text) for text, _ in self._spelled], np.uint8).reshape(
            -1, len(KINDS)
        )
        self._all = _built(self._spelled, np.full(len(self._spelled), 255, np.uint8))
        self._groups = [self._group(np.ascontiguousarray(column)) for column in lengths.T]
        self._first_node = _first_nodes(self._all)
        self.levels = int(self._all.depth.max(initial=0)) + 2

    def _group(self, lengths: np.ndarray) -> _Group:
        ids = np.array([token for _, token in self._spelled], np.int64)
        bits = np.zeros((MAX_GROUP + 1, self._words * 32), np.uint8)
        for count in range(1, MAX_GROUP + 1):
            bits[count, ids[lengths <= count]] = 1
        longest = _longest(self._all.end, self._all.token_start, lengths)
        tries = {0: self._all._replace(longest=longest)}
        for least in LONG:
            longer = np.flatnonzero(lengths > least)
            tries[least] = _built([self._spelled[i] for i in longer], lengths[longer])
        return _Group(np.packbits(bits, axis=1, bitorder="little").view(np.int32), tries)

    @cached_property
    def ids_of(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for text, token in self._spelled:
            found.setdefault(text, []).append(token)
        return found

    @cached_property
    def ids(self) -> dict[bytes, int]:
        return {text: tokens[0] for text, tokens in self.ids_of.items()}

    def allow(
        self,
        automaton: PushdownAutomaton,
        state: int,
        stack: np.ndarray,
        row: np.ndarray,
        limit: int = NO_LIMIT,
        lead: bytes = b"",
        lead_costs: np.ndarray | None = None,
        doubtful: np.ndarray | None = None,
    ) -> Walk:
        """Write into `row`, (words,) int32, which tokens lead on from `state`; stop tokens do not.

        `stack`: int32, the states to return to, the one on top first. `limit`: only tokens after which
        the cost of completion, without that of `stack`, is at most so much. `lead`: bytes that come
        first, before `state`; `lead_costs[i]` is the cost of those from i on. `doubtful`, (words,) int32,
        gets the allowed tokens that begin or end a text that must be fresh, or come before one.
        """
        run = int(automaton.run[state]) if not lead and automaton.run_cost[state] <= limit else 0
        skipped = min(run, MAX_GROUP)
        trie, rise = self._all, 0
        if run:
            group = self._groups[automaton.run_kind[state]]
            trie = group.tries[max(length for length in group.tries if length <= skipped)]
            row[:] = group.masks[skipped]
            rise = int(automaton.run_cost[state]) - int(automaton.cost[state])
        else:
            row[:] = 0
        if automaton.nondeterministic:
            examined, walked = walk_nondeterministic(
                trie.byte, trie.end, trie.longest, trie.token_start, trie.token_ids,
                automaton.offsets, automaton.low, automaton.high, automaton.target, automaton.push, automaton.final,
                automaton.cost, stack, state, skipped, limit, MOST_STEPS, row.view(np.uint32),
                automaton.after_item, automaton.before_item,
                (_NO_COSTS[:0] if doubtful is None else doubtful).view(np.uint32),
            )  # fmt: skip
            return Walk(examined, max(rise, walked))
        examined, walked = walk(
            trie.byte, trie.depth, trie.end, trie.longest, trie.token_start, trie.token_ids, self.levels,
            automaton.offsets, automaton.low, automaton.high, automaton.target, automaton.push, automaton.final, automaton.cost,
            stack, state, np.frombuffer(lead, np.uint8), _NO_COSTS if lead_costs is None else lead_costs,
            skipped, limit, automaton.most_pushed, row.view(np.uint32), automaton.after_item, automaton.before_item,
            (_NO_COSTS[:0] if doubtful is None else doubtful).view(np.uint32),
        )  # fmt: skip
        return Walk(examined, max(rise, walked))

    def completions(
        self, edges: Edges, length: np.ndarray, best: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`cost` and `token` of `Frames`; `length` and `best` as `costs.shortest` found them."""
        order = np.argsort(length, kind="stable").astype(np.int32)
        cost = np.zeros(len(length), np.int32)
        token = np.zeros(len(length), np.int32)
        trie = self._all
        token_costs(
            trie.byte, trie.end, trie.token_start, trie.token_ids, self._first_node,
            edges.low, edges.target, edges.push, edges.after_item, best, order, length, cost, token,
        )  # fmt: skip
        return cost, token


def token_trie(vocabulary: Vocabulary) -> TokenTrie:
    """Built once per vocabulary."""
    if vocabulary not in _tries:
        _tries[vocabulary] = TokenTrie(vocabulary)
    return _tries[vocabulary]


_NO_COSTS = np.zeros(1, np.int32)
_BYTES = numba.types.Array(numba.uint8, 1, "C", readonly=True)
_INTS = numba.types.Array(numba.int32, 1, "C", readonly=True)
_LONGS = numba.types.Array(numba.int64, 1, "C", readonly=True)


def _built(spelled: list[tuple[bytes, int]], lengths: np.ndarray) -> _Trie:
    sizes = np.array([len(text) for text, _ in spelled], np.int64)
    data = np.frombuffer(b"".join(text for text, _ in spelled), np.uint8)
    byte, depth, end, token_start = _nodes(data, sizes)
    ids = np.array([token for _, token in spelled], np.int32)
    return _Trie(byte, depth, end, _longest(end, token_start, lengths), token_start, ids)


def _first_nodes(trie: _Trie) -> np.ndarray:
    """(256,) int32: the node of each byte string of length one, or -1."""
    nodes = np.full(256, -1, np.int32)
    top = np.flatnonzero(trie.depth == 0)
    nodes[trie.byte[top]] = top
    return nodes


# Compiled when the module is imported (and cached on disk), not under the first request.
@numba.njit((_BYTES, _LONGS), cache=True, nogil=True)
def _nodes(data: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The nodes for the texts, sorted, that lie in `data` one after the other."""
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


@numba.njit((_INTS, _INTS, _BYTES), cache=True, nogil=True)
def _longest(end: np.ndarray, token_start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each node the greatest of the `lengths` of the tokens at it and below."""
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
