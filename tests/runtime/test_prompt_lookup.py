"""Prompt lookup compared with a search of every position."""

from __future__ import annotations

import numpy as np

from ramify.runtime.scheduler.speculation.drafter import (
    CAPACITY,
    LONGEST_MATCH,
    SCOPES,
    Found,
    RecentOutputs,
    copied,
    find,
)


def naive(tokens: list[int], end: list[int]) -> Found | None:
    """The latest of the longest occurrences of the end of `end` in `tokens`; None if there is none."""
    found = None
    for place in range(1, len(tokens)):
        length = 0
        while length < min(LONGEST_MATCH, len(end), place) and tokens[place - 1 - length] == end[-1 - length]:
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


def test_a_copy_that_reaches_the_end_goes_on_with_itself() -> None:
    tokens = np.array([9, 1, 2, 3], np.int32)
    assert copied(tokens, 0, 2) == [9, 1]
    assert copied(tokens, 1, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert copied(tokens, 3, 3) == [3, 3, 3]


def test_outputs_end_where_they_ended() -> None:
    outputs = RecentOutputs()
    outputs.remember("a", np.array([1, 2, 3], np.int32))
    outputs.remember("a", np.array([4, 5], np.int32))
    found = outputs.find("a", np.array([8, 1, 2], np.int32))
    assert found is not None
    assert found.length == 2
    assert outputs.following("a", found.place, 5) == [3]
    assert outputs.find("b", np.array([1, 2], np.int32)) is None


def test_old_outputs_and_scopes_are_forgotten() -> None:
    outputs = RecentOutputs()
    for token in range(CAPACITY):  # two slots each: the first half has been written over
        outputs.remember("a", np.array([token], np.int32))
    assert outputs.find("a", np.array([1], np.int32)) is None
    assert outputs.find("a", np.array([CAPACITY - 1], np.int32)) is not None
    for scope in range(SCOPES):
        outputs.remember(str(scope), np.array([1, 2], np.int32))
    assert outputs.find("a", np.array([CAPACITY - 1], np.int32)) is None
    outputs.remember("long", np.arange(3 * CAPACITY, dtype=np.int32))
    assert outputs.find("long", np.array([3 * CAPACITY - 2], np.int32)) is not None
