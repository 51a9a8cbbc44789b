"""Batches: results in order, bounded concurrency, and a failing row that leaves the others alone."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest
from tests.lang.backends import Breaking, Holding
from tests.lang.batch.batches import UNLUCKY, adouble, answer, double, ret_values, returned, run


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"n": n} for n in range(50)], {}),
        ([(n,) for n in range(50)], {"num_threads": 3}),
        ([[n, 2] for n in range(50)], {"concurrency": 1}),
        (tuple({"n": n} for n in range(50)), {"concurrency": 7}),
        ([{"n": n} for n in range(50)], {"factor": 2, "temperature": 0.0}),
    ],
)
def test_results_are_in_the_order_of_the_rows(program, rows, options):
    states = run(program, iter(rows) if isinstance(rows, tuple) else rows, **options)
    assert ret_values(states) == [returned(n) for n in range(50)]


def test_a_bad_row_is_an_error_of_its_own(program):
    states = run(program, [{"n": 1}, {"n": UNLUCKY}, {"n": 2}, {"wrong": 1}, 5])
    assert ret_values(states) == [3, None, 5, None, None]
    causes = [type(state.error() and state.error().__cause__) for state in states]
    assert causes == [type(None), ValueError, type(None), TypeError, InvalidRequest]
    read_value = functools.partial(getattr, states[1], "ret_value")
    for read in (states[1].text, functools.partial(states[1].__getitem__, "x"), read_value):
        with pytest.raises(rm.ProgramError, match="The program raised ValueError: unlucky"):
            read()


def test_a_failing_backend_fails_its_rows_only(program):
    backend = Breaking(answer, BackendError("gone"), after=0, where="3 times")
    states = run(program, [{"n": n} for n in range(5)], backend=backend)
    assert [state.error() is not None for state in states] == [False, False, False, True, False]


def test_concurrency_is_bounded(program):
    backend = Holding(answer)
    backend.release.set()
    run(program, [{"n": n} for n in range(30)], concurrency=4, backend=backend)
    assert 1 <= backend.most <= 4


@pytest.mark.parametrize(
    "given", [{"concurrency": "4"}, {"concurrency": True}, {"num_threads": "many"}, {"concurrency": 0}]
)
def test_a_concurrency_that_is_no_count_is_refused(program, given):
    with pytest.raises(InvalidRequest) as refused:
        run(program, [{"n": 1}], **given)
    assert refused.value.field == "concurrency"


async def test_a_generator_reads_no_more_rows_than_it_needs():
    read = []

    def rows():
        for n in range(1000):
            read.append(n)
            yield {"n": n}

    options = {"concurrency": 2, "backend": rm.ScriptedBackend(answer)}
    states = double.run_batch(rows(), generator_style=True, **options)
    assert next(states).ret_value == 1
    assert len(read) <= 8
    states.close()
    assert len(read) <= 8
    read.clear()
    states = adouble.iter_batch(rows(), **options)
    assert (await anext(states)).ret_value == 1
    await states.aclose()
    assert len(read) <= 8


@pytest.mark.parametrize("with_file", [False, True])
def test_giving_up_cancels_requests_and_writes_no_line_of_them(out, with_file):
    backend = Holding(answer)

    def interrupted():
        yield {"n": 1}
        backend.started.block()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(double, interrupted(), backend=backend, **({"out": out, "look_ahead": 1} if with_file else {}))
    assert backend.aborted == 1
    assert not with_file or out.read_bytes() == b""


@pytest.mark.parametrize("with_file", [False, True])
async def test_cancelling_an_async_batch_aborts_its_requests_and_writes_no_line(out, with_file):
    backend = Holding(answer)
    rows = [{"n": n} for n in range(12)]
    batch = adouble.run_batch(rows, concurrency=4, backend=backend, **({"out": out} if with_file else {}))
    task = asyncio.create_task(batch)
    while backend.holding < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.aborted == 4
    assert not with_file or out.read_bytes() == b""


def test_progress_bar(program, capsys):
    run(program, [{"n": n} for n in range(5)], progress_bar=True)
    assert "5/5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": 2, "num_threads": 2}, "mean the same"),
        ({"stream": True}, "does not stream"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"backend": None}, "No backend"),
    ],
)
def test_a_wrong_option_is_refused_before_any_row_runs(program, options, message):
    backend = rm.ScriptedBackend(answer)
    with pytest.raises(InvalidRequest, match=message):
        run(program, [{"n": 1}], **{"backend": backend, **options})
    assert backend.requests == []


def test_no_rows(program):
    assert run(program, []) == []


def test_threads_are_bounded_and_gone_afterwards():
    before = threading.active_count()
    run(double, [{"n": n} for n in range(200)], concurrency=8)
    assert threading.active_count() <= before + 1  # the background loop
