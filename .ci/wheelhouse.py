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
NEWEST = "9999"
BUILD = ("setuptools>=77", "wheel")
HOSTS_OWN = ("torch", "triton")
"""The host has its own of these, made for its driver. Others may depend on them: pip is shown empty ones."""
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


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    name = re.compile(r"[\w-]+")
    left_out = {*HOSTS_OWN, *NOT_THERE}
    return [entry for entry in wanted if name.match(entry)[0] not in left_out] + list(BUILD)  # type: ignore[index]


def stand_in(name: str, folder: Path) -> None:
    """An empty wheel that depends on nothing, newer than any."""
    info = f"{name}-{NEWEST}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{NEWEST}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {NEWEST}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def main(python: str, folder: Path) -> int:
    if not re.fullmatch(r"3\.\d+", python):
        print(f"PYTHON is {python!r}; say for which version, for instance PYTHON=3.12.", file=sys.stderr)
        return 2
    for wheel in folder.glob("*.whl"):
        wheel.unlink()  # of another Python, or another version
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    with tempfile.TemporaryDirectory() as stand_ins:
        for name in HOSTS_OWN:
            stand_in(name, Path(stand_ins))
        options = [f"--find-links={stand_ins}", f"--dest={folder}", *target(python)]
        subprocess.run([*pip, *options, *requirements()], check=True)
    for name in HOSTS_OWN:
        (folder / f"{name}-{NEWEST}-py3-none-any.whl").unlink(missing_ok=True)
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
