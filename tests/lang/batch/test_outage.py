"""Batches over a backend that goes away: rows are kept and run again, and the batch stops in bounded time."""

from __future__ import annotations

import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest, is_transient
from ramify.lang.batch import breaker as breakers
from tests.lang.batch import batches
from tests.lang.batch.batches import UNLUCKY, answer, lines, ret_values, returned

CONCURRENCY = 4


class Dying(rm.ScriptedBackend):
    """Fails transiently from the `dies`-th request on, for `failures` requests; `poison` always."""

    def __init__(self, dies, failures, poison=None):
        super().__init__(answer)
        self.dies, self.failures, self.poison = dies, failures, poison
        self.failed = 0

    async def generate(self, request):
        poisoned = request.prompt[0].startswith(f"{self.poison} times")
        if poisoned or (len(self.requests) >= self.dies and self.failed < self.failures):
            self.failed += not poisoned
            raise BackendError("Connection refused.", transient=True)
        async for chunk in super().generate(request):
            yield chunk


def run(program, rows, **options):
    return batches.run(program, rows, concurrency=CONCURRENCY, **options)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(breakers, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(breakers, "LONGEST_PAUSE_S", 0.002)


ROWS = [{"n": n} for n in range(40)]


def test_an_outage_costs_no_row(program, out):
    backend = Dying(dies=15, failures=20)
    summary = run(program, ROWS, out=out, backend=backend)
    assert (summary.rows, summary.failed, summary.stopped) == (40, 1, None)  # UNLUCKY
    assert backend.failed == 20
    found = {line["index"]: line["returned"] for line in lines(out)}
    assert found == {n: returned(n) for n in range(40)}


def test_an_outage_costs_no_row_of_a_batch_without_a_file(program):
    states = run(program, ROWS, backend=Dying(dies=15, failures=20))
    assert ret_values(states) == [returned(n) for n in range(40)]


def test_a_dead_backend_is_asked_by_one_row_at_a_time(program, out):
    """Only the rows that run when the backend dies fail together."""

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
    assert failed == {1: True, UNLUCKY: False}
    summary = run(program, ROWS, out=out, backend=Dying(0, 0))
    assert (summary.rows, summary.failed, summary.skipped) == (1, 0, 39)
    assert sorted(line["index"] for line in lines(out)) == list(range(40))


def test_a_wrong_limit_is_refused(program):
    with pytest.raises(InvalidRequest, match="give_up_after is -1"):
        run(program, ROWS, backend=Dying(0, 0), give_up_after=-1)
