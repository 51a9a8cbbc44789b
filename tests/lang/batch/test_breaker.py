"""The circuit breaker of a batch, on a clock of the test."""

from __future__ import annotations

import collections
import itertools

import pytest

from ramify.errors import BackendError, Overloaded
from ramify.lang.batch.breaker import Breaker


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


GONE = BackendError("gone", transient=True)


@pytest.fixture
def clock():
    return Clock()


def make(clock, rows=range(1, 100), give_up_after=300.0):
    return Breaker(iter(rows), give_up_after, clock=clock, draw=lambda: 1.0)


def test_pauses_double_up_to_a_limit(clock):
    breaker = make(clock)
    attempt = breaker.take(0)
    pauses = []
    for _ in range(7):
        assert not breaker.ended(attempt, GONE, True)
        assert breaker.take(0) is None
        pauses.append(0)
        while (attempt := breaker.take(0)) is None:
            clock.now += 0.5
            pauses[-1] += 0.5
        assert breaker.take(1) is None  # one probe at a time
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert breaker.ended(attempt, None, True)
    assert breaker.take(0) is not None
    assert breaker.take(1) is not None


def test_the_backend_says_when_to_come_back(clock):
    breaker = make(clock)
    breaker.ended(breaker.take(0), Overloaded("full", retry_after=12.0), True)
    clock.now += 11.9
    assert breaker.take(0) is None
    clock.now += 0.2
    assert breaker.take(0) is not None


def test_failures_of_one_outage_count_once_and_the_circuit_opens_once(clock):
    breaker = make(clock)
    first, second, third = (breaker.take(n) for n in range(3))
    breaker.ended(first, None, True)
    breaker.ended(second, GONE, True)
    breaker.ended(third, GONE, True)
    assert (second.failures, third.failures) == (1, 1)
    assert not breaker.exhausted
    for _ in range(5):  # nothing else is answered in between
        clock.now += 30
        breaker.ended(breaker.take(0), GONE, True)
    assert (second.failures, third.failures) == (1, 1)


def test_a_row_that_failed_twice_runs_alone_after_the_others(clock):
    queue = collections.deque(range(1, 6))
    breaker = make(clock, (queue.popleft() if queue else None for _ in itertools.count()))
    suspect = breaker.take(0)
    breaker.ended(breaker.take(1), None, True)
    breaker.ended(suspect, GONE, True)
    clock.now += 1
    probe = breaker.take(0)
    assert probe.row == 3
    breaker.ended(probe, None, True)
    assert breaker.take(0) is suspect
    breaker.ended(suspect, GONE, True)
    assert suspect.failures == 2
    clock.now += 1
    again = breaker.take(0)
    assert again.row == 4
    breaker.ended(again, None, True)
    last = breaker.take(0)
    assert last.row == 5
    assert breaker.wait_s() is None, "the circuit is closed"
    assert breaker.take(1) is None  # the suspect waits for row 5
    breaker.ended(last, None, True)
    assert breaker.take(0) is suspect
    queue.append(6)
    assert breaker.take(1) is None  # row 6 waits for the suspect
    assert breaker.ended(suspect, GONE, True)  # the third time


def test_a_row_that_gets_text_is_an_answer(clock):
    breaker = make(clock, give_up_after=10.0)
    long, short = breaker.take(0), breaker.take(1)
    breaker.ended(short, GONE, True)
    clock.now += 9
    breaker.heard(clock.now)
    clock.now += 9
    assert not breaker.gave_up
    breaker.ended(breaker.take(1), GONE, True)
    assert not breaker.gave_up
    clock.now += 10
    assert breaker.gave_up
    breaker.ended(long, None, True)
    assert not breaker.gave_up


def test_a_body_that_fails_before_any_request_is_no_answer(clock):
    breaker = make(clock)
    breaker.ended(breaker.take(0), GONE, True)
    clock.now += 1
    assert breaker.ended(breaker.take(0), ValueError("bad"), False)
    assert breaker.wait_s() is not None
    breaker.take(0)
    assert breaker.take(1) is None
