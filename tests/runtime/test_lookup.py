"""Prompt lookup against a search that looks at every place."""

from __future__ import annotations

import numpy as np

from ramify.runtime.scheduler.lookup import LONGEST, Found, find


def naive(tokens: list[int], end: list[int]) -> Found | None:
    """The latest of the longest occurrences, place by place."""
    found = None
    for place in range(1, len(tokens)):
        length = 0
        while length < min(LONGEST, len(end), place) and tokens[place - 1 - length] == end[-1 - length]:
            length += 1
        if length and (found is None or length >= found.length):
            found = Found(place, length)
    return found


def test_the_latest_of_the_longest_occurrences_is_found() -> None:
    draw = np.random.default_rng(7)
    for _ in range(2000):
        tokens = draw.integers(0, 3, draw.integers(0, 14))
        end = draw.integers(0, 3, draw.integers(1, 12))
        found = find(tokens.astype(np.int32), end.astype(np.int32))
        assert found == naive(tokens.tolist(), end.tolist()), (tokens, end)


def test_an_occurrence_at_the_very_beginning() -> None:
    assert find(np.array([5, 1, 1], np.int32), np.array([2, 5], np.int32)) == Found(1, 1)
