"""Programs on the default model: step by step in process, and compiled at a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ramify as rm
from ramify.lang.backends.base import Backend
from tests.end_to_end.served import serve
from tests.lang.programs import CASES
from tests.lang.test_programs import outcome

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(500)]


NAMES = ("few-shot", "skeleton-of-thought", "map-reduce", "multi-turn-chat", "streaming")
"""The programs of the ten that have a graph; the others would run the same steps twice."""


def run_all(backend: Backend, *, compiled: bool) -> dict[str, Any]:
    """The result of the first row of each program; all run at once."""

    def run(name: str) -> dict[str, Any]:
        case = CASES[name]
        return outcome(case.program.run(**case.arguments[0], backend=backend, compiled=compiled))

    with ThreadPoolExecutor(len(NAMES)) as threads:
        return dict(zip(NAMES, threads.map(run, NAMES), strict=True))


@pytest.mark.long
def test_programs_say_the_same_compiled_over_http_and_by_steps() -> None:
    with rm.Engine(dtype="float32") as engine:
        steps = run_all(engine, compiled=False)
    with serve("--dtype", "float32") as served:
        endpoint = rm.RuntimeEndpoint(served.url)
        assert run_all(endpoint, compiled=True) == steps
        endpoint.close()
