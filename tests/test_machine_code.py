"""Machine code is cached under all that it depends on, and never in the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from ramify import machine_code
from tests.test_borders import MODULES, imports, ours

NO_CONSTANTS = {"ramify.errors", "ramify.machine_code"}
"""Modules that are imported only for classes and functions that compiled code does not use."""


@pytest.mark.parametrize("package", machine_code.SOURCES)
def test_what_compiled_code_takes_from_elsewhere_is_in_the_digest(package: str) -> None:
    top, *patterns = machine_code.SOURCES[package]
    folder = MODULES[top].parent
    hashed = {path for pattern in patterns for path in folder.glob(pattern)}
    for name, path in MODULES.items():
        if name.startswith(f"{package}."):
            assert path in hashed
            taken = {MODULES[used] for used in ours(imports(path)) - NO_CONSTANTS}
            assert taken <= hashed, f"{name} imports {taken - hashed}"


def test_a_change_of_any_file_is_another_version(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    one, other, unread = tmp_path / "routing.py", tmp_path / "cpu" / "experts.py", tmp_path / "notes.md"
    seen = set()
    for path in (one, other, one):
        path.write_text(f"LEAST = {len(seen)}")
        seen.add(machine_code.digest(tmp_path, ["*.py", "cpu/**/*.py"]))
    before = machine_code.digest(tmp_path, ["*.py", "cpu/**/*.py"])
    unread.write_text("no source")
    assert len(seen) == 3
    assert machine_code.digest(tmp_path, ["*.py", "cpu/**/*.py"]) == before


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
"""No byte can be written to a file, as on a full disk."""
PACKING = "from ramify.kernels.cpu.parts import packing; print(sum(packing._run.stats.cache_hits.values()))"


@pytest.mark.slow
def test_code_that_cannot_be_kept_is_compiled_and_kept_code_is_used(tmp_path: Path) -> None:
    def imported(home: Path, before: str = "") -> tuple[str, str]:
        environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
        environment |= {"RAMIFY_HOME": str(home), "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", f"{before}\n{PACKING}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout.strip(), done.stderr

    (tmp_path / "file").write_text("no folder")
    for home, before in ((tmp_path / "file" / "home", ""), (tmp_path / "home", FULL)):
        hits, said = imported(home, before)
        assert hits == "0", said
        assert said.count("Set RAMIFY_HOME") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "home"]
    assert imported(tmp_path / "home") == ("0", "")
    assert imported(tmp_path / "home", FULL) == ("1", ""), "a read-only cache serves what is in it"


def test_a_part_is_compiled_only_within_the_functions_that_call_it() -> None:
    @machine_code.part()
    def double(x: int) -> int:
        return 2 * x

    @numba.njit
    def quadruple(x: int) -> int:
        return double(double(x))

    assert quadruple(3) == 12
    [result] = double.overloads.values()
    engine = quadruple.overloads[quadruple.signatures[0]].library.codegen._engine
    assert engine.is_symbol_defined(quadruple.overloads[quadruple.signatures[0]].fndesc.llvm_func_name)
    assert not engine.is_symbol_defined(result.fndesc.llvm_func_name)
