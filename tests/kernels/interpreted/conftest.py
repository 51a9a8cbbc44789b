"""Tests that need TRITON_INTERPRET=1 from the start: `tests/kernels/test_triton.py` runs them so."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest

from tests.kernels.interpreter_products import create_dot

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def products_by_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from ramify.kernels.triton.tiles.launch import INTERPRETED

    assert INTERPRETED
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class Launch(NamedTuple):
    kernel: str
    grid: object
    constants: dict[str, Any]


class Launches(list[Launch]):
    """Launches of kernels, in their order."""

    def forms(self, kernel: str) -> list[dict[str, Any]]:
        """The constants that the launches of `kernel` are compiled for."""
        return [launch.constants for launch in self if launch.kernel == kernel]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The launches since the test began."""
    from triton.runtime.interpreter import GridExecutor

    seen = Launches()
    run = GridExecutor.__call__

    def recorded(executor: Any, *args: Any, **options: Any) -> None:
        constants = {name: value for name, value in options.items() if name.isupper()}
        seen.append(Launch(executor.fn.__name__, executor.grid, constants))
        run(executor, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    return seen
