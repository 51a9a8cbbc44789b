"""Batches over a backend that goes away: rows are kept and run again, and the batch stops in bounded time."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json

import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest, Overloaded, is_transient
from ramify.lang.batch import breaker as breakers
from ramify.lang.batch.breaker import Breaker

CONCURRENCY = 4


@rm.function
def double(s, n):
    if n == 13:
        raise ValueError("unlucky")
    s += f"twice {n} is" + rm.gen("x", schema=int)
    return s["x"]


@rm.function
async def adouble(s, n):
    if n == 13:
        raise ValueError("unlucky")
    s += f"twice {n} is" + rm.gen("x", schema=int)
    return await s.aget("x")


def answer(request):
    return str(2 * int(request.prompt[0].split()[1]))


class Dying(rm.ScriptedBackend):
    """Fails transiently from the `dies`-th request on, for `failures` requests; `poison` always."""

    def __init__(self, dies, failures, poison=None):
        super().__init__(answer)
        self.dies, self.failures, self.poison = dies, failures, poison
        self.failed = 0

    async def generate(self, request):
        poisoned = f"twice {self.poison} is" in request.prompt[0]
        if poisoned or (len(self.requests) >= self.dies and self.failed < self.failures):
            self.failed += not poisoned
            raise BackendError("Connection refused.", transient=True)
        async for chunk in super().generate(request):
            yield chunk


def run(program, rows, **options):
    found = program.run_batch(rows, concurrency=CONCURRENCY, **options)
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(breakers, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(breakers, "LONGEST_PAUSE_S", 0.002)


@pytest.fixture(params=[double, adouble], ids=["threads", "tasks"])
def program(request):
    return request.param


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results.jsonl"


def lines(out):
    found = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in found if "index" in line]


ROWS = [{"n": n} for n in range(40)]


def test_an_outage_costs_no_row(program, out):
    backend = Dying(dies=15, failures=20)
    summary = run(program, ROWS, out=out, backend=backend)
    assert (summary.rows, summary.failed, summary.stopped) == (40, 1, None)  # row 13
    assert backend.failed == 20
    found = {line["index"]: line["returned"] for line in lines(out)}
    assert found == {n: None if n == 13 else 2 * n for n in range(40)}


def test_an_outage_costs_no_row_of_a_batch_without_a_file(program):
    states = run(program, ROWS, backend=Dying(dies=15, failures=20))
    assert [state.ret_value for state in states] == [None if n == 13 else 2 * n for n in range(40)]


def test_a_dead_backend_is_asked_by_one_row_at_a_time(program, out):
    """Only the rows that run when it dies fail at once."""

    class Counting(Dying):
        most = now = 0

        async def generate(self, request):
            self.now += 1
            if self.failed >= CONCURRENCY:
                self.most = max(self.most, self.now)
            try:
                async for chunk in super().generate(request):
                    yield chunk
            finally:
                self.now -= 1

    backend = Counting(dies=15, failures=10**9)
    summary = run(program, ROWS, out=out, backend=backend, give_up_after=0.1)
    assert summary.stopped is not None
    assert backend.most == 1


def test_a_batch_without_answers_stops_and_the_next_run_goes_on(program, out):
    backend = Dying(dies=15, failures=10**9)
    summary = run(program, ROWS, out=out, backend=backend, give_up_after=0.05)
    done = len(lines(out))
    assert 15 <= done < 20
    assert (summary.rows, summary.left) == (done, 40 - done)
    assert "gave no answer for 0.05 s" in summary.stopped
    assert "Connection refused" in summary.stopped
    assert f"{done} rows are done, {40 - done} are left; run the same again" in str(summary)
    assert not any(line["error"] and line["error"]["transient"] for line in lines(out))
    summary = run(program, ROWS, out=out, backend=Dying(0, 0))
    assert (summary.rows, summary.skipped, summary.stopped) == (40 - done, done, None)


def test_rows_that_were_left_have_a_transient_error(program):
    backend = Dying(dies=15, failures=10**9)
    states = run(program, ROWS, backend=backend, give_up_after=0.05)
    assert len(states) == 40
    left = [state for state in states if is_transient(state.error())]
    assert 20 < len(left) <= 25
    assert "The row was not run: the backend gave no answer for 0.05 s." in str(left[-1].error())
    with pytest.raises(rm.ProgramError, match="was not run"):
        left[-1].text()


@pytest.mark.parametrize("with_file", [True, False])
def test_a_row_that_takes_the_backend_down_fails_after_three_times(program, out, with_file):
    backend = Dying(dies=0, failures=0, poison=1)
    if not with_file:
        states = run(program, ROWS, backend=backend)
        assert [n for n, state in enumerate(states) if is_transient(state.error())] == [1]
        return
    summary = run(program, ROWS, out=out, backend=backend)
    assert (summary.rows, summary.failed, summary.stopped) == (40, 2, None)
    failed = {line["index"]: line["error"]["transient"] for line in lines(out) if line["error"]}
    assert failed == {1: True, 13: False}
    summary = run(program, ROWS, out=out, backend=Dying(0, 0))
    assert (summary.rows, summary.failed, summary.skipped) == (1, 0, 39)
    assert sorted(line["index"] for line in lines(out)) == list(range(40))


def test_a_wrong_limit_is_refused(program):
    with pytest.raises(InvalidRequest, match="give_up_after is -1"):
        run(program, ROWS, backend=Dying(0, 0), give_up_after=-1)


# --- the breaker, on a clock of the test --------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


GONE = BackendError("gone", transient=True)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(breakers, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(breakers, "LONGEST_PAUSE_S", 30.0)
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
