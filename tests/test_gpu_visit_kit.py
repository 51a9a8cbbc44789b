"""The kit for a GPU host without a network (`.ci/gpu_visit_kit.py`): wheels and the host's script."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
STAND_IN = f"""\
#!{sys.executable}
# In place of the host's python3: notes its arguments, and where it would find ramify.
import json, os, sys
with open(os.environ["NOTES"], "a") as notes:
    found = [os.environ.get(name) for name in ("PYTHONPATH", "TRITON_CACHE_DIR")]
    notes.write(json.dumps([sys.argv[1:], *found]) + "\\n")
if "pip" in sys.argv:
    os.makedirs(sys.argv[sys.argv.index("--target") + 1] + "/ramify")
"""


@pytest.fixture(scope="module")
def kit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_visit_kit", ROOT / ".ci" / "gpu_visit_kit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_asks_for_what_runs_and_tests_the_engine(kit: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = kit.needs()
    assert set(project["dependencies"]) < set(asked)
    assert {kit.name_of(entry) for entry in asked} >= {"torch", "pytest", "pytest-asyncio", "hypothesis"}


def test_the_host_has_torch_and_triton_of_its_own(kit: ModuleType) -> None:
    """A wheel of torch or triton would replace the version that fits the host's driver."""
    listed = [line for line in kit.HOST.read_text().splitlines() if not line.startswith("#")]
    assert {"torch", "triton", "numba", "transformers"} <= {kit.name_of(line) for line in listed}
    assert not {kit.name_of(line) for line in listed} & set(kit.ABSENT)


def test_only_what_the_host_lacks_is_carried(kit: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "python"
    found = {"install": [{"metadata": {"name": name, "version": "1"}} for name in ("pyzmq", "msgspec")]}
    python.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    python.chmod(0o755)
    assert kit.lacking(python) == ["msgspec==1", "pyzmq==1"]


def test_the_script_installs_once_and_runs_the_clone(kit: ModuleType, tmp_path: Path) -> None:
    """Of two runs, the first unpacks the wheels and the cache. Both import the package from the clone."""
    clone, place, programs = (tmp_path / name for name in ("clone", "place", "bin"))
    for folder in ("ramify/cli", "lang/program", "kernels/triton", "gpu-visit-kit/wheels"):
        (clone / folder).mkdir(parents=True)
    for other in kit.top_folders():
        (clone / other).mkdir(exist_ok=True)
    (clone / "ramify/__init__.py").touch()
    (clone / "gpu-visit-kit/wheels/a.whl").touch()
    archive = clone / "gpu-visit-kit/triton-cache.tar.gz"
    archive.touch()
    (clone / "gpu-visit-kit/run").write_text(kit.RUN.format(place=place, parts=" ".join(kit.top_folders())))
    programs.mkdir()
    (programs / "python3").write_text(STAND_IN)
    (programs / "python3").chmod(0o755)
    notes = tmp_path / "notes"
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(notes)}
    for call in ("A", "B"):
        command = ["sh", "gpu-visit-kit/run", call, "--out", "x"]
        subprocess.run(command, cwd=clone, env=environment, check=True)
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    assert sum("pip" in arguments for arguments, *_ in found) == 1
    visits = [row for row in found if "benchmarks.gpu_visit" in row[0]]
    assert [arguments for arguments, *_ in visits] == [
        ["-m", "benchmarks.gpu_visit", call, "--out", "x"] for call in "AB"
    ]
    assert {tuple(rest) for _, *rest in visits} == {(f"{place}/site:{clone}", f"{place}/triton")}
    assert sum("tarfile" in arguments for arguments, *_ in found) == 1
    assert (place / "site/ramify/kernels/triton").resolve() == clone / "kernels/triton"
    assert (place / "site/ramify/cli").resolve() == clone / "ramify/cli"


def test_an_interpreter_that_is_not_there_is_refused(kit: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "gpu_visit_kit.py", "python0.1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "There is no python0.1" in done.stderr
