"""Helpers for tests of compiled programs: source lines and compile errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ramify as rm


def line_of(file: str, marker: str) -> str:
    """file:line of the comment `marker`."""
    lines = Path(file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    assert len(found) == 1
    return f"{file}:{found[0]}"


def refusal(program: Any, **given: Any) -> rm.CompileError:
    with pytest.raises(rm.CompileError) as refused:
        program.compile(**given)
    return refused.value
