"""The spellings of a question's options as a tree of tokens: what is computed, and what is scored where.

Example, one letter a token; the form ends in ":", and its paths are "red", "redo" and "rose":

    : ─ r ─┬─ e ─ d       root     computes r        scores r behind ":", then e and o
           └─ o ─ s       span 1   computes o s      scores s and e
                          span 2   computes e d      scores d and o; "red" ends: the mass of all but o

A span goes from one fork to the next. The hidden state of a token scores the tokens that may follow it, so
the last token of a path is not computed unless another path goes on behind it, or an end of turn has to
follow it. A path's log-probability is the sum of its terms: a term for each token, and one for its end. The
end's term is 0 for a path that no other begins with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Path = tuple[int, ...]


class Mass(NamedTuple):
    """The logarithm of the probability that a path ends: a term to be computed.

    at : as in `Span.at`
    term : the index of the term
    left : the tokens that go on with longer paths, so that any other token ends the path; empty if an end of
        turn has to follow
    """

    at: int
    term: int
    left: tuple[int, ...]


class Span:
    """Tokens of paths between two forks, and the terms that their hidden states score.

    Entry i is the log-probability of the token ``wanted[i]``: term ``terms[i]``. It is computed from the
    hidden state of the span's token ``at[i]``, which is -1 for the token before the span.
    """

    __slots__ = ("at", "children", "masses", "paths", "terms", "tokens", "wanted")

    def __init__(
        self, tokens: Path, scored: list[tuple[int, int, int]], masses: list[Mass], children: list[Span]
    ) -> None:
        scored.sort()
        columns = np.array(scored, dtype=np.int64).reshape(-1, 3).T
        self.tokens = np.array(tokens, dtype=np.int32)
        self.at, self.terms, self.wanted = columns
        """(k,) int64 each; `at` is sorted, and `terms` are indices of terms."""
        self.masses = masses
        self.children = children
        """The spans behind the fork at the end, the one with the most paths last."""


class PathTree:
    """The tree of the `paths` of a form.

    ends : whether an end of turn has to follow each path
    """

    def __init__(self, paths: Sequence[Path], *, ends: bool) -> None:
        self._paths, self._ends = paths, ends
        lengths = [len(path) for path in paths]
        self._first_terms = np.concatenate([[0], np.cumsum(lengths) + np.arange(1, len(paths) + 1)]).tolist()
        self._path_of_term = np.repeat(np.arange(len(paths)), np.diff(self._first_terms))
        self.computed = 0
        """The number of tokens that are computed."""
        self.longest = max(lengths)
        """The number of tokens of the longest path."""
        tokens = [*itertools.chain.from_iterable(paths)] or [0]
        self.vocabulary = min(tokens), max(tokens)
        """The least and the greatest token id."""
        self.root = self._span(range(len(paths)), 0, -1)
        self.depth = len(paths).bit_length() if self.root.children else 1
        """The most spans of a branch of the tree that need a page and a state of their own. Below a fork the
        span with the most paths goes on in those of its parent, and any other has at most half as many paths
        as its parent."""

    @property
    def terms(self) -> int:
        return len(self._path_of_term)

    def logprobs(self, values: np.ndarray) -> tuple[float, ...]:
        """The log-probability of each path from `values`, (terms,) float64."""
        sums = np.bincount(self._path_of_term, weights=values, minlength=len(self._paths))
        return tuple(sums.tolist())

    def _span(self, group: Sequence[int], start: int, first: int) -> Span:
        """The span of the paths `group` (indices), which are equal up to token `start`, from that token on.

        first : index of the first token whose hidden state scores tokens for this span
        """
        paths, end = self._paths, start
        rest = 0 if self._ends else 1  # tokens of a path that need not be computed
        while True:
            longer = [index for index in group if len(paths[index]) - rest > end]
            following = {paths[index][end] for index in longer}
            if len(following) != 1:
                break
            end += 1
        self.computed += end - start
        tokens = paths[max(group, key=lambda index: len(paths[index]))][start:end] if end > start else ()
        scored, masses = [], []
        for index in group:
            path, term = paths[index], self._first_terms[index]
            length = len(path)
            scored += [(i - start, term + i + 1, path[i + 1]) for i in range(first, min(end, length - 1))]
            last = length - 1  # the token whose hidden state says how the path goes on
            if first <= last < end and (length <= start or path[last] == tokens[last - start]):
                left = () if self._ends else self._going_on(group, length)
                if self._ends or left:
                    masses.append(Mass(last - start, term + length, left))
        children = []
        for token in following:
            below = [index for index in group if len(paths[index]) > end and paths[index][end] == token]
            children.append((len(below), self._span(below, end, end)))
        children.sort(key=lambda child: child[0])
        return Span(tokens, scored, masses, [span for _, span in children])

    def _going_on(self, group: Sequence[int], length: int) -> tuple[int, ...]:
        """The tokens with which longer paths of `group` go on behind the first `length` tokens."""
        paths = self._paths
        return tuple(sorted({paths[index][length] for index in group if len(paths[index]) > length}))
