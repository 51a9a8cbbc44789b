"""The book of leases; what leases do to pages is in test_promises."""

from __future__ import annotations

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
        assert book.expire() == []
        clock.now += 1
        assert book.expire() == [nodes[1]]
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


def test_ended_leases_do_not_pile_up() -> None:
    book, nodes = LeaseBook(FakeClock()), chain(1)
    for number in range(1000):
        book.take(nodes[1], str(number), 1e9)
        book.end(str(number))
    assert len(book) == 0
    assert len(book._expiry) < 100


def test_a_renewed_lease_expires_at_its_new_time() -> None:
    clock = FakeClock()
    book, nodes = LeaseBook(clock), chain(1)
    book.take(nodes[1], "p", 5)
    clock.now = 3
    book.take(nodes[1], "p", 5)
    clock.now = 7.9
    assert book.expire() == []
    clock.now = 8
    assert book.expire() == [nodes[1]]
