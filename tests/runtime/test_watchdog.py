"""The watchdog of the event loop: when it reports a blocked loop, and the text of its report."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ramify.loop import new_loop
from ramify.runtime.frontend.watchdog import LoopWatchdog
from tests.fleet.fakes import Served


class Loop:
    """An event loop that runs its calls only when a test calls `run`."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        for call in self.calls:
            call()
        self.calls.clear()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(loop: Any, clock: Any) -> LoopWatchdog:
    return LoopWatchdog(loop, clock=clock)


def test_a_loop_that_answers_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    loop, clock = Loop(), Clock()
    watchdog = watched(loop, clock)
    for _ in range(5):
        watchdog.look()
        clock.now += 0.9
        loop.run()
        clock.now += 60
    assert not caplog.records
    assert watchdog.total_s == 0


def test_a_blocked_loop_is_reported_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    loop, clock = Loop(), Clock()
    watchdog = watched(loop, clock)
    for _ in range(21):  # 10 s
        watchdog.look()
        clock.now += 0.5
    told = [message.partition(" by ")[0] for message in caplog.messages]
    assert told == [f"The event loop has been blocked for {n}.0 s" for n in (1, 2, 4, 8)]
    assert all("test_a_blocked_loop_is_reported" in message for message in caplog.messages)
    loop.run()
    watchdog.look()
    assert caplog.messages[-1] == "The event loop did not run for 10.5 s."
    assert watchdog.total_s == 10.5
    clock.now += 0.5
    loop.run()
    watchdog.look()
    assert len(caplog.messages) == 5


def test_what_also_stopped_the_watchdog_is_told_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    loop, clock = Loop(), Clock()
    watchdog = watched(loop, clock)
    watchdog.look()
    clock.now += 9.5
    loop.run()
    watchdog.look()
    assert caplog.messages == ["The event loop did not run for 9.5 s."]


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, new_loop], ids=["asyncio", "uvloop"])
def test_a_loop_that_is_not_scheduled_is_not_told_as_blocked(
    caplog: pytest.LogCaptureFixture, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    loop, asked, clock = make_loop(), Loop(), Clock()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    watchdog = watched(asked, clock)
    watchdog._thread = thread.ident or 0
    watchdog.look()
    loop.call_soon_threadsafe(asked.calls.pop())
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
    for _ in range(1000):  # until the thread waits again; the second call is never answered
        watchdog.look()
        clock.now += 2 * watchdog._next_s
        if caplog.messages and "not scheduled" in caplog.messages[-1]:
            break
        watchdog._next_s = 1.0
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert "no code blocks it: its thread was not scheduled" in caplog.messages[-1]


def stands_still(told: threading.Event) -> None:
    assert told.wait(60)


def test_the_code_that_blocks_a_loop_is_named() -> None:
    told = threading.Event()
    messages: list[str] = []  # caplog's handler has the record only after this one

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            if "stands_still(told)" in messages[-1]:
                told.set()

    handler = Handler()
    logging.getLogger("ramify").addHandler(handler)

    async def block() -> None:
        watchdog = LoopWatchdog(asyncio.get_running_loop(), blocked_s=0.0, every_s=0.001)
        watchdog.start()
        try:
            stands_still(told)
        finally:
            watchdog.stop()

    try:
        asyncio.run(block())
    finally:
        logging.getLogger("ramify").removeHandler(handler)
    assert any("stands_still(told)" in message and "test_watchdog.py" in message for message in messages)


def test_a_frontend_is_watched_while_it_runs() -> None:
    async def run() -> None:
        frontend, before = Served().frontend, set(threading.enumerate())
        await frontend.start()
        (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "ramify-watchdog")
        assert frontend.blocked_s == 0.0
        await frontend.aclose()
        thread.join(60)
        assert not thread.is_alive()

    asyncio.run(run())
