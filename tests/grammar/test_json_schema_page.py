"""docs/json-schema.md has the table that a run of the tests' schemas gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "docs" / "json_schema_table.py"


def test_the_table_of_keywords_is_current_and_has_no_errors() -> None:
    check = subprocess.run([sys.executable, str(SCRIPT), "--check"])
    assert check.returncode == 0, "run `python docs/json_schema_table.py`"
    page = (SCRIPT.parent / "json-schema.md").read_text()
    assert " wrong |" not in page
    assert "not tried" not in page
