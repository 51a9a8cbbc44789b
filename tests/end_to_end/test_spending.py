"""Timed-out steps of the default model report what the scheduler counted, in process and over HTTP."""

from __future__ import annotations

import msgspec
import pytest

import ramify as rm
from ramify.errors import BudgetExceeded, RequestTimeout
from ramify.messages import SchedulerStats
from tests.end_to_end.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(500)]


@rm.function
def essay(s, timeout: float | None = None):
    s += rm.user("Write a very long essay about the sea.")
    s += rm.assistant(rm.gen("essay", max_tokens=1500, ignore_eos=True, timeout=timeout))


@rm.function
def essays(s):
    s += rm.user("Write a very long essay.")
    forks = s.fork(4)
    for index, fork in enumerate(forks):
        fork += rm.user(f"It is about sea number {index}.")
        fork += rm.assistant(rm.gen("essay", max_tokens=1500, ignore_eos=True))
    return [fork.error() for fork in forks]


def stats(backend: rm.Engine | rm.RuntimeEndpoint) -> SchedulerStats:
    info = backend.get_server_info()
    return msgspec.convert(info.get("stats") or info["internal_states"][0], SchedulerStats)


def check(backend: rm.Engine | rm.RuntimeEndpoint) -> None:
    essays.run(backend=backend, max_total_tokens=150)  # compiles what the first tokens need
    before = stats(backend)
    state = essay.run(backend=backend, timeout=2.0)
    after = stats(backend)
    error = state.error()
    assert error is not None
    assert isinstance(error.__cause__, BudgetExceeded | RequestTimeout)
    assert 0 < state.usage.completion_tokens == after.output_tokens - before.output_tokens < 1500
    call = state.trace.children[0]
    assert call.tokens is not None
    assert len(call.tokens.ids) == state.usage.completion_tokens
    assert call.text == error.partial
    assert after.running == after.waiting == 0

    state = essays.run(backend=backend, max_total_tokens=300)
    assert all(isinstance(error.__cause__, BudgetExceeded) for error in state.ret_value)
    assert 280 <= state.usage.prompt_tokens + state.usage.completion_tokens <= 320
    assert stats(backend).output_tokens - after.output_tokens == state.usage.completion_tokens


def test_in_process() -> None:
    with rm.Engine() as engine:
        check(engine)


def test_at_a_server() -> None:
    with serve() as served:
        endpoint = rm.RuntimeEndpoint(served.url)
        check(endpoint)
        endpoint.close()
