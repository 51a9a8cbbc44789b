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

from ramify.runtime.grammar.automaton.byte_edges import Edges
from ramify.runtime.grammar.automaton.costs import token_costs
from ramify.runtime.grammar.automaton.forking_walk import MOST_STEPS, walk_forking
from ramify.runtime.grammar.automaton.frames import Frames
from ramify.runtime.grammar.automaton.runs import KINDS, kind_lengths
from ramify.runtime.grammar.matcher import mask_words
from ramify.runtime.grammar.vocabulary import Vocabulary

MAX_GROUP = 32
"""Characters of the longest tokens that are allowed together, in masks of 6 to 32 KB for each length."""

LONG = (10, MAX_GROUP)
"""Where so many characters of a kind may come, only the tokens of other kinds and longer ones are walked."""

NO_LIMIT = 1 << 30

_tries: weakref.WeakKeyDictionary[Vocabulary, TokenTrie] = weakref.WeakKeyDictionary()


class Walk(NamedTuple):
    """What a walk found beside the mask."""

    examined: int
    """States on the stack that made a difference, from the top; one more than there are if its end did."""
    rise: int
    """No allowed token makes the cost of completion grow by more."""


class _Trie(NamedTuple):
    """(nodes,) arrays; node i spells a byte string, and stands for tokens
    ``token_ids[token_start[i] : token_start[i + 1]]`` that are spelled so. `longest` is the greatest
    length, in characters of the kind that is asked for, of the tokens at it and below."""

    byte: np.ndarray
    depth: np.ndarray
    end: np.ndarray
    longest: np.ndarray
    token_start: np.ndarray
    token_ids: np.ndarray


class _Group(NamedTuple):
    """The tokens of one kind of characters: `masks[n]`, (MAX_GROUP + 1, words), those of up to n
    characters; `tries[n]`, for 0 and the lengths of `LONG`, those of other kinds and of more characters."""

    masks: np.ndarray
    tries: dict[int, _Trie]


class TokenTrie:
    """`ids_of`: by bytes, the tokens that spell them; `ids` one of these."""

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
        frames: Frames,
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
        run = int(frames.run[state]) if not lead and frames.run_cost[state] <= limit else 0
        skipped = min(run, MAX_GROUP)
        trie, rise = self._all, 0
        if run:
            group = self._groups[frames.run_kind[state]]
            trie = group.tries[max(length for length in group.tries if length <= skipped)]
            row[:] = group.masks[skipped]
            rise = int(frames.run_cost[state]) - int(frames.cost[state])
        else:
            row[:] = 0
        if frames.forks:
            examined, walked = walk_forking(
                trie.byte, trie.end, trie.longest, trie.token_start, trie.token_ids,
                frames.offsets, frames.low, frames.high, frames.target, frames.push, frames.final,
                frames.cost, stack, state, skipped, limit, MOST_STEPS, row.view(np.uint32),
                frames.fresh, frames.before_fresh,
                (_NO_COSTS[:0] if doubtful is None else doubtful).view(np.uint32),
            )  # fmt: skip
            return Walk(examined, max(rise, walked))
        examined, walked = _walk(
            trie.byte, trie.depth, trie.end, trie.longest, trie.token_start, trie.token_ids, self.levels,
            frames.offsets, frames.low, frames.high, frames.target, frames.push, frames.final, frames.cost,
            stack, state, np.frombuffer(lead, np.uint8), _NO_COSTS if lead_costs is None else lead_costs,
            skipped, limit, frames.most_pushed, row.view(np.uint32), frames.fresh, frames.before_fresh,
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
            edges.low, edges.target, edges.push, edges.fresh, best, order, length, cost, token,
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
_BOOLS = numba.types.Array(numba.boolean, 1, "C", readonly=True)


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


@numba.njit(cache=True)
def _write_out(
    offsets: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    target: np.ndarray,
    push: np.ndarray,
    state: int,
    row: np.ndarray,
) -> None:
    # -1: no edge; a state; or -2 - e for an edge e that does more than lead to a state.
    row[:] = -1
    for edge in range(offsets[state], offsets[state + 1]):
        simple = push[edge] < 0 and target[edge] >= 0
        row[low[edge] : numba.int64(high[edge]) + 1] = target[edge] if simple else -2 - edge


@numba.njit(cache=True)
def _edge(offsets: np.ndarray, low: np.ndarray, high: np.ndarray, state: int, byte: int) -> int:
    for edge in range(offsets[state], offsets[state + 1]):
        if low[edge] <= byte <= high[edge]:
            return edge
    return -1


@numba.njit(
    (
        _BYTES, _INTS, _INTS, _BYTES, _INTS, _INTS, numba.int64,
        _INTS, _BYTES, _BYTES, _INTS, _INTS, _BOOLS, _INTS,
        _INTS, numba.int64, _BYTES, _INTS,
        numba.int64, numba.int64, numba.int64, numba.uint32[::1], _BOOLS, _BOOLS, numba.uint32[::1],
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def _walk(
    node_byte: np.ndarray,
    node_depth: np.ndarray,
    node_end: np.ndarray,
    node_longest: np.ndarray,
    token_start: np.ndarray,
    token_ids: np.ndarray,
    levels: int,
    offsets: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    target: np.ndarray,
    push: np.ndarray,
    final: np.ndarray,
    cost: np.ndarray,
    stack: np.ndarray,
    state: int,
    lead: np.ndarray,
    lead_costs: np.ndarray,
    skipped: int,
    limit: int,
    most_pushed: int,
    row: np.ndarray,
    fresh: np.ndarray,
    before_fresh: np.ndarray,
    doubtful: np.ndarray,
) -> tuple[int, int]:
    # rows[d] is the edges of the state at depth d, written out by byte: a state is mostly the same as
    # when the walk was last at that depth, and a node then costs one look-up.
    rows = np.empty((levels, 256), np.int32)
    row_state = np.full(levels, -1, np.int32)
    state_at = np.empty(levels, np.int32)
    # The stack is a linked list: entry i returns to kept[i] and lies on entry below[i]. What is pushed at
    # a depth is overwritten when the walk comes back there: `free_at` is the first entry that is free.
    held = stack.size
    kept = np.empty(held + levels * most_pushed, np.int32)
    below = np.empty(kept.size, np.int32)
    # Cost of the stack up to an entry (at its number plus one), less that of the stack at the beginning.
    returning = np.empty(kept.size + 1, np.int32)
    returning[held] = 0
    for i in range(held):
        entry = held - 1 - i
        kept[entry] = stack[i]
        below[entry] = entry - 1
        returning[entry] = returning[entry + 1] - cost[stack[i]]
    top_at = np.empty(levels, np.int32)
    free_at = np.empty(levels, np.int32)
    crossed_at = np.zeros(levels, np.bool_)
    state_at[0] = state
    top_at[0] = held - 1
    free_at[0] = held
    leading = lead.size
    if leading == 0:
        row_state[0] = state
        _write_out(offsets, low, high, target, push, state, rows[0])
    examined = 0
    rise = 0
    began = cost[state] + lead_costs[0]
    node = 0
    while node < node_byte.size:
        if node_longest[node] <= skipped:
            node = node_end[node]
            continue
        depth = node_depth[node]
        byte = node_byte[node]
        here = state_at[depth]
        top = top_at[depth]
        free = free_at[depth]
        crossed = crossed_at[depth]
        after = -1
        if depth < leading:
            if byte == lead[depth]:
                after = here
        else:
            after = rows[depth, byte]
            if after < -1 or (after == -1 and final[here]):
                edge = -2 - after
                after = -1
                while True:
                    if edge < 0:
                        if not final[here]:
                            break
                        if top < held:
                            examined = max(examined, held - top)
                        if top < 0:
                            break
                        here = kept[top]
                        crossed |= fresh[here]
                        top = below[top]
                    else:
                        if push[edge] >= 0:
                            kept[free] = push[edge]
                            below[free] = top
                            returning[free + 1] = returning[top + 1] + cost[push[edge]]
                            crossed |= fresh[push[edge]]
                            top = free
                            free += 1
                        if target[edge] >= 0:
                            after = target[edge]
                            break
                        here = ~target[edge]
                    edge = _edge(offsets, low, high, here, byte)
        if after < 0:
            node = node_end[node]
            continue
        if token_start[node + 1] > token_start[node]:
            left = cost[after] + returning[top + 1]
            if depth < leading:
                left += lead_costs[depth + 1]
            if left <= limit:
                rise = max(rise, left - began)
                for i in range(token_start[node], token_start[node + 1]):
                    token = token_ids[i]
                    row[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)
                    if doubtful.size > 0 and (crossed or before_fresh[after]):
                        doubtful[token >> 5] |= numba.uint32(1) << numba.uint32(token & 31)
        if node_end[node] > node + 1:
            state_at[depth + 1] = after
            top_at[depth + 1] = top
            free_at[depth + 1] = free
            crossed_at[depth + 1] = crossed
            if row_state[depth + 1] != after and depth + 1 >= leading:
                row_state[depth + 1] = after
                _write_out(offsets, low, high, target, push, after, rows[depth + 1])
        node += 1
    return examined, rise
