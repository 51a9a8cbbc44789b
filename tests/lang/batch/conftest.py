from __future__ import annotations

from pathlib import Path

import pytest

from tests.lang.batch.batches import adouble, double


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture(params=[double, adouble], ids=["threads", "tasks"])
def program(request):
    return request.param
