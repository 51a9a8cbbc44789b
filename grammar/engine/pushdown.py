"""Grammars that are pushdown automata, and the matcher for deterministic ones.

A mask depends on the state and on as much of the stack as tokens can pop. A mask is computed by a walk over
all tokens (`masks.token_trie`) when its state and stack first occur together. The mask is then cached, so
that most steps of a request cost one look-up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ramify.grammar.automaton.masks.nondeterministic_walk import NO_LIMIT
from ramify.grammar.automaton.masks.token_trie import Walk, token_trie
from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.engine.configurations import ConfigurationMatcher, NondeterministicMatcher
from ramify.grammar.engine.members import MemberMasks, MemberRegisters, memories
from ramify.grammar.engine.prefix_matcher import with_prefix
from ramify.grammar.engine.stack import NO_ITEMS, AutomatonLists, Entry, Memory, SharedStacks, states_of
from ramify.grammar.matcher import EXACT, Matcher, allow, mask_words, tokens_of
from ramify.grammar.vocabulary import Vocabulary
from ramify.messages import Enforcement

MASK_CACHE_BYTES = 16 << 20
"""Most memory for the cached masks of one grammar; a full cache is emptied."""

MAX_MOVES = 1 << 16
"""Most (state, token) pairs for which one grammar caches the result of reading the token."""

SHOWN = 16
"""Number of states, from the top of the stack, that are passed to a walk at first. The walk is repeated with
the whole stack if a token pops more, which is very rare."""


_NO_STATES = np.empty(0, np.int32)


class Mask(NamedTuple):
    """The tokens that a configuration allows."""

    row: np.ndarray
    rise: int
    """`token_trie.Walk.rise` of the mask."""
    doubtful: list[int]
    """Allowed tokens that may be ruled out because of unique items read before (`unique_items`)."""


class PushdownGrammar:
    """A compiled grammar, read from `PushdownAutomaton.to_bytes`."""

    def __init__(self, payload: bytes, vocabulary: Vocabulary, enforcement: Enforcement = EXACT) -> None:
        self.enforcement = enforcement
        self.automaton = PushdownAutomaton.from_bytes(payload)
        self.lists = AutomatonLists(self.automaton)
        self.stacks = SharedStacks(self.lists)
        members = self.automaton.members
        self.members = None if members is None else MemberRegisters(members, self.automaton.arrays.cost)
        self._member_masks = MemberMasks()
        self.vocabulary = vocabulary
        self.trie = token_trie(vocabulary)
        self._words = mask_words(vocabulary.size)
        self._masks: dict[int, Any] = {}
        self._kept_masks = 0
        self._most_masks = MASK_CACHE_BYTES // (4 * self._words) + 1
        self._moves: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._forced: dict[int, tuple[bytes, int, tuple[int, ...]]] = {}
        self.stop_bits = np.zeros(self._words, np.int32)
        allow(self.stop_bits, vocabulary.stop_ids)
        masks = min(self.automaton.states, self._most_masks)
        self.nbytes = self.automaton.nbytes + masks * 4 * self._words

    def matcher(self, prefix: bytes = b"") -> Matcher:
        return with_prefix(self._matcher(), prefix, self.vocabulary)

    def _matcher(self) -> Matcher:
        if self.automaton.items is not None or self.members is not None:
            from ramify.grammar.engine.remembering import RememberingMatcher

            return RememberingMatcher.at_beginning(self)
        if self.automaton.nondeterministic:
            return NondeterministicMatcher.at_beginning(self)
        return PushdownMatcher.at_beginning(self)

    # --- moving -------------------------------------------------------------------------------------

    def returned(self, state: int, stack: Entry | None) -> tuple[int, Entry | None]:
        """The configuration after the returns that must be taken, those from final states without edges."""
        while stack is not None and self.lists.exit[state]:
            state, stack = stack.state, stack.parent
        return state, stack

    def pushed(self, stack: Entry | None, states: tuple[int, ...]) -> Entry | None:
        for state in states:
            stack = Entry(state, stack, self.lists)
        return stack

    def after_token(self, state: int, stack: Entry | None, token: int) -> tuple[int, Entry | None] | None:
        """The configuration after `token`, which must have bytes; None if the token cannot be read."""
        key = state * self.vocabulary.size + token
        move = self._moves.get(key)
        if move is not None:
            return self.returned(move[0], self.pushed(stack, move[1]))
        after, below, new = self._read_all(state, stack, self.vocabulary.tokens[token])
        if after is None:
            return None
        if below is stack:
            if len(self._moves) >= MAX_MOVES:
                self._moves.clear()
            self._moves[key] = (after, tuple(new))
        return self.returned(after, self.pushed(below, tuple(new)))

    def after_bytes(self, state: int, stack: Entry | None, data: bytes) -> tuple[int, Entry | None] | None:
        """The configuration after `data`; None if `data` cannot be read."""
        after, below, new = self._read_all(state, stack, data)
        return None if after is None else self.returned(after, self.pushed(below, tuple(new)))

    def _read_all(
        self, state: int, stack: Entry | None, data: bytes
    ) -> tuple[int | None, Entry | None, list[int]]:
        """The state after `data` (None if `data` cannot be read), the remaining entries of `stack`, and the
        states pushed on these."""
        here: int | None = state
        new: list[int] = []
        for byte in data:
            here, stack = self._read(here, stack, new, byte)
            if here is None:
                break
        return here, stack, new

    def _read(
        self, state: Any, stack: Entry | None, new: list[int], byte: int
    ) -> tuple[int | None, Entry | None]:
        """The state after `byte` (None if `byte` cannot be read), and the remaining entries of `stack`.
        Changes `new`, which has the states pushed on `stack`."""
        lists = self.lists
        while True:
            edge = lists.edge(state, byte)
            if edge is None:
                if not lists.final[state]:
                    return None, stack
                if new:
                    state = new.pop()
                elif stack is None:
                    return None, stack
                else:
                    state, stack = stack.state, stack.parent
                continue
            target, push = edge
            if push >= 0:
                new.append(push)
            if target >= 0:
                return target, stack
            state = ~target

    # --- masks and forced text ------------------------------------------------------------------------

    def fill(
        self,
        state: int,
        stack: Entry | None,
        row: np.ndarray,
        budget: int | None,
        surcharge: int = 0,
        memory: Memory = NO_ITEMS,
    ) -> Mask:
        """Write into `row` the tokens that one configuration allows, without stop tokens.

        With a `budget`, a token is allowed only if the cost of completion after it, plus `surcharge`, is less
        than `budget`. `memory` is that of the rule being read. Returns the mask that does not consider the
        budget.
        """
        mask = self.mask(state, stack, memory)
        below = stack.cost if stack else 0
        most = self.lists.cost[state] + below + surcharge + mask.rise
        if self.members is not None:
            most += self.members.slack(state, stack, memory)
        if budget is None or most < budget:
            np.copyto(row, mask.row)
        else:
            self._walk(state, stack, row, memory, limit=budget - 1 - surcharge - below)
        return mask

    def fill_beyond(
        self,
        prefix: bytes,
        state: int,
        stack: Entry | None,
        row: np.ndarray,
        budget: int | None,
        memory: Memory = NO_ITEMS,
    ) -> None:
        """Write into `row`, as `fill` does, the tokens that begin with `prefix` and are longer."""
        limit = NO_LIMIT if budget is None else budget - 1 - (stack.cost if stack else 0)
        self._walk(state, stack, row, memory, limit=limit, after=prefix)

    def mask(self, state: int, stack: Entry | None, memory: Memory = NO_ITEMS) -> Mask:
        """The tokens that may come next, without stop tokens."""
        if self.members is not None:
            found = self._member_masks.find(state, stack, memory)
            return found or self._new_mask(state, stack, memory)
        known = self._masks.get(state)
        below = stack
        while type(known) is dict:
            known = known.get(below.state if below else -1)
            below = below.parent if below else None
        if known is None:
            known = self._new_mask(state, stack, memory)
        return known

    def _new_mask(self, state: int, stack: Entry | None, memory: Memory) -> Mask:
        row = np.empty(self._words, np.int32)
        doubtful = None if self.automaton.items is None else np.zeros(self._words, np.int32)
        (examined, rise), tested = self._walk(state, stack, row, memory, doubtful=doubtful)
        mask = Mask(row, rise, [] if doubtful is None else tokens_of(doubtful))
        if self._kept_masks >= self._most_masks:
            self._masks.clear()
            self._member_masks.clear()
            self._kept_masks = 0
        self._kept_masks += 1
        if tested is not None:
            self._member_masks.keep(mask, state, stack, memory, examined, tested)
            return mask
        # Under each state there is one level of dictionaries for each entry of the stack that was examined.
        path = [state, *states_of(stack, examined)]
        path += [-1] * (examined + 1 - len(path))
        place = self._masks
        for key in path[:-1]:
            inner = place.get(key)
            if type(inner) is not dict:
                inner = place[key] = {}
            place = inner
        place[path[-1]] = mask
        return mask

    def _walk(
        self, state: int, stack: Entry | None, row: np.ndarray, memory: Memory, **options: Any
    ) -> tuple[Walk, np.ndarray | None]:
        """Call `TokenTrie.allow` with as much of the stack as the mask depends on. Returns its result, and
        the array `tested` of `registers` (None in a grammar without registers)."""
        height = stack.height if stack else 0
        shown = min(height, SHOWN)
        tested = None
        # The most frequent case; this shortcut takes a third of the time.
        if height <= SHOWN and self.members is None:
            states = np.array(states_of(stack, height), np.int32) if height else _NO_STATES
            return self.trie.allow(self.automaton, state, states, row, **options), None
        while True:
            states = np.array(states_of(stack, shown), np.int32)
            if self.members is not None:
                frames = memories(stack, memory, shown)
                rows, tested = self.members.rows(frames, exact="limit" in options)
                run = self.members.may_run(state, memory, rows, tested)
                options |= {"frames": rows, "tested": tested, "run": run}
            walk = self.trie.allow(self.automaton, state, states, row, **options)
            if walk.examined <= shown or shown == height:
                return walk, tested
            shown = height

    def forced(self, state: int, stack: Entry | None) -> bytes:
        """The bytes that must come next. The automaton must be deterministic."""
        lists = self.lists
        found = b""
        while True:
            known = self._forced.get(state)
            if known is None:
                known = self._forced[state] = self._forced_inside(state)
            data, state, new = known
            found += data
            stack = self.pushed(stack, new)
            if stack is None or not lists.exit[state]:
                return found
            state, stack = self.returned(state, stack)

    def _forced_inside(self, state: int) -> tuple[bytes, int, tuple[int, ...]]:
        """The forced bytes up to the end of the rule of `state` at most, the state after these bytes, and the
        states that they push."""
        lists = self.lists
        found = bytearray()
        new: list[int] = []
        while True:
            while new and lists.exit[state]:
                state = new.pop()
            if lists.final[state]:
                break
            low, high, _, _ = lists.edges(state)
            if len(low) != 1 or low[0] != high[0]:
                break
            found.append(low[0])
            after, _ = self._read(state, None, new, low[0])
            assert after is not None
            state = after
        return bytes(found), state, tuple(new)


class PushdownMatcher(ConfigurationMatcher[tuple[int, Entry | None]]):
    """A matcher for deterministic automata: one configuration at a time."""

    @classmethod
    def at_beginning(cls, grammar: PushdownGrammar) -> PushdownMatcher:
        return cls.starting(grammar, grammar.returned(0, None))

    def _accept_text(self, token: int, data: bytes) -> bool:
        ((state, stack),) = self._step.configurations
        after = self._grammar.after_token(state, stack, token)
        return after is not None and self._advance((after,))

    def accept_bytes(self, data: bytes) -> bool:
        if self.finished:
            return False
        ((state, stack),) = self._step.configurations
        after = self._grammar.after_bytes(state, stack, data)
        return after is not None and self._advance((after,))

    def forced_bytes(self) -> bytes:
        return b"" if self.finished else self._grammar.forced(*self._step.configurations[0])
