"""What numba compiles is compiled before it is needed, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ramify.runtime import compile_ahead
from ramify.runtime.compile_ahead import GRAMMARS, KERNELS, Modules

ROOT = Path(__file__).parents[2]


LIGHT = Modules("light", (("ramify.errors",), ("ramify.loop",)), "ramify.constraint")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The groups that were imported, in an empty cache folder."""
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(compile_ahead, "_import", found.append)
    monkeypatch.setattr(compile_ahead, "KERNELS", LIGHT)
    monkeypatch.setattr(compile_ahead, "GRAMMARS", LIGHT._replace(name="grammars"))
    return found


def test_kernels_are_compiled_once_and_grammars_meanwhile(
    imported: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    compile_ahead.compile_kernels()
    compile_ahead.compile_grammars()  # waits for what has begun in the background
    assert sorted(imported) == sorted(2 * LIGHT.groups)
    assert "Compiling the CPU kernels for this processor" in caplog.text
    caplog.clear()
    compile_ahead.compile_kernels()
    assert len(imported) == 2 * len(LIGHT.groups)
    assert not caplog.text


def test_another_processor_or_setting_compiles_anew(
    imported: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ahead.compile_grammars()
    first = len(imported)
    monkeypatch.setenv("NUMBA_CPU_NAME", "znver4")
    compile_ahead.compile_grammars()
    monkeypatch.setattr(compile_ahead, "_processor", lambda: "another")
    compile_ahead.compile_grammars()
    assert len(imported) == 3 * first


def test_what_cannot_be_compiled_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    compile_ahead._ensure(LIGHT._replace(last="ramify.no_such_module"))
    assert not compile_ahead._entry(LIGHT).is_dir()
    compile_ahead._ensure(LIGHT)
    assert compile_ahead._entry(LIGHT).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "folder"), [(KERNELS, "kernels/cpu"), (GRAMMARS, "grammar/automaton")])
def test_no_module_that_numba_compiles_is_forgotten(modules: Modules, folder: str) -> None:
    names = ", ".join([*(name for group in modules.groups for name in group), modules.last])
    code = f"import sys, {names}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    package = modules.last.rpartition(".")[0]
    compiling = {
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
        for path in (ROOT / folder).rglob("*.py")
        if any(f"{mark}(" in path.read_text() for mark in ("@compiled", "@callback", "@numba.njit"))
    }
    assert len(compiling) > 3
    assert compiling <= set(run.stdout.split())
