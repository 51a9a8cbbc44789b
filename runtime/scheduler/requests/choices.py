"""The choices that one request scores: how likely is each behind its prompt, token by token.

The tokens of all choices are a tree, of which each token is computed once:

    prompt P, choices "red", "redwine" and "really", one letter a token

        P ─ r ─ e ─┬─ d ─ w ─ i ─ n ─ e      span 1: P r e      scores r, e, then d and a
                   └─ a ─ l ─ l ─ y          span 2: d w i n    scores w i n e
                                             span 3: a l l      scores l l y

A span goes from one fork of the tree to the next. The state of a token scores all tokens that may follow it,
so leaves are scored and never computed. The first span, which begins with the prompt, is the submitted
request itself (the head). Each other span is a request inside the scheduler: it finds what comes before it in
the prefix cache, and the spans behind one fork are admitted together. Choices that are also scored without
the prompt are a second tree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ramify.engine_messages import Submit
from ramify.messages import ChoiceScore, TokenLogprobs
from ramify.radix.token_tree import TokenTree
from ramify.runtime.scheduler.requests.request import Request


class Choice(NamedTuple):
    """The tokens of one choice: behind the tokens that all choices share with the prompt, or behind
    nothing."""

    ids: tuple[int, ...]
    first: int
    """Index of the first of `ids` that is scored; tokens before it are the prompt's."""
    values: list[float | None]
    """Log-probabilities of ``ids[first:]``, filled in as they are found. The first token of a sequence has
    none."""

    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs(ids=self.ids[self.first :], logprobs=tuple(self.values))


class ScoredSpan:
    """The tokens of `choices` from place `start` to the next fork, or to where only leaves follow.

    base : tokens before place 0
    shared : all `choices` have the same tokens up to this place
    """

    def __init__(self, choices: Sequence[Choice], base: int, start: int, shared: int) -> None:
        longer = [choice for choice in choices if shared < len(choice.ids) - 1]
        end = shared
        while len({choice.ids[end] for choice in longer}) == 1:
            end += 1
            longer = [choice for choice in longer if end < len(choice.ids) - 1]
        self._longer, self._base, self._end = longer, base, end
        self.tokens = max(choices, key=lambda choice: len(choice.ids)).ids[start:end]
        self.wanted: dict[int, list[tuple[int, Choice]]] = {}
        """Tokens that each state scores, with their choices, by the position of the state."""
        for choice in choices:
            for place in range(max(shared, choice.first), min(end + 1, len(choice.ids))):
                if base + place > 0:
                    self.wanted.setdefault(base + place - 1, []).append((choice.ids[place], choice))
        self.first_state = min(self.wanted, default=base + end)

    def note(self, position: int, values: Sequence[float]) -> None:
        """Record the log-probabilities of the tokens that the state at `position` scores."""
        for (_, choice), value in zip(self.wanted[position], values, strict=True):
            choice.values[position + 1 - self._base - choice.first] = value

    def following(self) -> list[ScoredSpan]:
        """The spans behind the fork at the end of this one."""
        branches: dict[int, list[Choice]] = {}
        for choice in self._longer:
            branches.setdefault(choice.ids[self._end], []).append(choice)
        return [ScoredSpan(branch, self._base, self._end, self._end + 1) for branch in branches.values()]


class ChoiceTree:
    """All choices of one request, and the requests that compute their spans."""

    def __init__(self, submit: Submit) -> None:
        base = min(choice.shared for choice in submit.choices)
        self._exact = [choice.shared == len(submit.ids) for choice in submit.choices]
        self._prompt = submit.ids[:base]
        self._behind = [
            _choice(submit.ids[base : choice.shared] + choice.ids, choice.shared - base + choice.dropped)
            for choice in submit.choices
        ]
        self._alone: list[Choice] = []
        self._trees = [self._behind]
        if submit.unconditional and submit.ids:
            self._alone = [_choice(choice.ids[choice.first :], 0) for choice in self._behind]
            self._trees.append(self._alone)
        elif submit.unconditional:
            self._alone = self._behind  # without a prompt both are the same
        self.first = ScoredSpan(self._behind, base, 0, 0)
        self.ids = self._prompt + self.first.tokens
        """The prompt and the first span."""
        self.tokens = base + sum(map(_computed, self._trees))
        """Tokens that are computed in all, the prompt's included."""
        self.longest = base + max(len(choice.ids) for choice in self._behind)
        """Tokens of the prompt with its longest choice."""
        self.open: set[Request] = set()
        """Requests whose spans are not computed yet."""
        self.resting: list[Request] = []
        """Requests whose spans are computed, and have spans behind them."""
        self.numbers = itertools.count(1)
        self.done_tokens = 0
        """Tokens of the spans that are computed, without the first one."""

    def reached(self, head: Request) -> int:
        """Tokens of all spans but the first, which is `head`, that are computed."""
        return self.done_tokens + sum(
            max(0, part.reached - part.length + len(part.scoring.span.tokens))
            for part in self.open
            if part is not head and part.scoring is not None
        )

    def alone(self) -> list[ScoredSpan]:
        """The first spans of the choices without the prompt."""
        return [span for tree in self._trees[1:] for span in _roots(ScoredSpan(tree, 0, 0, 0))]

    def paths(self) -> Iterator[np.ndarray]:
        """The sequences that are computed, each (n,) int32."""
        yield np.array(self.ids, dtype=np.int32)
        for before, choices in zip((self._prompt, ()), self._trees, strict=False):
            for ids in {choice.ids[:-1] for choice in choices}:
                yield np.array(before + ids, dtype=np.int32)

    def scores(self) -> tuple[ChoiceScore, ...]:
        alone: list[TokenLogprobs | None] = [choice.logprobs() for choice in self._alone]
        alone = alone or [None] * len(self._behind)
        return tuple(
            ChoiceScore(tokens=choice.logprobs(), behind=exact, unconditional=unconditional)
            for choice, exact, unconditional in zip(self._behind, self._exact, alone, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringState:
    """The span that one request computes for the choices of `head`, which may be the request itself."""

    choices: ChoiceTree
    span: ScoredSpan
    head: Request


def _choice(ids: tuple[int, ...], first: int) -> Choice:
    return Choice(ids, first, [None] * (len(ids) - first))


def _roots(root: ScoredSpan) -> list[ScoredSpan]:
    """`root`, the first span of a tree, or the spans behind it where the tree forks at once."""
    return [root] if root.tokens else root.following()


def _computed(choices: Sequence[Choice]) -> int:
    """The number of distinct tokens of a tree that are computed."""
    tree = TokenTree()
    for choice in choices:
        tree.insert(choice.ids[:-1])
    return tree.tokens
