"""Collects the wheels that a GPU host without a network needs beside its own torch and triton.

    python3 .ci/wheelhouse.py 3.12 [FOLDER]

They are the runtime's and the tests' dependencies for that Python on Linux (x86-64).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_THERE = ("ruff", "mypy")
"""Of the development's dependencies: nothing is checked there."""
BUILD = ("setuptools>=77,<82", "wheel")
"""The bound is that of torch 2.11."""
HOSTS_OWN = ("torch", "triton")
"""The host has its own of these, made for its driver. Others may depend on them: pip is shown empty ones, of
the oldest versions that the project takes. A higher version would break the upper bounds of others."""
GLIBC = (39, 36, 35, 34, 31, 28, 27, 24, 17)
"""Of manylinux platforms, which pip takes by exact name."""


def target(python: str) -> list[str]:
    """pip's options for wheels of another machine."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    return options + [f"--platform={platform}" for platform in platforms]


def project_entries() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries: list[str] = project["dependencies"] + project["optional-dependencies"]["dev"]
    return entries


def name_of(entry: str) -> str:
    return re.match(r"[\w-]+", entry)[0]  # type: ignore[index]


def oldest(entry: str) -> str:
    return re.search(r">=([\d.]+)", entry)[1]  # type: ignore[index]


def requirements() -> list[str]:
    left_out = {*HOSTS_OWN, *NOT_THERE}
    return [entry for entry in project_entries() if name_of(entry) not in left_out] + list(BUILD)


def stand_ins() -> dict[str, str]:
    """Names and versions of the empty wheels. Their label keeps pip from taking a real one instead."""
    return {
        name_of(entry): f"{oldest(entry)}+host" for entry in project_entries() if name_of(entry) in HOSTS_OWN
    }


def write_wheel(name: str, version: str, folder: Path, needs: tuple[str, ...] = ()) -> Path:
    """An empty wheel."""
    stem = name.replace("-", "_")
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", "\n".join([*head, *(f"Requires-Dist: {need}" for need in needs), ""])
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def main(python: str, folder: Path) -> int:
    if not re.fullmatch(r"3\.\d+", python):
        print(f"PYTHON is {python!r}; say for which version, for instance PYTHON=3.12.", file=sys.stderr)
        return 2
    for wheel in folder.glob("*.whl"):
        wheel.unlink()  # of another Python, or another version
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    with tempfile.TemporaryDirectory() as empty:
        empties = stand_ins()
        paths = [write_wheel(name, version, Path(empty)) for name, version in empties.items()]
        pinned = [f"{name}=={version}" for name, version in empties.items()]
        options = [f"--find-links={empty}", f"--dest={folder}", *target(python)]
        subprocess.run([*pip, *options, *requirements(), *pinned], check=True)
    for path in paths:
        (folder / path.name).unlink(missing_ok=True)
    wheels = sorted(folder.glob("*.whl"))
    foreign = [wheel.name for wheel in wheels if wheel.name.startswith((*HOSTS_OWN, "nvidia"))]
    if foreign:
        print(f"The host's own would be replaced by {', '.join(foreign)}.", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{folder}: {len(wheels)} wheels for Python {python}, {size / 1e6:.0f} MB, no torch and no triton")
    return 0


if __name__ == "__main__":
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    given = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] != "python3" else version
    sys.exit(main(given, Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "wheelhouse"))
