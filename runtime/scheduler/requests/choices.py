"""The choices that one request scores: for each choice, the log-probabilities of its tokens after the prompt.

The tokens of all choices form a tree. Each token of the tree is computed once:

    prompt P, choices "red", "redwine" and "really", one letter a token

        P ─ r ─ e ─┬─ d ─ w ─ i ─ n ─ e      span 1: P r e      scores r, e, then d and a
                   └─ a ─ l ─ l ─ y          span 2: d w i n    scores w i n e
                                             span 3: a l l      scores l l y

A span goes from one fork of the tree to the next. The hidden state of a token scores all tokens that may
follow it, so leaves are scored and never computed. The first span, which begins with the prompt, is computed
by the submitted request itself (the head). Each other span is computed by a request that exists inside the
scheduler only. That request finds the tokens before its span in the prefix cache, and the spans after one
fork are admitted together. If the choices are also scored without the prompt, they form a second tree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ramify.engine_messages import Submit
from ramify.messages import ChoiceScore, TokenLogprobs
from ramify.radix.tree import TokenTree
from ramify.runtime.scheduler.requests.request import Request


class Choice(NamedTuple):
    """The tokens of one choice. In the tree after the prompt, the tokens follow the part of the prompt that
    all choices share. In the tree without the prompt, the tokens are the whole sequence."""

    ids: tuple[int, ...]
    first: int
    """Index in `ids` of the first token that is scored. The tokens before it belong to the prompt."""
    values: list[float | None]
    """Log-probabilities of ``ids[first:]``, filled in as they are computed. A token without any token before
    it keeps None."""

    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs(ids=self.ids[self.first :], logprobs=tuple(self.values))


class ScoredSpan:
    """The tokens of `choices` from index `start` of `Choice.ids` to the next fork, or up to the leaves.

    base : number of tokens before ``Choice.ids``
    shared : the index up to which all `choices` have the same tokens
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
        """By the position of a hidden state, the tokens that this state scores, each with its choice."""
        for choice in choices:
            for place in range(max(shared, choice.first), min(end + 1, len(choice.ids))):
                if base + place > 0:
                    self.wanted.setdefault(base + place - 1, []).append((choice.ids[place], choice))
        self.first_state = min(self.wanted, default=base + end)

    def note(self, position: int, values: Sequence[float]) -> None:
        """Record `values`: the log-probabilities of the tokens of ``wanted[position]``, in their order."""
        for (_, choice), value in zip(self.wanted[position], values, strict=True):
            choice.values[position + 1 - self._base - choice.first] = value

    def following(self) -> list[ScoredSpan]:
        """The spans after the fork at the end of this span; empty if only leaves follow."""
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
        """The number of tokens that are computed in all, including the prompt."""
        self.longest = base + max(len(choice.ids) for choice in self._behind)
        """The number of tokens of the prompt and the longest choice."""
        self.open: set[Request] = set()
        """Requests whose spans are not computed yet."""
        self.resting: list[Request] = []
        """Requests whose spans are computed and are followed by other spans."""
        self.numbers = itertools.count(1)
        self.done_tokens = 0
        """The number of tokens of all computed spans except the head's span."""

    def reached(self, head: Request) -> int:
        """The number of computed tokens of all spans except the span of `head`."""
        return self.done_tokens + sum(
            max(0, part.reached - part.length + len(part.scoring.span.tokens))
            for part in self.open
            if part is not head and part.scoring is not None
        )

    def alone(self) -> list[ScoredSpan]:
        """The first spans of the tree of the choices without the prompt; empty if there is no such tree."""
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
    """The span that one request computes for the choices of `head`. That request may be `head` itself."""

    choices: ChoiceTree
    span: ScoredSpan
    head: Request


def _choice(ids: tuple[int, ...], first: int) -> Choice:
    return Choice(ids, first, [None] * (len(ids) - first))


def _roots(root: ScoredSpan) -> list[ScoredSpan]:
    """The first spans of the tree that begins with `root`: `root` itself, or the spans after `root` if the
    tree forks at once, so that `root` has no tokens."""
    return [root] if root.tokens else root.following()


def _computed(choices: Sequence[Choice]) -> int:
    """The number of distinct tokens of the tree of `choices`, without its leaves, which are not computed."""
    tree = TokenTree()
    for choice in choices:
        tree.insert(choice.ids[:-1])
    return tree.tokens
