"""Base class of the matchers of pushdown automata, and the matcher for nondeterministic ones.

A matcher knows the configurations in which the text so far may be read: one in a deterministic automaton,
several in a nondeterministic one, none after a stop token. Its history is a chain of immutable steps, so that
forks share it and `rollback` only follows the chain.

Two recursive rules that begin alike, say a tree and any object, are both called, and each configuration has a
stack of its own. A token is allowed if any configuration allows it; the shortest completion is that of the
configuration with the least cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from ramify.grammar.engine.stack import Entry
from ramify.grammar.matcher import check_rollback

if TYPE_CHECKING:
    from ramify.grammar.engine.pushdown import PushdownGrammar

MOST_CONFIGURATIONS = 256
"""Most configurations that are followed. If there are more, those with the longest completions are dropped.
Schemas need few configurations: one for each level of nesting at which an object may belong to either of two
options."""

MOST_FORCED = 512
"""Most bytes that one call of `forced_bytes` returns."""

C = TypeVar("C", bound=tuple[Any, ...])
"""A configuration: a tuple whose first elements are the state and the stack."""


class Step(NamedTuple, Generic[C]):
    """A step of a matcher: the configurations after a token, the step before, and the number of accepted
    tokens."""

    configurations: tuple[C, ...]
    before: Step[C] | None
    accepted: int


class ConfigurationMatcher(Generic[C]):
    """Base class of the matchers of pushdown automata. A subclass defines `accept_bytes` and
    `forced_bytes`."""

    def __init__(self, grammar: PushdownGrammar, step: Step[C]) -> None:
        self._grammar = grammar
        self._step = step

    @classmethod
    def starting(cls, grammar: PushdownGrammar, start: C) -> Self:
        """A matcher at the beginning of the text, in the configuration `start`."""
        return cls(grammar, Step((start,), None, 0))

    # --- moving -----------------------------------------------------------------------------------------

    def accept(self, token: int) -> bool:
        vocabulary = self._grammar.vocabulary
        if self.finished or not 0 <= token < vocabulary.size:
            return False
        if vocabulary.tokens[token]:
            return self._accept_text(token, vocabulary.tokens[token])
        return self.complete and token in vocabulary.stop_ids and self._advance(())

    def _accept_text(self, token: int, data: bytes) -> bool:
        return self.accept_bytes(data)

    def accept_bytes(self, data: bytes) -> bool:
        raise NotImplementedError

    def _advance(self, configurations: tuple[C, ...]) -> bool:
        self._step = Step(configurations, self._step, self._step.accepted + 1)
        return True

    def rollback(self, count: int) -> None:
        check_rollback(count, self._step.accepted)
        for _ in range(count):
            assert self._step.before is not None
            self._step = self._step.before

    def fork(self) -> Self:
        return type(self)(self._grammar, self._step)

    # --- masks ------------------------------------------------------------------------------------------

    def fill_mask(self, row: np.ndarray, budget: int | None = None) -> bool:
        configurations = self._step.configurations
        if len(configurations) == 1:
            self._fill(configurations[0], row, budget)
        else:
            row[:] = 0
            own = np.empty_like(row)
            for configuration in configurations:
                self._fill(configuration, own, budget)
                row |= own
        if configurations and self.complete:
            row |= self._grammar.stop_bits
        return True

    def allow_beyond(self, prefix: bytes, row: np.ndarray, budget: int | None) -> bool:
        """Allow in `row`, in addition, the tokens that consist of `prefix` and further bytes which may come
        next.

        Returns False and leaves `row` unchanged if this matcher has no faster way than to read token after
        token.
        """
        own = np.empty_like(row)
        for state, stack, *_ in self._step.configurations:
            self._grammar.fill_beyond(prefix, state, stack, own, budget)
            row |= own
        return True

    def _fill(self, configuration: C, row: np.ndarray, budget: int | None) -> None:
        self._grammar.fill(configuration[0], configuration[1], row, budget)

    def forced_bytes(self) -> bytes:
        raise NotImplementedError

    # --- completions ------------------------------------------------------------------------------------

    @property
    def completion_tokens(self) -> int | None:
        return 0 if self.complete else min(map(self._cost, self._step.configurations))

    def _cost(self, configuration: C) -> int:
        state, stack = configuration[:2]
        return self._grammar.lists.cost[state] + (stack.cost if stack else 0)

    # --- ends -------------------------------------------------------------------------------------------

    @property
    def configurations(self) -> tuple[C, ...]:
        """All configurations in which the text so far may be read; none after a stop token."""
        return self._step.configurations

    @property
    def finished(self) -> bool:
        return not self._step.configurations

    @property
    def complete(self) -> bool:
        return self.finished or any(map(self._may_end, self._step.configurations))

    def _may_end(self, configuration: C) -> bool:
        state, stack = configuration[:2]
        return self._grammar.lists.final[state] and (stack is None or stack.complete)


class BranchingMatcher(ConfigurationMatcher[C]):
    """A matcher that follows every configuration.

    A subclass defines the return of a configuration (`_returned`) and a step along an edge (`_stepped`).
    """

    def _returned(self, configuration: C) -> C | None:
        """The configuration after a return; None if the rule cannot end here."""
        raise NotImplementedError

    def _stepped(self, configuration: C, target: int, push: int, byte: int) -> C | None:
        """The configuration after an edge that reads `byte`, or that calls a rule which will read `byte`;
        None if the edge may not be taken."""
        raise NotImplementedError

    def _after_byte(self, configurations: Iterable[C], byte: int) -> tuple[C, ...]:
        edges_of = self._grammar.lists.edges
        found: dict[C, None] = {}
        branches = [(configuration, False) for configuration in configurations]
        while branches:
            here, entered = branches.pop()
            # A rule called for this byte must read it. If the rule is empty, the caller's edges apply.
            back = None if entered else self._returned(here)
            if back is not None:
                branches.append((back, False))
            for low, high, target, push in zip(*edges_of(here[0]), strict=True):
                if low <= byte <= high:
                    after = self._stepped(here, target, push, byte)
                    if after is not None and target >= 0:
                        found[after] = None
                    elif after is not None:
                        branches.append((after, True))
        return tuple(found)

    def _after(self, configurations: tuple[C, ...], data: bytes) -> tuple[C, ...]:
        for byte in data:
            configurations = self._after_byte(configurations, byte)
            if len(configurations) > MOST_CONFIGURATIONS:
                configurations = tuple(sorted(configurations, key=self._cost)[:MOST_CONFIGURATIONS])
        return configurations

    def accept_bytes(self, data: bytes) -> bool:
        after = self._after(self._step.configurations, data)
        return bool(after) and self._advance(after)

    def forced_bytes(self) -> bytes:
        found = bytearray()
        here = self._step.configurations
        while 0 < len(here) <= MOST_CONFIGURATIONS and len(found) < MOST_FORCED:
            byte = None if any(map(self._may_end, here)) else self._only_byte(here)
            if byte is None:
                break
            found.append(byte)
            here = self._after_byte(here, byte)
        return bytes(found)

    def _only_byte(self, configurations: Iterable[C]) -> int | None:
        """The only byte that any of `configurations` can read; None if there is no such byte, or several."""
        only = None
        for configuration in configurations:
            here: C | None = configuration
            while here is not None:
                low, high, _, _ = self._grammar.lists.edges(here[0])
                for first, last in zip(low, high, strict=True):
                    if (first != only or first != last) and self._after_byte([configuration], first):
                        if only is not None or first != last:
                            return None
                        only = first
                here = self._returned(here)
        return only


class NondeterministicMatcher(BranchingMatcher[tuple[int, Entry | None]]):
    """A matcher for nondeterministic automata whose rules remember nothing: a configuration is a state and a
    stack."""

    @classmethod
    def at_beginning(cls, grammar: PushdownGrammar) -> NondeterministicMatcher:
        return cls.starting(grammar, (0, None))

    def _returned(self, configuration: tuple[int, Entry | None]) -> tuple[int, Entry | None] | None:
        state, stack = configuration
        return None if stack is None or not self._grammar.lists.final[state] else (stack.state, stack.parent)

    def _stepped(
        self, configuration: tuple[int, Entry | None], target: int, push: int, byte: int
    ) -> tuple[int, Entry | None]:
        stack = configuration[1]
        over = stack if push < 0 else self._grammar.stacks.pushed(push, stack)
        return self._grammar.returned(target, over) if target >= 0 else (~target, over)
