"""The wheels for a GPU host without a network (`.ci/wheelhouse.py`), from a folder of empty ones."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheelhouse() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheelhouse", ROOT / ".ci" / "wheelhouse.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(entries: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", entry, maxsplit=1)[0] for entry in entries}


def test_it_asks_for_all_that_is_not_the_hosts_own(wheelhouse: ModuleType) -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = written["project"]
    needed = names(
        project["dependencies"]
        + project["optional-dependencies"]["dev"]
        + written["build-system"]["requires"]
    )
    asked = names(wheelhouse.requirements())
    assert needed - asked == {"torch", "triton", "ruff", "mypy"}
    assert asked - needed == {"wheel"}


@pytest.mark.slow
def test_torch_and_triton_stay_the_hosts_own(
    wheelhouse: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Others depend on them, real ones are to be had, and pip is held to an upper bound of torch."""
    source, folder, constraints = tmp_path / "source", tmp_path / "wheels", tmp_path / "constraints.txt"
    source.mkdir()
    folder.mkdir()
    for entry in wheelhouse.requirements():
        name = wheelhouse.name_of(entry)
        needs = ("torch>=1.10", "triton") if name == "xgrammar" else ()
        version = wheelhouse.oldest(entry) if ">=" in entry else "1"
        wheelhouse.write_wheel(name, version, source, needs)
    for name, version in {"torch": "2.12.0", "triton": "3.7.0"}.items():
        wheelhouse.write_wheel(name, version, source, ("nvidia-cuda-runtime",))
    wheelhouse.write_wheel("nvidia-cuda-runtime", "13", source)
    constraints.write_text("torch<=2.14\n")
    (folder / "stale-1-py3-none-any.whl").touch()
    for option, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(source),
        "PIP_CONSTRAINT": str(constraints),
    }.items():
        monkeypatch.setenv(option, value)
    assert wheelhouse.main("3.12", folder) == 0
    assert "no torch and no triton" in capsys.readouterr().out
    found = {wheel.name.split("-")[0].replace("_", "-") for wheel in folder.glob("*.whl")}
    assert found == names(wheelhouse.requirements())


def test_a_version_that_is_none_is_refused(
    wheelhouse: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wheelhouse.main("python3.12", tmp_path) == 2
    assert "PYTHON=3.12" in capsys.readouterr().err
