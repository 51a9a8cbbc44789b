"""Numba functions are compiled before they are needed, and only once."""

from __future__ import annotations

import fcntl
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ramify import machine_code
from ramify.grammar.vocabulary import Vocabulary
from ramify.runtime import compile_ahead
from ramify.runtime.compile_ahead import GRAMMARS, KERNELS, Modules
from ramify.runtime.scheduler import process

ROOT = Path(__file__).parents[2]


LIGHT = Modules("light ones", "no time", (("ramify.errors",), ("ramify.loop",)), "ramify.constraint")


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, empty: None) -> list[tuple[str, ...]]:
    """The groups of modules that were imported."""
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(compile_ahead, "_import", found.append)
    monkeypatch.setattr(compile_ahead, "KERNELS", LIGHT)
    monkeypatch.setattr(compile_ahead, "GRAMMARS", LIGHT._replace(title="grammars"))
    return found


def test_kernels_are_compiled_once_and_grammars_meanwhile(
    imported: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    compile_ahead.compile_kernels()
    compile_ahead.compile_grammars()  # waits for what has begun in the background
    assert sorted(imported) == sorted(2 * LIGHT.groups)
    assert "Compiling the light ones for this processor, once: no time" in caplog.text
    caplog.clear()
    compile_ahead.compile_kernels()
    assert len(imported) == 2 * len(LIGHT.groups)
    assert not caplog.text


def test_no_grammar_is_loaded_while_the_grammar_engine_is_compiled(
    imported: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it would import the engine, and stop the scheduler's loop until that is compiled."""
    monkeypatch.setattr(process, "_grammar_files", lambda vocabulary, backend: {"key": "a grammar"})
    assert process._find_grammar(Vocabulary((b"a",), frozenset()), "auto", "key") is None
    compile_ahead.compile_grammars()
    assert process._find_grammar(Vocabulary((b"a",), frozenset()), "auto", "key") == "a grammar"


def test_another_processor_or_setting_compiles_anew(
    imported: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ahead.compile_grammars()
    first = len(imported)
    monkeypatch.setenv("NUMBA_CPU_NAME", "znver4")
    compile_ahead.compile_grammars()
    monkeypatch.setattr(machine_code, "_processor", lambda: "another")
    compile_ahead.compile_grammars()
    assert len(imported) == 3 * first


def test_who_waits_for_another_process_does_not_warn(
    imported: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def meanwhile(group: tuple[str, ...]) -> None:
        imported.append(group)
        if group == LIGHT.groups[0]:
            waiting.start()
            waits.wait()

    def flock(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            waits.set()
        lock(file, how)

    lock, waits = fcntl.flock, threading.Event()
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(compile_ahead, "_import", meanwhile)
    waiting = threading.Thread(target=compile_ahead.compile_grammars)
    compile_ahead.compile_grammars()
    waiting.join()
    assert [record.message[:9] for record in caplog.records if record.levelno >= logging.WARNING] == [
        "Compiling"
    ]
    assert len(imported) == len(LIGHT.groups)


def test_what_cannot_be_compiled_is_tried_again(empty: None) -> None:
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
    package = "ramify." + folder.replace("/", ".")
    compiling = {
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
        for path in (ROOT / folder).rglob("*.py")
        if any(f"{mark}(" in path.read_text() for mark in ("@compiled", "@callback", "@numba.njit"))
    }
    assert len(compiling) > 3
    assert compiling <= set(run.stdout.split())
