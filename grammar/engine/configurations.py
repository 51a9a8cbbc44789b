"""Base class of the matchers of pushdown automata: accepting, taking back, masks and completions.

A matcher knows the configurations in which the text so far may be read: one in a deterministic automaton,
several in a nondeterministic one, none after a stop token. Its history is a chain of immutable steps, so that
forks share it and `rollback` only follows the chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from ramify.grammar.matcher import check_rollback

if TYPE_CHECKING:
    from ramify.grammar.engine.pushdown import PushdownGrammar

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
