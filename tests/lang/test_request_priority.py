"""The priority of requests: the step's, else the run's, else the backend's, else the batch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ramify as rm
from ramify.errors import InvalidRequest, UnsupportedNode
from ramify.lang.backends.scripted import ScriptedBackend
from ramify.priority import BATCH, MOST
from tests.lang.steps import program_of


@rm.function
def asks(s: Any, topic: str) -> None:
    s += f"About {topic}: " + rm.gen("first", max_tokens=4)
    s += rm.gen("second", max_tokens=4, priority=7)
    s += rm.select("third", ["yes", "no"])
    s += rm.select("fourth", ["yes", "no"], priority=-3)
    s += rm.gen("fifth", choices=["yes", "no"], priority=2)


def answering(priority: int | None = None) -> ScriptedBackend:
    backend = ScriptedBackend(
        {"first": "a", "second": "b", "third": "yes", "fourth": "yes", "fifth": "no", "answer": "c"}
    )
    backend.priority = priority
    return backend


def sent(backend: ScriptedBackend) -> list[int]:
    return [request.priority for request in backend.requests]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [(None, {}, 0), (5, {}, 5), (5, {"priority": -1}, -1), (5, {"priority": 0}, 0)],
)
def test_of_a_run(compiled: bool, own: int | None, options: dict[str, int], expected: int) -> None:
    backend = answering(own)
    asks.run("x", backend=backend, compiled=compiled, **options)
    assert sent(backend) == [expected, 7, expected, -3, 2]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("own", "options", "expected"), [(None, {}, BATCH), (5, {}, 5), (None, {"priority": 3}, 3)]
)
def test_of_a_batch(compiled: bool, own: int | None, options: dict[str, int], expected: int) -> None:
    backend = answering(own)
    asks.run_batch([{"topic": "x"}], backend=backend, compiled=compiled, **options)
    assert sent(backend) == [expected, 7, expected, -3, 2]


def test_bound_and_with_options() -> None:
    backend = answering()
    asks.bind(priority=4).run("x", backend=backend)
    asks.with_options(priority=5).run("x", backend=backend)
    asks.bind(priority=6).run_batch([{"topic": "x"}], backend=backend)
    assert sent(backend)[::5] == [4, 5, 6]


def test_every_request_of_a_step() -> None:
    """Samples, attempts, and turns of tools."""

    def add(a: int) -> int:
        """Add."""
        return a

    @rm.function
    def several(s: Any) -> None:
        s += rm.gen("answer", n=2, priority=1)
        s += rm.gen(
            "answer",
            validate=lambda value: value == "d" or (_ for _ in ()).throw(ValueError()),
            retries=1,
            priority=2,
        )
        s.call_tools([add], "calls", required=False, priority=3)

    backend = ScriptedBackend(["x", "y", "c", "d", "no call"])
    state = several.run(backend=backend)
    assert state.error() is None
    assert sent(backend) == [1, 1, 2, 2, 3]


def test_a_file_is_continued_with_another_priority(tmp_path: Path) -> None:
    backend, out = answering(), tmp_path / "rows.jsonl"
    asks.run_batch([{"topic": "x"}], backend=backend, out=out, priority=5)
    summary = asks.run_batch([{"topic": "x"}, {"topic": "y"}], backend=backend, out=out)
    assert sent(backend)[::5] == [5, BATCH]
    assert summary.failed == 0


@pytest.mark.parametrize("wrong", [MOST + 1, -MOST - 1, 1.5, True, "high"])
def test_refused(wrong: Any) -> None:
    for call in (
        lambda: rm.gen("x", priority=wrong),
        lambda: rm.select("x", ["a"], priority=wrong),
        lambda: asks.run("x", backend=answering(), priority=wrong),
        lambda: rm.RuntimeEndpoint("http://127.0.0.1:1", priority=wrong),
        lambda: rm.Engine(priority=wrong),
    ):
        with pytest.raises(InvalidRequest) as raised:
            call()
        assert raised.value.field == "priority"


def test_an_endpoint_without_priorities_refuses_them_and_takes_batches() -> None:
    backend = rm.OpenAI("m", base_url="http://127.0.0.1:1/v1", extensions=False)

    chat = program_of(rm.user("hi") + rm.assistant(rm.gen("x")))
    error = chat.run(backend=backend, priority=1).error()
    assert isinstance(error, UnsupportedNode)
    assert "no priorities" in error.message
    (state,) = chat.run_batch([{}], backend=backend)
    assert not isinstance(state.error(), UnsupportedNode)  # but that nobody listens


def test_a_recording_has_no_priority(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    recorded = rm.RecordingBackend(answering(5), path)
    asks.run("x", backend=recorded)
    replayed = rm.ReplayBackend(path)
    assert asks.run_batch([{"topic": "x"}], backend=replayed)[0].error() is None
