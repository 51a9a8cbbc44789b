"""`ramify cache`: what is listed, and what is removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import _CacheLocator

import ramify.cli.cache
from ramify.cli.main import main


@pytest.fixture(autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources in place of Ramify's own, whose compiled functions stay."""
    folder = tmp_path_factory.mktemp("sources")
    monkeypatch.setattr(ramify.cli.cache, "_source_folders", lambda: {folder})
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "user"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    for name, size in {
        "packed/one-a/v1/model.pt": 3_000_000,
        "models/tiny/w": 1_000_000,
        "grammars/x": 10,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size))
    return tmp_path


def test_lists_kinds_and_models(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert f"{home}: 4.0 MB" in out
    assert "packed: 3.0 MB" in out
    assert "one-a" in out
    assert "  x" not in out, "constraints are many, and have no names"


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (["packed"], {"models", "grammars"}),
        (["one"], {"models", "grammars"}),
        (["models", "grammars"], {"packed"}),
        (["all"], set()),
    ],
)
def test_removes_what_it_is_told(
    what: list[str], left: set[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "--clear", *what]) == 0
    assert {path.relative_to(home).parts[0] for path in home.rglob("*") if path.is_file()} == left
    assert capsys.readouterr().out.startswith("Removed ")


def test_a_name_that_nothing_has_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--clear", "tow"]) == 2
    assert "'tow'" in capsys.readouterr().err
    assert (home / "grammars/x").exists()


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "none"))
    assert main(["cache"]) == 0
    assert main(["cache", "--clear", "all"]) == 0


@pytest.mark.parametrize("where", ["beside", "given", "given in home", "user"])
def test_compiled_functions_are_numbas_files(
    where: str, home: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = home / "numba" if where == "given in home" else sources / "given"
    if "given" in where:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(given))
    name = _CacheLocator.get_suitable_cache_subpath(str(sources / "linear.py"))
    folder = {"beside": sources / "__pycache__", "user": sources / "user/numba" / name}.get(
        where, given / name
    )
    folder.mkdir(parents=True)
    (folder / "linear.f-1.py311.nbi").write_bytes(bytes(500_000))
    (folder / "linear.f-1.py311.1.nbc").write_bytes(bytes(1_500_000))
    (folder / "linear.cpython-311.pyc").write_bytes(b"x")
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert f"{home}: 4.0 MB" in out
    assert "compiled: 2.0 MB" in out
    assert f"2 files in {folder}" in out
    assert "numba: " not in out, "they are listed once"
    assert main(["cache", "--clear", "compiled"]) == 0
    assert capsys.readouterr().out == "Removed 2 entries, 2.0 MB.\n"
    assert [path.name for path in folder.iterdir()] == ["linear.cpython-311.pyc"]
    assert (home / "models/tiny/w").exists()


def test_ramifys_own_sources_are_found() -> None:
    """In a process of its own, as the tests here have other sources."""
    script = "import sys, ramify.cli.cache as c; print(*c._source_folders(), 'numba' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "kernels/cpu " in ran.stdout
    assert "grammar/automaton " in ran.stdout
    assert ran.stdout.endswith("False\n"), "numba takes long to import"
