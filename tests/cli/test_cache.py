"""`ramify cache`: what is listed, and what is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramify import machine_code
from ramify.cli.main import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path /= "home"
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR")
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


def test_an_empty_name_removes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--clear", ""]) == 2
    assert "Give a kind, a name, or all." in capsys.readouterr().err
    assert (home / "grammars/x").exists()


def test_an_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert main(["cache"]) == 0
    assert main(["cache", "--clear", "all"]) == 0


@pytest.mark.parametrize("given", [False, True])
def test_compiled_functions_are_listed_and_removed(
    given: bool, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if given:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(home.parent / "numba"))
    folder = machine_code.folder("ramify.kernels.cpu")
    others = folder.with_name("numpy_0123")
    for path, size in ((folder, 2_000_000), (others, 1)):
        path.mkdir(parents=True)
        (path / "linear.f-1.py311.nbi").write_bytes(bytes(size))
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    assert "\ncompiled: 2.0 MB" in out
    assert folder.name in out
    assert main(["cache", "--clear", "compiled"]) == 0
    assert capsys.readouterr().out.startswith("Removed ")
    assert not folder.exists()
    assert others.exists() is given, "the folder that was given is others' as well"
    assert (home / "models/tiny/w").exists()


def test_answers_of_batches_go_only_by_their_name(home: Path) -> None:
    path = home / "batches/file-1.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"{}")
    assert main(["cache", "--clear", "all"]) == 0
    assert path.exists()
    assert main(["cache", "--clear", "batches"]) == 0
    assert not path.exists()
