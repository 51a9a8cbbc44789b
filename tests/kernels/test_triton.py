"""The Triton kernels: their interpreter tests in a subprocess, and the errors without GPU and interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.kernels.machine.errors import KernelUnavailable

from .attention_cases import make_batch

pytestmark = pytest.mark.slow

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
LONG = (
    "test_sampling",
    "test_deterministic",
    "test_decode_graphs",
    "test_cascade",
    "test_model",
    "test_token_graphs",
    "test_engine",
    "test_ops",
    "test_float8_pages",
)
"""Files that take eight seconds to half a minute each."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)], ids=["short", "long"])
def test_in_the_interpreter(long: bool) -> None:
    """The interpreter is switched on before triton is first imported, and for a whole process."""
    files = [str(file) for file in FILES if (file.stem in LONG) == long]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_without_a_gpu_and_without_the_interpreter_the_refusal_says_so():
    from ramify.kernels.triton import attention
    from ramify.kernels.triton.tiles import launch

    assert not launch.INTERPRETED
    with pytest.raises(KernelUnavailable, match="CUDA device, or TRITON_INTERPRET=1"):
        attention.paged_attention(*make_batch([(1, 3)]), scale=1.0)


def test_every_interpreter_test_is_run():
    assert FILES
