"""The spellings of a question's options as a tree of tokens: what is computed, and what is scored where.

Example, one letter a token; the form ends in ":", and its paths are "red", "redo" and "rose":

    : ─ r ─┬─ e ─ d       root     computes r        scores r behind ":", then e and o
           └─ o ─ s       span 1   computes o s      scores s and e
                          span 2   computes e d      scores d and o; "red" ends: the mass of all but o

A span goes from one fork to the next. The hidden state of a token scores the tokens that may follow it, so
the last token of a path is not computed unless another path goes on behind it, or an end of turn has to
follow it. A path's log-probability is the sum of its terms: one for each token, which paths that begin alike
share, and one for its end. A path that no other goes on from has no term for its end.

All work is linear in the number of tokens. `PathSet` is what a request needs when it arrives. The tree
itself is built when its first branch is taken.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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

    __slots__ = ("at", "children", "masses", "terms", "tokens", "wanted")

    def __init__(
        self, tokens: Sequence[int], scored: Sequence[tuple[int, int, int]], masses: Sequence[Mass]
    ) -> None:
        self.tokens = np.array(tokens, dtype=np.int32)
        self.at, self.terms, self.wanted = np.array(scored, dtype=np.int64).reshape(-1, 3).T
        """(k,) int64 each; `at` is sorted, and `terms` are indices of terms."""
        self.masses = masses
        self.children: list[Span] = []
        """The spans behind the fork at the end, the one with the most paths last."""


class PathSet:
    """Different paths, and what their tree costs.

    ends : whether an end of turn has to follow each path
    """

    def __init__(self, paths: Iterable[Path], *, ends: bool) -> None:
        self._paths, self._ends = tuple(paths), ends
        self.longest = max(map(len, self._paths))
        """The number of tokens of the longest path."""
        tokens = [*itertools.chain.from_iterable(self._paths)] or [0]
        self.vocabulary = min(tokens), max(tokens)
        """The least and the greatest token id."""
        rest = 0 if ends else 1  # tokens of a path that are not computed if no other goes on from it
        self.computed = _beginnings(self._paths, rest)
        """The number of tokens that are computed."""
        forks = self.computed > max(0, self.longest - rest)
        self.depth = len(self._paths).bit_length() if forks else 1
        """The most spans of a branch of the tree that need a page and a state of their own. Below a fork the
        span with the most paths goes on in those of its parent, and any other has at most half as many paths
        as its parent."""

    @functools.cached_property
    def tree(self) -> PathTree:
        return PathTree(self._paths, ends=self._ends)


def _beginnings(paths: Iterable[Path], rest: int) -> int:
    """The number of different beginnings of `paths` without their last `rest` tokens."""
    count, root = 0, dict[int, Any]()
    for path in paths:
        node = root
        for token in path[: len(path) - rest]:
            following = node.get(token)
            if following is None:
                count += 1
                following = node[token] = {}
            node = following
    return count


class PathTree:
    """The tree of different paths. Its nodes are tokens: node 0 is the form's last token, and term n - 1 is
    the log-probability of node n. The terms of ends come after these."""

    def __init__(self, paths: Sequence[Path], *, ends: bool) -> None:
        self._ends = ends
        self._ways: list[dict[int, int]] = [{}]
        """The nodes behind each node, by token."""
        self._weights = [0]
        """The number of paths through each node."""
        path_of: list[int] = []
        terms: list[int] = []
        last: list[int] = []
        for index, path in enumerate(paths):
            node = 0
            for token in path:
                node = self._ways[node].setdefault(token, len(self._ways))
                if node == len(self._ways):
                    self._ways.append({})
                    self._weights.append(0)
                self._weights[node] += 1
                path_of.append(index)
                terms.append(node - 1)
            last.append(node)
        self.terms = len(self._ways) - 1
        """The number of terms."""
        self._end_terms: dict[int, int] = {}
        """The term of the end of each node at which a path ends, if it has one."""
        for index, node in enumerate(last):
            if ends or self._ways[node]:
                path_of.append(index)
                terms.append(self.terms)
                self._end_terms[node] = self.terms
                self.terms += 1
        self._places = {path: index for index, path in enumerate(paths)}
        self._path_of, self._terms = np.array([path_of, terms], dtype=np.int64)
        """Pairs of a path and one of its terms."""
        self.root, following = self._span(0)
        waiting = [(self.root, following)]
        while waiting:  # no recursion: paths may fork at each of their tokens
            span, following = waiting.pop()
            for _, node, token in sorted(following):
                child, behind = self._span(node, token)
                span.children.append(child)
                waiting.append((child, behind))

    def logprobs(self, values: np.ndarray, paths: Iterable[Path]) -> tuple[float, ...]:
        """The log-probabilities of `paths` from `values`, (terms,) float64."""
        sums = np.bincount(self._path_of, values[self._terms], len(self._places)).tolist()
        return tuple([sums[self._places[path]] for path in paths])

    def _span(self, node: int, *tokens: int) -> tuple[Span, list[tuple[int, int, int]]]:
        """The span that begins with `tokens`, the token of `node` or none, and (weight, node, token) of the
        first node of each span behind it."""
        known, scored, masses = [*tokens], list[tuple[int, int, int]](), list[Mass]()
        while True:
            at, ways = len(known) - 1, self._ways[node]
            scored += [(at, following - 1, token) for token, following in ways.items()]
            if node in self._end_terms:
                masses.append(Mass(at, self._end_terms[node], () if self._ends else tuple(sorted(ways))))
            computed = [
                (self._weights[following], following, token)
                for token, following in ways.items()
                if self._ends or self._ways[following]
            ]
            if len(computed) != 1:
                return Span(known, scored, masses), computed
            ((_, node, token),) = computed
            known.append(token)
