"""Every example runs as a user runs it, on the default model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

pytestmark = [pytest.mark.slow, pytest.mark.weights, pytest.mark.timeout(240)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example)], input="Hello!\n", capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 3
    assert "Traceback" not in done.stderr
