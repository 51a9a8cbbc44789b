"""Mask filling: which tokens of a vocabulary an automaton can read from a configuration.

All tokens are in one prefix tree (`trie`), which is walked in step with the automaton: a byte that cannot be
read rules out a whole subtree. The docstring of `walk` has a worked example; `nondeterministic_walk` follows
several configurations.

Inside a JSON string nearly every token is allowed, and a walk would visit nearly every node. If any n
characters of a kind may come (`runs`), a bitmask made once for each vocabulary allows all tokens of up to n
such characters together, and only the other tokens are walked. If characters lead back to the same state
(`loops`), only the parts of tokens after those characters are walked.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ramify.grammar.automaton.characters import KINDS, kind_lengths
from ramify.grammar.automaton.masks.loops import LOOPS, Loop, byte_kinds, rests
from ramify.grammar.automaton.masks.nondeterministic_walk import (
    FULL,
    MOST_STEPS,
    NO_LIMIT,
    ROOM,
    walk_nondeterministic,
)
from ramify.grammar.automaton.masks.registers import OWED
from ramify.grammar.automaton.masks.trie import (
    Spellings,
    build_trie,
    first_nodes,
    longest_below,
    pack_trie,
    spellings,
)
from ramify.grammar.automaton.masks.walk import walk
from ramify.grammar.automaton.members import NO_MEMBERS
from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.matcher import allow, mask_words
from ramify.grammar.vocabulary import Vocabulary

MAX_GROUP = 32
"""Number of characters of the longest tokens that are allowed together. Each length has a mask of 6 to 32
KB."""

LONG = (10, MAX_GROUP)
"""Lengths of runs with smaller tries. For each length n there is a trie without the tokens of up to n
characters, which is walked for runs of at least n characters."""

MAX_LOOPS = 64
"""Most `loops.Loop` objects that are kept for one vocabulary; each object takes 20 to 100 KB. Schemas have
few sets of characters."""

_MISSING: Any = object()
MOST_RESTS = 8
"""Divisor for the most rests of a loop: a loop is used only if at most one token in MOST_RESTS has a rest.
More rests would take tens of milliseconds to sort."""

FEW_NODES = 2000
"""Number of nodes below which a trie is small: a walk takes up to about 20 us."""

_NO_FRAMES = np.empty((0, 0), np.int32)

_tries: weakref.WeakKeyDictionary[Vocabulary, TokenTrie] = weakref.WeakKeyDictionary()


class Walk(NamedTuple):
    """Findings of a walk besides the mask."""

    examined: int
    """Number of entries of the stack, from the top, on which the mask depends. The height of the stack plus 1
    if the mask depends on the end of the stack."""
    rise: int
    """The largest number of tokens by which any allowed token raises the cost of completion."""


PackedTrie = tuple[np.ndarray, np.ndarray]
"""A trie packed by `pack_trie`, and its `Trie.longest`."""


class _Group(NamedTuple):
    """The tokens, divided for runs of one kind of characters. `masks` is (MAX_GROUP + 1, words); row n allows
    the tokens of up to n such characters. ``tries[n]``, for n = 0 and the lengths of `LONG`, has all other
    tokens, which must be walked."""

    masks: np.ndarray
    tries: dict[int, PackedTrie]


class TokenTrie:
    """Prefix tree of all tokens of a vocabulary that have bytes, made by `token_trie`.

    `whole` is the trie of these tokens, and `first_node` has its nodes of one byte (`trie.first_nodes`).
    `loops` has the most recently used loops, by the effect of each byte.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._spelled = vocabulary.spelled
        self._words = mask_words(vocabulary.size)
        self._tokens = tokens = spellings(self._spelled)
        self.loops: dict[bytes, Loop | None] = {}
        lengths = np.array([kind_lengths(text) for text, _ in self._spelled], np.uint8)
        self.whole = build_trie(tokens, np.full(len(self._spelled), 255, np.uint8))
        packed = pack_trie(self.whole)
        self._groups = [
            self._group(tokens, packed, np.ascontiguousarray(of)) for of in lengths.reshape(-1, len(KINDS)).T
        ]
        # If True, a run of plain characters leaves few nodes to be walked, and takes 8 us less than a loop.
        self._plain_is_small = len(self._groups[0].tries[LONG[-1]][1]) < FEW_NODES
        self.first_node = first_nodes(self.whole)
        self._levels = int(self.whole.depth.max(initial=0)) + 2

    def _group(self, tokens: Spellings, packed: np.ndarray, lengths: np.ndarray) -> _Group:
        bits = np.zeros((MAX_GROUP + 1, self._words * 32), np.uint8)
        for count in range(1, MAX_GROUP + 1):
            bits[count, tokens.ids[lengths <= count]] = 1
        tries = {0: (packed, longest_below(self.whole.end, self.whole.token_start, lengths))}
        for least in LONG:
            longer = lengths > least
            trie = build_trie(tokens.only(longer), lengths[longer])
            tries[least] = pack_trie(trie), trie.longest
        return _Group(np.packbits(bits, axis=1, bitorder="little").view(np.int32), tries)

    def _loop(self, kinds: np.ndarray, same: bool) -> Loop | None:
        """The tokens divided by `kinds`, as `byte_kinds` returns it. `same` says whether the state itself is
        the loop. None if no byte stays in the loop, or too many tokens have a rest (`MOST_RESTS`)."""
        in_loop, in_state = kinds
        key = bytes([same]) + kinds.tobytes()
        if LOOPS not in in_state:
            return None
        # Several threads may fill masks, so each access is one operation of the dict.
        found = self.loops.pop(key, _MISSING)
        if found is not _MISSING:
            self.loops[key] = found
            return found
        if len(self.loops) >= MAX_LOOPS:
            oldest, *_ = list(self.loops)
            self.loops.pop(oldest, None)
        begin = rests(self._tokens.data, self._tokens.sizes, in_loop, in_state)
        from_loop = (begin < self._tokens.sizes) & (begin >= (0 if same else 1))
        loop = None
        if from_loop.sum() + (begin == 0).sum() <= len(begin) // MOST_RESTS:
            row = np.zeros(self._words, np.int32)
            allow(row, self._tokens.ids[begin == self._tokens.sizes])
            loop = Loop(row, self._rests(begin, from_loop), None if same else self._rests(begin, begin == 0))
        self.loops[key] = loop
        return loop

    def _rests(self, begin: np.ndarray, chosen: np.ndarray) -> PackedTrie:
        """A trie of the tokens in `chosen`, each without its first `begin` bytes."""
        texts = [
            (self._spelled[i][0][begin[i] :], self._spelled[i][1]) for i in np.flatnonzero(chosen).tolist()
        ]
        trie = build_trie(spellings(sorted(texts)), np.ones(len(texts), np.uint8))
        return pack_trie(trie), trie.longest

    @cached_property
    def ids_of(self) -> dict[bytes, list[int]]:
        """The tokens by spelling."""
        found: dict[bytes, list[int]] = {}
        for text, token in self._spelled:
            found.setdefault(text, []).append(token)
        return found

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """The lowest token of each spelling."""
        return {text: tokens[0] for text, tokens in self.ids_of.items()}

    @cached_property
    def longest(self) -> int:
        """Number of bytes of the longest token."""
        return max(map(len, self.ids), default=0)

    def allow(
        self,
        automaton: PushdownAutomaton,
        state: int,
        stack: np.ndarray,
        row: np.ndarray,
        limit: int = NO_LIMIT,
        doubtful: np.ndarray | None = None,
        after: bytes = b"",
        frames: np.ndarray = _NO_FRAMES,
        tested: np.ndarray = _NO_FRAMES,
        run: bool = True,
    ) -> Walk:
        """Write into `row`, (words,) int32, the mask of the tokens that can be read from `state`, without
        stop tokens.

        `stack`: int32, the states to return to, the top first. `limit`: a token is allowed only if the cost
        of completion after it, less the cost of `stack`, is at most `limit`. `doubtful`, (words,) int32, gets
        the mask of the allowed tokens that begin or end a unique item, or come before one. `after`: only
        longer tokens that begin with `after` are allowed, if their other bytes can be read. `frames` and
        `tested` are those of `registers`, for an automaton that has `members`. `run`: whether the run of
        `state` may come.
        """
        arrays = automaton.arrays
        owed = int(frames[0, OWED]) if len(frames) else 0
        length = 0
        if run and not after and arrays.run[state] and arrays.run_cost[state] + owed <= limit:
            length = int(arrays.run[state])
        skipped, rise = min(length, MAX_GROUP), 0
        group, least = self._groups[0], 0
        walks = []
        if automaton.reads_many[state] and not after:
            plain = bool(length) and arrays.run_kind[state] == 0
            if not (plain and self._plain_is_small):
                walks = self._walks(automaton, state, limit, row, inside=plain)
        if walks:
            skipped = 0
        elif length:
            group = self._groups[arrays.run_kind[state]]
            least = max(length for length in group.tries if length <= skipped)
            row[:] = group.masks[skipped]
            rise = int(arrays.run_cost[state]) - int(arrays.cost[state])
        else:
            row[:] = 0
        bits = row.view(np.uint32)
        doubted = (bits[:0] if doubtful is None else doubtful).view(np.uint32)
        root = self._node(after) if after else -1
        if root is None:
            return Walk(0, 0)
        if automaton.nondeterministic:
            room, examined = ROOM, FULL
            while examined == FULL:
                examined, walked = walk_nondeterministic(
                    *group.tries[least], root, automaton.packed, stack, state, skipped, limit, MOST_STEPS,
                    room, bits, doubted, automaton.members or NO_MEMBERS, frames, tested,
                )  # fmt: skip
                room *= 4
        else:
            examined = walked = 0
            for start, (nodes, longest) in walks or [(state, group.tries[least])]:
                seen, risen = walk(
                    nodes, longest, root, automaton.packed, self._levels, stack, start, skipped, limit,
                    automaton.most_pushed, bits, doubted,
                )  # fmt: skip
                examined = max(examined, seen)
                if start != state:
                    risen += int(arrays.cost[start]) - int(arrays.cost[state])
                walked = max(walked, risen)
        return Walk(examined, max(rise, walked))

    def _walks(
        self, automaton: PushdownAutomaton, state: int, limit: int, row: np.ndarray, inside: bool
    ) -> list[tuple[int, PackedTrie]]:
        """Write into `row` the tokens that stay in the loop next to `state`. Returns the tries still to be
        walked, each with the state to walk it from.

        Leaves `row` as it is and returns an empty list if there is no loop, if `limit` may rule out some of
        its tokens, or if `inside` is True and the loop is another state. In the last case a run of plain
        characters leaves less to be walked.
        """
        arrays = automaton.arrays
        if automaton.nondeterministic:
            return []
        start, kinds = byte_kinds(automaton.packed, state)
        loop = None
        if (start == state or not inside) and arrays.cost[start] <= limit and not arrays.before_item[start]:
            loop = self._loop(kinds, start == state)
        if loop is None:
            return []
        row[:] = loop.row
        return [(start, loop.rests)] if loop.others is None else [(start, loop.rests), (state, loop.others)]

    def _node(self, text: bytes) -> int | None:
        """The node that spells `text`, or None if no token begins with `text`."""
        node = int(self.first_node[text[0]])
        for byte in text[1:]:
            if node < 0:
                return None
            child, end = node + 1, int(self.whole.end[node])
            while child < end and self.whole.byte[child] != byte:
                child = int(self.whole.end[child])
            node = child if child < end else -1
        return node if node >= 0 else None


def token_trie(vocabulary: Vocabulary) -> TokenTrie:
    """The `TokenTrie` of `vocabulary`, built once for each vocabulary."""
    if vocabulary not in _tries:
        _tries[vocabulary] = TokenTrie(vocabulary)
    return _tries[vocabulary]
