"""The Triton kernels: their interpreter tests in a subprocess, and the errors without GPU and interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from ramify.kernels.errors import KernelUnavailable

from .attention_cases import make_batch

pytestmark = pytest.mark.slow

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
LONG = ("test_sampling", "test_deterministic", "test_decode_graphs", "test_cascade")
"""Half a minute and more each."""


def interpreted(file: Path) -> subprocess.CompletedProcess[str]:
    """The interpreter is switched on before triton is first imported, and for a whole process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[subprocess.CompletedProcess[str]]]]:
    """Runs one file on each core at a time: an interpreter uses one core."""
    asked = [item.callspec.params.get("file") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        yield {file: threads.submit(interpreted, file) for file in FILES if file in asked}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            id=file.stem.removeprefix("test_"),
            marks=[pytest.mark.long] if file.stem in LONG else [],
        )
        for file in FILES
    ],
)
def test_in_the_interpreter(file: Path, runs: dict[Path, Future[subprocess.CompletedProcess[str]]]):
    done = runs[file].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_without_a_gpu_and_without_the_interpreter_the_refusal_says_so():
    from ramify.kernels.triton import attention, interpret

    assert not interpret.INTERPRETED
    with pytest.raises(KernelUnavailable, match="CUDA device, or TRITON_INTERPRET=1"):
        attention.paged_attention(*make_batch([(1, 3)]), scale=1.0)


def test_every_interpreter_test_is_run():
    assert FILES
