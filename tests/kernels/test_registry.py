"""Choosing a backend, compiling once a machine, and the errors where a backend cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest
from numba import int64

from ramify.kernels.cpu.codegen import compiler
from ramify.kernels.cpu.codegen.dots import DOTS
from ramify.kernels.cpu.codegen.simd import LANES
from ramify.kernels.registry import ops

pytestmark = pytest.mark.slow


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="'cuda'"):
        ops("cuda")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_without_a_compiler_the_refusal_names_the_remedy_and_torch_still_works():
    code = """
from ramify.kernels.registry import ops
from ramify.kernels.machine.errors import KernelUnavailable
ops("torch")
try:
    ops("cpu")
except KernelUnavailable as error:
    print(error)
"""
    result = run(code, NUMBA_DISABLE_JIT="1")
    assert "NUMBA_DISABLE_JIT" in result.stdout, result.stderr
    assert "torch attention backend" in result.stdout
    missing = "import sys; sys.modules['numba'] = None\n" + code
    result = run(missing)
    assert "cannot be loaded" in result.stdout, result.stderr


HOST = llvmlite.binding.get_host_cpu_features()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "features", "lanes"),
    [
        pytest.param("haswell", "+avx,+avx2,+fma", 8, marks=pytest.mark.long),
        pytest.param("x86-64", "+sse2", 4, marks=pytest.mark.long),
    ],
)
@pytest.mark.skipif(not HOST.get("avx2"), reason="imitates older x86-64 processors on one with AVX2")
def test_kernels_for_narrower_vectors(name, features, lanes):
    """The same tests with code for another processor, nearly all of whose time is compiling."""
    if lanes == LANES:
        pytest.skip("all other tests run with vectors of this width here")
    environment = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    result = run("from ramify.kernels.cpu.codegen.simd import LANES; print(LANES)", **environment)
    assert result.stdout.strip() == str(lanes), result.stderr
    here = Path(__file__).parent
    names, chosen = ["tiles", "linear"], []
    if lanes == 8:
        names += ["paged_attention", "cpu_cascade", "rope_and_norm", "masked_linear", "gated_delta"]
    else:  # 4 lanes take the same ways through the code: three formats of weights of twelve
        chosen = ["-k", "tiles or bf16 or wide"]
    files = [str(here / f"test_{name}.py") for name in names]
    arguments = ["-q", "-p", "no:cacheprovider", *chosen, *files]
    code = f"import pytest, sys; sys.exit(pytest.main({arguments}))"
    result = run(code, **environment)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not HOST.get("avx512bf16") or DOTS,
    reason="imitates AMD's processors with AVX512_BF16 on another that has it",
)
def test_products_by_dots_of_bfloat16():
    """Dots are used on AMD's processors only; Intel's have them too, but slower than float32."""
    features = HOST.flatten().replace("+amx", "-amx")  # Intel's alone, and taken first
    environment = {"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": features}
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in ("linear", "paged_attention", "cpu_cascade", "tiles")]
    code = f"""
import pytest, sys
failed = pytest.main(["-q", "-p", "no:cacheprovider", *{files!r}])
from ramify.kernels.cpu.codegen import dots
assert dots.DOTS
sys.exit(failed)
"""
    result = run(code, **environment)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_second_process_compiles_nothing():
    ops("cpu")  # compiled by now
    code = """
from numba.core import event
compiled = []
class Listener(event.Listener):
    def on_start(self, event): pass
    def on_end(self, event): compiled.append(event.data["dispatcher"].py_func.__qualname__)
event.register("numba:compile", Listener())
from ramify.kernels.registry import ops
ops("cpu")
print(compiled)
"""
    result = run(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_what_does_not_compile_is_unavailable():
    with pytest.raises(compiler.KernelUnavailable, match="cannot compile broken"):

        @compiler.compiled(int64(int64))
        def broken(x):
            return x.no_such_thing
