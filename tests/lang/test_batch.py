"""Batches: results in order, bounded concurrency, and a failing row that leaves the others alone."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest

import ramify as rm
from ramify.errors import BackendError, InvalidRequest
from tests.lang.backends import Breaking, Holding

UNLUCKY = 1313


@rm.function
def double(s, n, factor=2):
    if n == UNLUCKY:
        raise ValueError("unlucky")
    s += f"{n} times {factor} is" + rm.gen("x", schema=int)
    return s["x"]


@rm.function
async def adouble(s, n, factor=2):
    if n == UNLUCKY:
        raise ValueError("unlucky")
    s += f"{n} times {factor} is" + rm.gen("x", schema=int)
    return await s.aget("x")


def answer(request):
    n, factor = request.prompt[0].removesuffix(" is").split(" times ")
    return str(int(n) * int(factor))


async def run_both(rows, **options):
    """The same batch by a sync and by an async program."""
    options.setdefault("backend", rm.ScriptedBackend(answer))
    yield await asyncio.to_thread(lambda: double.run_batch(rows, **options))
    yield await adouble.run_batch(rows, **options)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"n": n} for n in range(50)], {}),
        ([(n,) for n in range(50)], {"num_threads": 3}),
        ([[n, 2] for n in range(50)], {"concurrency": 1}),
        (({"n": n} for n in range(50)), {"concurrency": 7}),
        ([{"n": n} for n in range(50)], {"factor": 2, "temperature": 0.0}),
    ],
)
async def test_results_are_in_the_order_of_the_rows(rows, options):
    rows = list(rows) if not isinstance(rows, list) else rows
    async for states in run_both(rows, **options):
        assert [state.ret_value for state in states] == [2 * n for n in range(50)]


async def test_a_bad_row_is_an_error_of_its_own():
    rows = [{"n": 1}, {"n": UNLUCKY}, {"n": 2}, {"wrong": 1}, 5]
    async for states in run_both(rows):
        assert [state.ret_value for state in states] == [2, None, 4, None, None]
        causes = [type(state.error() and state.error().__cause__) for state in states]
        assert causes == [type(None), ValueError, type(None), TypeError, InvalidRequest]
        for read in (states[1].text, functools.partial(states[1].__getitem__, "x")):
            with pytest.raises(rm.ProgramError, match="The program raised ValueError: unlucky"):
                read()


async def test_a_failing_backend_fails_its_rows_only():
    backend = Breaking(answer, BackendError("gone"), after=0, where="3 times")
    async for states in run_both([{"n": n} for n in range(5)], backend=backend):
        failed = [state.error() is not None for state in states]
        assert failed == [False, False, False, True, False]


async def test_concurrency_is_bounded():
    backend = Holding(answer)
    backend.release.set()
    async for _ in run_both([{"n": n} for n in range(30)], concurrency=4, backend=backend):
        assert 1 <= backend.most <= 4


def test_a_generator_reads_no_more_rows_than_it_needs():
    read = []

    def rows():
        for n in range(1000):
            read.append(n)
            yield {"n": n}

    states = double.run_batch(rows(), generator_style=True, concurrency=2, backend=rm.ScriptedBackend(answer))
    assert next(states).ret_value == 0
    assert len(read) <= 8
    states.close()
    assert len(read) <= 8


async def test_an_async_generator_reads_no_more_rows_than_it_needs():
    read = []

    def rows():
        for n in range(1000):
            read.append(n)
            yield {"n": n}

    states = adouble.iter_batch(rows(), concurrency=2, backend=rm.ScriptedBackend(answer))
    assert (await anext(states)).ret_value == 0
    await states.aclose()
    assert len(read) <= 8


def test_giving_up_cancels_what_runs():
    backend = Holding(answer)

    def interrupted():
        yield {"n": 1}
        backend.started.block()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        double.run_batch(interrupted(), backend=backend)
    assert backend.aborted == 1


async def test_cancelling_an_async_batch_aborts_its_requests():
    backend = Holding(answer)
    task = asyncio.create_task(
        adouble.run_batch([{"n": n} for n in range(20)], concurrency=4, backend=backend)
    )
    while backend.holding < 4:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.aborted == 4


async def test_progress_bar(capsys):
    async for _ in run_both([{"n": n} for n in range(5)], progress_bar=True):
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
async def test_a_wrong_option_is_refused_before_any_row_runs(options, message):
    backend = rm.ScriptedBackend(answer)
    options = {"backend": backend, **options}
    with pytest.raises(InvalidRequest, match=message):
        await asyncio.to_thread(lambda: double.run_batch([{"n": 1}], **options))
    with pytest.raises(InvalidRequest, match=message):
        await adouble.run_batch([{"n": 1}], **options)
    assert backend.requests == []


def test_no_rows():
    assert double.run_batch([], backend=rm.ScriptedBackend(answer)) == []


def test_threads_are_bounded_and_gone_afterwards():
    before = threading.active_count()
    double.run_batch([{"n": n} for n in range(200)], concurrency=8, backend=rm.ScriptedBackend(answer))
    assert threading.active_count() <= before + 1  # the background loop
