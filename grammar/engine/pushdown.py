"""The engine for grammars that have a deterministic pushdown automaton (`automaton.frames`).

A mask depends on the state and on as much of the stack as tokens can pop. It is computed, by a walk of all
tokens (`automaton.token_trie`), when these are first met together, and then kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.automaton.token_trie import NO_LIMIT, token_trie
from ramify.grammar.engine.prefix_matcher import PrefixMatcher, fewest_tokens
from ramify.grammar.engine.stack import AutomatonLists, Entry, states_of
from ramify.grammar.matcher import Matcher, mask_words, taken_back
from ramify.grammar.vocabulary import Vocabulary

MASK_CACHE_BYTES = 16 << 20
"""Most memory for the masks that one grammar keeps; when it is full, it begins anew."""

MAX_MOVES = 1 << 16
"""Most (state, token) pairs whose outcome one grammar keeps."""

SHOWN = 16
"""Of the stack so many states are shown to a walk at first: more are popped by very few tokens."""

FINISHED = -1
"""State after a stop token."""


class Step(NamedTuple):
    """A configuration, and the one before it: what a matcher has accepted is a chain of these."""

    state: int
    stack: Entry | None
    lead: bytes
    before: Step | None
    accepted: int


class Mask(NamedTuple):
    """The tokens that a configuration allows."""

    row: np.ndarray
    rise: int
    """As in `token_trie.Walk`."""
    doubtful: list[int]
    """Allowed tokens that what was read before may forbid (`engine.fresh`)."""


class PushdownGrammar:
    """A compiled grammar, read from `Frames.to_bytes`."""

    def __init__(self, payload: bytes, vocabulary: Vocabulary) -> None:
        self.automaton = PushdownAutomaton.from_bytes(payload)
        self.lists = AutomatonLists(self.automaton)
        self.unenforced = self.automaton.unenforced
        self.vocabulary = vocabulary
        self.trie = token_trie(vocabulary)
        self._words = mask_words(vocabulary.size)
        self._masks: dict[int, Any] = {}
        self._kept_masks = 0
        self._most_masks = MASK_CACHE_BYTES // (4 * self._words) + 1
        self._moves: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._forced: dict[int, tuple[bytes, int, tuple[int, ...]]] = {}
        self.stop_bits = np.zeros(self._words, np.int32)
        for token in vocabulary.stop_ids:
            self.stop_bits.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        masks = min(self.automaton.states, self._most_masks)
        self.nbytes = self.automaton.nbytes + masks * 4 * self._words

    def matcher(self, prefix: bytes = b"") -> Matcher:
        if self.automaton.nondeterministic and self.automaton.items is not None:
            from ramify.grammar.engine.nondeterministic_unique import NondeterministicUniqueMatcher

            both = NondeterministicUniqueMatcher.begin(self, self.automaton.items)
            return PrefixMatcher(both, prefix, self.vocabulary) if prefix else both
        if self.automaton.nondeterministic:
            from ramify.grammar.engine.nondeterministic import NondeterministicMatcher

            forking = NondeterministicMatcher.begin(self)
            return PrefixMatcher(forking, prefix, self.vocabulary) if prefix else forking
        if self.automaton.items is not None:
            from ramify.grammar.engine.unique_items import UniqueItemsMatcher

            after_item = UniqueItemsMatcher.begin(self, self.automaton.items)
            return PrefixMatcher(after_item, prefix, self.vocabulary) if prefix else after_item
        return PushdownMatcher(self, Step(*self.normal(0, None), prefix, None, 0))

    # --- moving -------------------------------------------------------------------------------------

    def normal(self, state: int, stack: Entry | None) -> tuple[int, Entry | None]:
        """The same configuration without the rules on top that have ended and cannot go on."""
        while stack is not None and self.lists.exit[state]:
            state, stack = stack.state, stack.parent
        return state, stack

    def pushed(self, stack: Entry | None, states: tuple[int, ...]) -> Entry | None:
        for state in states:
            stack = Entry(state, stack, self.lists)
        return stack

    def after_token(self, state: int, stack: Entry | None, token: int) -> tuple[int, Entry | None] | None:
        """The configuration after a token that has bytes, or None."""
        key = state * self.vocabulary.size + token
        move = self._moves.get(key)
        if move is not None:
            return self.normal(move[0], self.pushed(stack, move[1]))
        below = stack
        here: int | None = state
        new: list[int] = []
        for byte in self.vocabulary.tokens[token]:
            here, below = self._read(here, below, new, byte)
            if here is None:
                return None
        assert here is not None
        if below is stack:
            if len(self._moves) >= MAX_MOVES:
                self._moves.clear()
            self._moves[key] = (here, tuple(new))
        return self.normal(here, self.pushed(below, tuple(new)))

    def after_bytes(self, state: int, stack: Entry | None, data: bytes) -> tuple[int, Entry | None] | None:
        """The configuration after `data`, or None."""
        here: int | None = state
        new: list[int] = []
        for byte in data:
            here, stack = self._read(here, stack, new, byte)
            if here is None:
                return None
        assert here is not None
        return self.normal(here, self.pushed(stack, tuple(new)))

    def _read(
        self, state: Any, stack: Entry | None, new: list[int], byte: int
    ) -> tuple[int | None, Entry | None]:
        """The state after `byte` and what is left of `stack`; `new` lies on it and is changed."""
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

    # --- what may come --------------------------------------------------------------------------------

    def mask(self, state: int, stack: Entry | None) -> Mask:
        """The tokens that may come next, without stop tokens."""
        known = self._masks.get(state)
        below = stack
        while type(known) is dict:
            known = known.get(below.state if below else -1)
            below = below.parent if below else None
        if known is None:
            known = self._new_mask(state, stack)
        return known

    def _new_mask(self, state: int, stack: Entry | None) -> Mask:
        row = np.empty(self._words, np.int32)
        doubtful = None if self.automaton.items is None else np.zeros(self._words, np.int32)
        examined, rise = self.walk(state, stack, row, doubtful=doubtful)
        mask = Mask(row, rise, [] if doubtful is None else tokens_of(doubtful))
        if self._kept_masks >= self._most_masks:
            self._masks.clear()
            self._kept_masks = 0
        self._kept_masks += 1
        # Below each state a dictionary for each entry of the stack that made a difference.
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

    def walk(self, state: int, stack: Entry | None, row: np.ndarray, **options: Any) -> tuple[int, int]:
        """`TokenTrie.allow` with as much of the stack as makes a difference."""
        height = stack.height if stack else 0
        shown = min(height, SHOWN)
        while True:
            states = np.array(states_of(stack, shown), np.int32)
            walk = self.trie.allow(self.automaton, state, states, row, **options)
            if walk.examined <= shown or shown == height:
                return walk
            shown = height

    def forced(self, state: int, stack: Entry | None) -> bytes:
        """Bytes that must come next."""
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
            state, stack = self.normal(state, stack)

    def _forced_inside(self, state: int) -> tuple[bytes, int, tuple[int, ...]]:
        """The same without what is known from the stack; then the state after it, and what is pushed."""
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


def tokens_of(row: np.ndarray) -> list[int]:
    """The tokens that the mask `row` allows."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


class PushdownMatcher:
    """A matcher where every text is read in one way."""

    free = False

    def __init__(self, grammar: PushdownGrammar, step: Step) -> None:
        self._grammar = grammar
        self._step = step

    def accept(self, token: int) -> bool:
        grammar = self._grammar
        vocabulary = grammar.vocabulary
        step = self._step
        if step.state == FINISHED or not 0 <= token < vocabulary.size:
            return False
        data = vocabulary.tokens[token]
        if not data:
            if not self.complete or token not in vocabulary.stop_ids:
                return False
            self._step = Step(FINISHED, None, b"", step, step.accepted + 1)
            return True
        if step.lead:
            return self.accept_bytes(data)
        after = grammar.after_token(step.state, step.stack, token)
        if after is None:
            return False
        self._step = Step(*after, b"", step, step.accepted + 1)
        return True

    def accept_bytes(self, data: bytes) -> bool:
        step = self._step
        if step.state == FINISHED:
            return False
        shared = min(len(data), len(step.lead))
        if data[:shared] != step.lead[:shared]:
            return False
        after = self._grammar.after_bytes(step.state, step.stack, data[shared:])
        if after is None:
            return False
        self._step = Step(*after, step.lead[shared:], step, step.accepted + 1)
        return True

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        step = self._step
        if step.state == FINISHED:
            row[:] = 0
            return True
        grammar = self._grammar
        if step.lead:
            self._fill_lead(row, budget)
            return True
        mask = grammar.mask(step.state, step.stack)
        if budget is None or self._cost() + mask.rise < budget:
            np.copyto(row, mask.row)
        else:
            left = budget - 1 - (step.stack.cost if step.stack else 0)
            grammar.walk(step.state, step.stack, row, limit=left)
        if self.complete:
            row |= grammar.stop_bits
        return True

    def _fill_lead(self, row: np.ndarray, budget: int | None) -> None:
        step = self._step
        tokens = fewest_tokens(step.lead, self._grammar.vocabulary)
        self._grammar.walk(
            step.state,
            step.stack,
            row,
            limit=NO_LIMIT if budget is None else budget - 1,
            lead=step.lead,
            lead_costs=np.array([len(rest) for rest in tokens], np.int32),
        )

    def _cost(self) -> int:
        step = self._step
        if step.lead:
            return len(fewest_tokens(step.lead, self._grammar.vocabulary)[0]) + self._cost_after_lead()
        return self._cost_after_lead()

    def _cost_after_lead(self) -> int:
        step = self._step
        return self._grammar.lists.cost[step.state] + (step.stack.cost if step.stack else 0)

    def forced_bytes(self) -> bytes:
        step = self._step
        if step.state == FINISHED:
            return b""
        return step.lead + self._grammar.forced(step.state, step.stack)

    @property
    def completion_tokens(self) -> int | None:
        return 0 if self._step.state == FINISHED else self._cost()

    def completion(self) -> list[int] | None:
        grammar = self._grammar
        state, stack, lead = self._step[:3]
        if state == FINISHED:
            return []
        tokens = fewest_tokens(lead, grammar.vocabulary)[0] if lead else []
        while True:
            while stack is not None and not grammar.lists.cost[state]:
                state, stack = stack.state, stack.parent
            if not grammar.lists.cost[state]:
                return tokens
            tokens.append(int(grammar.automaton.token[state]))
            after = grammar.after_token(state, stack, tokens[-1])
            assert after is not None
            state, stack = after

    def rollback(self, count: int) -> None:
        self._step = taken_back(self._step, count)

    def fork(self) -> PushdownMatcher:
        return PushdownMatcher(self._grammar, self._step)

    @property
    def finished(self) -> bool:
        return self._step.state == FINISHED

    @property
    def complete(self) -> bool:
        step = self._step
        if step.state == FINISHED:
            return True
        return (
            not step.lead
            and self._grammar.lists.final[step.state]
            and (step.stack is None or step.stack.complete)
        )
