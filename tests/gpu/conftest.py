"""Tests of this folder need a CUDA device and real kernels: elsewhere each is skipped by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device: torch.cuda.is_available() is False"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "needs real kernels: TRITON_INTERPRET is 1"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
