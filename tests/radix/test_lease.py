"""The book of leases. test_promises checks what leases do to pages."""

from __future__ import annotations

import math

from ramify.radix.lease import LeaseBook
from ramify.radix.node import Node, Root
from tests.radix.world import FakeClock


def chain(length: int) -> list[Node]:
    """A root and `length` nodes, each the parent of the next."""
    nodes: list[Node] = [Root("")]
    for depth in range(length):
        nodes.append(Node(nodes[-1], b"aaaa", depth, (depth,), False))
    return nodes


def test_a_longer_lease_covers_those_above_that_do_not_outlast_it() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(4)
    assert book.take(nodes[1], "p", 10) == (True, [])
    assert book.take(nodes[2], "p", 3) == (True, [])
    assert book.take(nodes[3], "q", 9) == (True, [])
    assert book.take(nodes[4], "p", 5) == (True, [nodes[2]])
    assert [book.at(node) for node in nodes] == [0, 1, 0, 1, 1]
    assert book.take(nodes[4], "p", 20) == (False, [nodes[1]])
    assert len(book) == 2


def test_a_retreating_lease_keeps_the_later_of_two_expiries() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(2)
    for above, below in ((9.0, 5.0), (5.0, 9.0)):
        # Longer above: not covered. Shorter above: taken after the one below.
        book.take(nodes[2], "p", below)
        book.take(nodes[1], "p", above)
        assert book.retreat(nodes[2]) == 1
        clock.now += 8
        assert book.tick() == ([], [])
        clock.now += 1
        assert book.tick() == ([nodes[1]], [])
    assert len(book) == 0


def test_a_lease_retreats_to_its_parent_and_ends_at_the_root() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    book.take(nodes[2], "p", 5)
    book.take(nodes[2], "q", 5)
    book.take(nodes[1], "q", 7)
    assert book.retreat(nodes[2]) == 1, "q has a lease there"
    assert [book.at(node) for node in nodes] == [0, 2, 0]
    assert book.retreat(nodes[1]) == 2
    assert len(book) == 0
    assert (book.end("p"), book.end("q")) == ([], [])


def test_who_comes_later_than_expected_is_expected_later_still() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(3)
    book.take(nodes[3], "p", 100, 4)
    book.take(nodes[2], "q", 100, 9)
    book.take(nodes[1], "r", 100)
    assert [book.needed(node) for node in nodes] == [None, math.inf, 9, 4]
    clock.now = 3.9
    assert book.tick() == ([], [])
    clock.now = 6
    assert book.tick() == ([], [nodes[3]])
    assert book.needed(nodes[3]) == 6 + 6 / 2
    clock.now = 10
    assert book.tick() == ([], [nodes[2], nodes[3]])
    assert (book.needed(nodes[2]), book.needed(nodes[3])) == (15, 15)


def test_who_is_here_and_needs_for_room_is_not_late() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(1)
    book.take(nodes[1], "p", 100, 4, "branch")
    assert book.expect("p", "branch", 0) == [nodes[1]]
    assert book.expect("p", "other", 0) == book.expect("q", "branch", 0) == []
    clock.now = 50
    assert book.tick() == ([], [])
    assert book.needed(nodes[1]) == 0


def test_the_parts_of_an_owner_are_leased_and_ended_apart() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    assert book.take(nodes[2], "p", 5, 1, "a") == (True, [])
    assert book.take(nodes[2], "p", 5, 3, "b") == (True, [])
    assert book.take(nodes[1], "p", 5, 3, "b") == (True, [])
    assert list(book.owners(nodes[2])) == ["p"]
    assert book.needed(nodes[2]) == 1
    assert book.end("p", "a") == [nodes[2]]
    assert book.needed(nodes[2]) == 3
    assert sorted(book.end("p"), key=nodes.index) == [nodes[1], nodes[2]]
    assert len(book) == 0


def test_a_retreating_lease_is_needed_when_the_sooner_of_two_is() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    book.take(nodes[2], "p", 5, 1)
    book.take(nodes[2], "q", 5, 8)
    book.take(nodes[1], "p", 9, 7)
    assert book.retreat(nodes[2]) == 1
    assert book.needed(nodes[1]) == 1
    assert book.end("p") == [nodes[1]]
    assert book.needed(nodes[1]) == 8


def test_ended_leases_and_estimates_do_not_pile_up() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(1)
    for number in range(1000):
        book.take(nodes[1], str(number), 1e9, 5)
        book.expect(str(number), "", 7)
        book.end(str(number))
    assert len(book) == 0
    assert len(book._queue) < 100
