"""The start of an engine on a GPU: its kernels are compiled by other processes, and once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    kernels = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.start"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        loaded, compiled = map(int, done.stdout.split())
        assert loaded > 20
        assert compiled == 0, "the engine's own process compiles nothing, at the first start neither"
        kernels.append(sorted(path.name for path in tmp_path.glob("*/*") if path.suffix in (".cubin", ".so")))
    assert kernels[0] == kernels[1]
