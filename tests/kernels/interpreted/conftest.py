"""Tests that need TRITON_INTERPRET=1 from the start: `tests/kernels/test_triton.py` runs them so."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
