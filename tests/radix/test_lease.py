"""The book of leases. test_promises checks what leases do to pages."""

from __future__ import annotations

import math

from ramify.radix.lease import Ended, LeaseBook
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
    assert book.take(nodes[1], "p", 10) == (1, 0, [])
    assert book.take(nodes[2], "p", 3) == (1, 0, [])
    assert book.take(nodes[3], "q", 9) == (1, 0, [])
    assert book.take(nodes[4], "p", 5) == (1, 0, [Ended(nodes[2], False)])
    assert [book.at(node) for node in nodes] == [0, 1, 0, 1, 1]
    assert book.take(nodes[4], "p", 20) == (0, 0, [Ended(nodes[1], False)])
    assert len(book) == 2


def test_a_retreating_lease_keeps_the_later_of_two_expiries() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(2)
    for above, below in ((9.0, 5.0), (5.0, 9.0)):
        # Longer above: not covered. Shorter above: taken after the one below.
        book.take(nodes[2], "p", below)
        book.take(nodes[1], "p", above)
        assert book.retreat(nodes[2]) == [False]
        clock.now += 8
        assert book.tick() == ([], [])
        clock.now += 1
        assert book.tick() == ([Ended(nodes[1], False)], [])
    assert len(book) == 0


def test_a_lease_retreats_to_its_parent_and_ends_at_the_root() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    book.take(nodes[2], "p", 5)
    book.take(nodes[2], "q", 5)
    book.take(nodes[1], "q", 7)
    assert book.retreat(nodes[2]) == [False], "q has a lease there"
    assert [book.at(node) for node in nodes] == [0, 2, 0]
    assert book.retreat(nodes[1]) == [False, False]
    assert len(book) == 0
    assert (book.end("p"), book.end("q")) == ([], [])


def test_who_comes_later_than_expected_is_expected_later_still() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(3)
    book.take(nodes[3], "p", 100, 4)
    book.take(nodes[2], "q", 100, 9)
    book.take(nodes[1], "r", 100)
    assert [book.order(node) for node in nodes] == [(0, 0.0), (1, -math.inf), (1, -9), (1, -4)]
    clock.now = 3.9
    assert book.tick() == ([], [])
    clock.now = 6
    assert book.tick() == ([], [nodes[3]])
    assert book.order(nodes[3]) == (1, -(6 + 6 / 2))
    clock.now = 10
    assert book.tick() == ([], [nodes[2], nodes[3]])
    assert (book.order(nodes[2]), book.order(nodes[3])) == ((1, -15), (1, -15))


def test_who_is_here_and_needs_for_room_is_not_late() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(1)
    book.take(nodes[1], "p", 100, 4, "branch")
    assert book.expect("p", "branch", 0) == [nodes[1]]
    assert book.expect("p", "other", 0) == book.expect("q", "branch", 0) == []
    clock.now = 50
    assert book.tick() == ([], [])
    assert book.order(nodes[1]) == (1, -(0))


def test_the_parts_of_an_owner_are_leased_and_ended_apart() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    assert book.take(nodes[2], "p", 5, 1, "a") == (1, 0, [])
    assert book.take(nodes[2], "p", 5, 3, "b") == (1, 0, [])
    assert book.take(nodes[1], "p", 5, 3, "b") == (1, 0, [])
    assert list(book.owners(nodes[2])) == ["p"]
    assert book.order(nodes[2]) == (1, -(1))
    assert book.end("p", "a") == [Ended(nodes[2], False)]
    assert book.order(nodes[2]) == (1, -(3))
    assert {ended.node for ended in book.end("p")} == {nodes[1], nodes[2]}
    assert len(book) == 0


def test_a_retreating_lease_is_needed_when_the_sooner_of_two_is() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    book.take(nodes[2], "p", 5, 1)
    book.take(nodes[2], "q", 5, 8)
    book.take(nodes[1], "p", 9, 7)
    assert book.retreat(nodes[2]) == [False]
    assert book.order(nodes[1]) == (1, -(1))
    assert book.end("p") == [Ended(nodes[1], False)]
    assert book.order(nodes[1]) == (1, -(8))


def test_ended_leases_and_estimates_do_not_pile_up() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(1)
    for number in range(1000):
        book.take(nodes[1], str(number), 1e9, 5)
        book.expect(str(number), "", 7)
        book.end(str(number))
    assert len(book) == 0
    assert len(book._queue) < 100


def test_a_pin_outranks_leases_until_it_ends_or_becomes_one() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(3)
    assert book.take(nodes[1], "p", 9, 5, pinned=True) == (1, 1, [])
    assert book.take(nodes[1], "q", 1, 2) == (1, 0, [])
    assert (book.order(nodes[1]), book.pins_at(nodes[1])) == ((2, -2), 1)
    assert book.take(nodes[2], "p", 20) == (1, 0, []), "a lease does not take the place of a pin"
    assert book.take(nodes[2], "p", 3, pinned=True) == (0, 1, [Ended(nodes[1], True)])
    first = book.take(nodes[3], "r", 5, pinned=True) and book.unpin()
    assert first is not None
    assert (first.owner, book.order(nodes[3])[0], book.order(nodes[2])[0]) == ("r", 1, 2)
    assert book.end("p") == [Ended(nodes[2], True)]
    assert book.unpin() is None


def test_a_retreating_pin_makes_the_lease_above_a_pin() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(2)
    book.take(nodes[2], "p", 5, pinned=True)
    book.take(nodes[1], "p", 9)
    assert book.retreat(nodes[2]) == [False], "there is one lease less, and as many pins"
    assert book.pins_at(nodes[1]) == 1
    assert book.retreat(nodes[1]) == [True]
