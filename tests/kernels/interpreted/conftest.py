"""Tests that need TRITON_INTERPRET=1 from the start: `tests/kernels/test_triton.py` runs them so."""

from __future__ import annotations

import os

import pytest

from tests.kernels.interpreter_products import create_dot

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def products_by_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
