from __future__ import annotations

import pytest

from ramify.radix.pages import PagePool


def test_pages_come_out_in_order_and_once() -> None:
    pool = PagePool(5)
    assert pool.allocate(0) == []
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    assert len(pool) == 0


def test_too_many_takes_none() -> None:
    pool = PagePool(2)
    with pytest.raises(ValueError, match="3 pages asked for; 2 are free"):
        pool.allocate(3)
    with pytest.raises(ValueError, match="-1 pages"):
        pool.allocate(-1)
    assert len(pool) == 2


@pytest.mark.parametrize("wrong", [[0, 3], [0, 0], [0, 9], [0, -1]])
def test_a_page_is_freed_once_and_only_if_taken(wrong: list[int]) -> None:
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(ValueError, match=rf"freed twice: \[{wrong[1]}\]"):
        pool.free(wrong)
    assert len(pool) == 1, "nothing was freed"
    pool.free([0, 2])
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([0])
    assert sorted(pool.allocate(3)) == [0, 2, 3]


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="num_pages is 0"):
        PagePool(0)
