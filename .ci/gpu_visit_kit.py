"""Collects what a visit to a GPU host without a network needs beside the clone, into ./gpu-visit-kit.

    python3 .ci/gpu_visit_kit.py PYTHON [--capability 9.0]

PYTHON is an interpreter of the host's version; `gpu_host.txt` lists the host's packages. The kit has the
wheels that the host lacks, compiled Triton kernels, and a model's shape with a tokenizer. On the host, in a
copy of the clone with the kit: ``sh gpu-visit-kit/run A``.

The host's packages are installed into .venv-gpu-host, in which the kernels are compiled and a visit can be
rehearsed: ``PATH="$PWD/.venv-gpu-host/bin:$PATH" sh gpu-visit-kit/run A --tiny``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOST = ROOT / ".ci" / "gpu_host.txt"
VENV = ROOT / ".venv-gpu-host"
KIT = ROOT / "gpu-visit-kit"
PLACE = Path("/tmp/ramify-gpu-visit")
"""Of the unpacked kit, on both machines: Triton's cache holds absolute paths."""
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "setuptools")
"""Of the development's dependencies: what tests/gpu and the configuration of pytest need."""
ABSENT = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")
"""Packages that the newest releases of the host's depend on, and the host lacks."""
MOST_BYTES = 40 << 20

RUN = """\
#!/bin/sh
# One call of a visit, in a clone with this kit, by the host's python3: sh gpu-visit-kit/run A [--out FOLDER]
set -e
cd "$(dirname "$0")/.."
place={place}
site=$place/site
kit=$(cat gpu-visit-kit/wheels/*.whl gpu-visit-kit/triton-cache.tar.gz | cksum)
if [ "$kit" != "$(cat $place/ready 2>/dev/null)" ]; then
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \\
        --no-cache-dir --upgrade --target $site gpu-visit-kit/wheels/*.whl
    python3 -m tarfile -e gpu-visit-kit/triton-cache.tar.gz $place || echo "Kernels have to be compiled anew."
    echo "$kit" > $place/ready
fi
# The installed package becomes the clone's, so that what is mended between two calls counts.
rm -rf $site/ramify
mkdir $site/ramify
for part in ramify/* {parts}; do
    ln -s "$PWD/$part" $site/ramify/
done
# PYTHONSAFEPATH: the clone's folder ramify is a part of the package alone, and would hide it.
export PYTHONSAFEPATH=1 PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=$place/triton RAMIFY_HOME=$place/home
python3 -c "import numba, torch, triton, ramify" || {{
    echo "This python3 lacks a package of .ci/gpu_host.txt, or has another version than the kit's." >&2
    exit 2
}}
# Constraints need it in call B. It takes a core for half a minute.
nice -n 19 python3 -c "from ramify.runtime.compile_ahead import compile_grammars; compile_grammars()" &
exec python3 -m benchmarks.gpu_visit "$@"
"""


def needs() -> list[str]:
    """Requirements of the project at run time, and those of its development in `TESTS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries: list[str] = project["optional-dependencies"]["dev"]
    return project["dependencies"] + [entry for entry in entries if name_of(entry) in TESTS]


def name_of(entry: str) -> str:
    found = re.match(r"[\w.-]+", entry)
    assert found is not None, entry
    return found[0]


def top_folders() -> list[str]:
    """Folders of the clone that are packages below ramify."""
    mapped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return sorted(folder for folder in mapped.values() if "/" not in folder and folder != "ramify")


def lacking(python: Path) -> list[str]:
    """Name and version of each package that the environment of `python` lacks."""
    report = subprocess.run(
        [*pip(python), "install", "--quiet", "--dry-run", "--report", "-", *needs()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [entry["metadata"] for entry in json.loads(report)["install"]]
    return sorted(f"{each['name']}=={each['version']}" for each in found)


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def say(text: str) -> None:
    print(f"gpu-visit-kit: {text}", flush=True)


def host_python(interpreter: str) -> Path:
    """The interpreter of an environment with the host's packages and no others that it needs."""
    python = VENV / "bin" / "python"
    done = VENV / HOST.name
    if not done.exists() or done.read_text() != HOST.read_text():
        say(f"installing the host's packages into {VENV.name}")
        subprocess.run([interpreter, "-m", "venv", "--clear", str(VENV)], check=True)
        subprocess.run([*pip(python), "install", "--quiet", "-r", str(HOST)], check=True)
        subprocess.run([*pip(python), "uninstall", "--quiet", "--yes", *ABSENT], check=True)
        done.write_text(HOST.read_text())
    return python


def collect_wheels(python: Path) -> None:
    folder = KIT / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    wanted = lacking(python)
    say(f"{len(wanted)} wheels: {', '.join(wanted)}")
    download = [*pip(python), "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*download, f"--dest={folder}", *wanted], check=True)
    build = [*pip(python), "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, f"--wheel-dir={folder}", "."], cwd=ROOT, check=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)


def compile_kernels(python: Path, capability: str) -> None:
    """In the place in which the host unpacks them, by the versions of the host."""
    say(f"compiling kernels for compute capability {capability}")
    shutil.rmtree(PLACE, ignore_errors=True)
    site = PLACE / "site"
    wheels = sorted((KIT / "wheels").glob("*.whl"))
    subprocess.run([*pip(python), "install", "--quiet", "--no-deps", f"--target={site}", *wheels], check=True)
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{site}:{ROOT}"}
    environment |= {"TRITON_CACHE_DIR": str(PLACE / "triton")}
    command = [str(python), "-m", "benchmarks.gpu_visit.forms", capability, str(KIT / "model")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    with tarfile.open(KIT / "triton-cache.tar.gz", "w:gz") as archive:
        archive.add(PLACE / "triton", "triton")
    shutil.rmtree(PLACE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="interpreter of the host's version, such as python3.12")
    parser.add_argument(
        "--capability", default="9.0", help="compute capability of the GPU (default: %(default)s)"
    )
    args = parser.parse_args()
    if shutil.which(args.python) is None or subprocess.run([args.python, "-c", ""], check=False).returncode:
        print(f"There is no {args.python}. Give an interpreter of the host's version.", file=sys.stderr)
        return 2
    KIT.mkdir(exist_ok=True)
    python = host_python(args.python)
    collect_wheels(python)
    compile_kernels(python, args.capability)
    (KIT / "run").write_text(RUN.format(place=PLACE, parts=" ".join(top_folders())))
    sizes = {
        path.name: sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
        for path in sorted(KIT.iterdir())
    }
    total = sum(sizes.values())
    parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
    say(f"{total / 2**20:.1f} MiB of at most {MOST_BYTES >> 20} ({parts})")
    return int(total > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
