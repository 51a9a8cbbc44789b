"""The index of a cold store: the pages of a prefix, and of no other, whatever the digests are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.radix.cold import ColdIndex, Segment
from ramify.radix.digest import Digests

SIZE = 2


def segment(name: str, ids: list[int], first: int = 0, scope: str = "") -> Segment:
    return Segment(name, scope, np.array(ids, np.int32), first)


def found(index: ColdIndex, ids: list[int], first: int = 0, scope: str = "") -> list[tuple[str, int, int]]:
    return [(run.segment.name, *run[1:]) for run in index.find(np.array(ids, np.int32), scope, first)]


def test_the_worked_example() -> None:
    index = ColdIndex(4)
    a = list(range(12))
    b = [*a[:9], 99, 10, 11]
    x = segment("X", a)
    index.add(x)
    index.add(segment("Y", b, 2))
    assert found(index, b) == [("X", 0, 2), ("Y", 2, 1)]
    assert found(index, b, scope="s") == []
    index.remove(x)
    assert found(index, b) == []
    assert found(index, b, 2) == [("Y", 2, 1)]
    index.remove(x)
    assert list(index.segments) == ["Y"]


def naive(segments: list[Segment], ids: list[int], scope: str, first: int) -> int:
    """The number of pages from `first` on that some segment has."""
    page = first
    while (page + 1) * SIZE <= len(ids):
        end = (page + 1) * SIZE
        if not any(
            one.scope == scope and one.first <= page and one.ids[:end].tolist() == ids[:end]
            for one in segments
        ):
            break
        page += 1
    return page - first


TOKENS = st.lists(st.integers(0, 1), max_size=10)


@given(st.lists(st.tuples(TOKENS, st.integers(0, 5), st.sampled_from("ab")), max_size=6), TOKENS, st.data())
def test_pages_are_found_as_by_a_search(
    given_segments: list[tuple[list[int], int, str]], ids: list[int], data: st.DataObject
) -> None:
    index, segments = ColdIndex(SIZE), []
    for place, (tokens, first, scope) in enumerate(given_segments):
        tokens = tokens[: len(tokens) // SIZE * SIZE]
        one = segment(str(place), tokens, min(first, len(tokens) // SIZE), scope)
        index.add(one)
        segments.append(one)
    first = data.draw(st.integers(0, len(ids) // SIZE))
    runs = index.find(np.array(ids, np.int32), "a", first)
    assert sum(run.pages for run in runs) == naive(segments, ids, "a", first)
    for run in runs:
        end = (run.first + run.pages) * SIZE
        assert run.segment.first <= run.first
        assert (run.segment.scope, run.segment.ids[:end].tolist()) == ("a", ids[:end])
    for one in segments:
        index.remove(one)
    assert index._pages == {}


def test_a_collision_of_digests_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Digests, "page_ends", lambda self, tokens, scope, size: list(range(len(tokens) // size))
    )
    index = ColdIndex(SIZE)
    index.add(segment("x", [1, 2, 3, 4, 5, 6]))
    assert found(index, [1, 2, 3, 4, 9, 9]) == [("x", 0, 2)]
    assert found(index, [1, 9, 3, 4, 5, 6]) == []
    assert found(index, [1, 2, 3, 4], scope="s") == []
