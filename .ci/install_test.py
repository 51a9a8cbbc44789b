"""Runs the installations of docs/get-started.md in fresh places: ``python3 .ci/install_test.py [CASE …]``.

The commands are the page's own: the blocks below ``<!-- path: NAME -->``, in its order, with the Python
blocks below ``<!-- path: NAME FILE -->`` as files beside them. More cases cover what the page says in prose.
Each runs in

    a container    where docker or podman answers
    an overlay     a mount of this system whose changes are thrown away (root on Linux)
    a folder       elsewhere: only HOME is new, and files outside of it go unnoticed

with an empty HOME, an environment of a few variables and a clone of the last commit. All cases share pip's
cache. A case fails on a step that fails, on a warning about entry points, and on files outside of HOME.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "get-started.md"
INSTALL = "uv pip install --torch-backend auto"
IMAGE = "python:3.11-slim"
TIMEOUT_S = 1800
LONG = ("make quick", "make test")
"""Commands of the page that run only with --tests."""

NEW = "python3 -m venv .venv && . .venv/bin/activate && pip install uv"
ASK = "python greet.py"
COMPILES_NOTHING = f"{ASK} 2>&1 | tee log && ! grep -q Compiling log"
CASES = {
    "editable, copy, editable": [
        NEW,
        f"{INSTALL} --editable .",
        "ramify pull && cd / && python -c 'import ramify; assert \".venv\" not in ramify.__file__' && cd -",
        "pip install . && cd / && python -c 'import ramify; assert \".venv\" in ramify.__file__' && cd -",
        "pip install --editable .",
        COMPILES_NOTHING,
        "python3 -m venv second && second/bin/pip install . && . second/bin/activate",
        COMPILES_NOTHING,
        "(export RAMIFY_HOME=$HOME/.cache/ramify; unset HOME; python greet.py)",
        'mkdir "a Käfig" && cd "a Käfig" && python3 -m venv .venv && .venv/bin/pip install ..',
        f"cp ../greet.py . && . .venv/bin/activate && {COMPILES_NOTHING}",
    ],
    "interrupted make demo": [
        "(timeout -s KILL 15 make demo || true) && make demo",
        "(timeout -s KILL 5 .venv/bin/ramify pull || true) && make demo",
        "mv ../ramify ../moved && cd ../moved && make demo",
    ],
    "extras": [
        NEW,
        f"{INSTALL} .",
        "pip install '.[bench]' && python -c 'import matplotlib'",
        "pip install '.[mcp]' && python -c 'import mcp'",
        "pip install '.[parquet]' && python -c 'import pyarrow'",
        "pip install '.[dev]' && python -c 'import pytest, hypothesis' && pip check",
    ],
    "wheel": [
        NEW,
        "pip wheel --no-deps --wheel-dir dist .",
        f"{INSTALL} 'ramify-llm[parquet]' --find-links dist",
        "ramify pull && cd .. && python ramify/greet.py",
    ],
    "uv": [
        NEW,
        "uv venv other && VIRTUAL_ENV=$PWD/other uv pip install . pip",
        "other/bin/ramify pull && other/bin/python greet.py",
    ],
    "pipx": [
        f"{NEW} && pip install pipx",
        "pipx install .",
        "PATH=$PATH:$HOME/.local/bin && ramify pull && ramify --version",
    ],
}


class Step(NamedTuple):
    command: str
    seconds: float
    mb: int
    """Size in MB of the case's HOME after the step, without pip's cache."""


def page_paths(tests: bool) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(Commands by path, files by name) of the page."""
    block = re.compile(
        r"^<!-- path: (\w+)(?: (\S+))? -->\n(?:<!-- needs: \w+ -->\n)?```\w+\n(.*?)^```$", re.DOTALL | re.M
    )
    paths: dict[str, list[str]] = {}
    files = {}
    for path, file, text in block.findall(PAGE.read_text()):
        if file:
            files[file] = text
        else:
            commands = text.replace("\\\n", " ").splitlines()
            paths[path] = [one for one in commands if tests or not one.startswith(LONG)]
    return paths, files


def overlay_works() -> bool:
    probe = "mount -t overlay overlay -o lowerdir=/,upperdir=$0/up,workdir=$0/work $0/root"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("up", "work", "root"):
            (Path(folder) / name).mkdir()
        done = subprocess.run(["unshare", "--mount", "sh", "-c", probe, folder], capture_output=True)
    return done.returncode == 0


def place() -> str:
    """The best place that this machine has: docker, podman, overlay, or folder."""
    for engine in ("docker", "podman"):
        if shutil.which(engine) and not subprocess.run([engine, "info"], capture_output=True).returncode:
            return engine
    return "overlay" if sys.platform == "linux" and os.geteuid() == 0 and overlay_works() else "folder"


OVERLAY = """
mount -t overlay overlay -o lowerdir=/,upperdir=$1/up,workdir=$1/work $1/root && cd $1/root
mount --bind $2 .$2 && mount --rbind /dev dev && mount -t proc proc proc
shift 2 && exec chroot . "$@"
"""
"""Shell script of (layers, work folder, command …), which runs the command in an overlay of this system."""


@contextlib.contextmanager
def started(where: str, work: Path) -> Iterator[tuple[list[str], Callable[[], list[str]]]]:
    """Yields the words before a command, and a function that lists the files written outside `work`."""
    if where == "folder":
        yield [], list
    elif where == "overlay":
        with tempfile.TemporaryDirectory(prefix="layers-", dir=work.parent) as folder:
            layers = Path(folder)
            for name in ("up", "work", "root"):
                (layers / name).mkdir()

            def written() -> list[str]:
                found = [
                    path.relative_to(layers / "up") for path in (layers / "up").rglob("*") if path.is_file()
                ]
                return [str(path) for path in found if path.parts[0] != "tmp" and path.suffix != ".pyc"]

            enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", OVERLAY, "sh"]
            yield [*enter, folder, str(work)], written
    else:

        def output(*words: str) -> str:
            return subprocess.run([where, *words], capture_output=True, text=True, check=True).stdout.strip()

        def changed() -> list[str]:
            lines = output("diff", name).splitlines()
            return [line for line in lines if not re.search(r" /tmp|__pycache__", line)]

        volume = f"{work}:{work}"
        name = output("run", "--detach", "--rm", "--init", "--volume", volume, IMAGE, "sleep", "infinity")
        try:
            tools = "apt-get -qq update && apt-get -qq install make git curl"
            output("exec", name, "sh", "-c", tools)
            before = set(changed())
            yield [where, "exec", name], lambda: [line for line in changed() if line not in before]
        finally:
            output("kill", name)


def run_case(
    where: str, python: Path, commands: list[str], files: dict[str, str], options: argparse.Namespace
) -> list[Step]:
    """Run `commands` in one shell; returns the steps. Raises `RuntimeError` if one fails."""
    options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=options.work, prefix="case-"))
    clone = work / "home" / "ramify"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for name, text in files.items():
        (clone / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = f"set -e; cd {clone}\n" + "\n".join(
        f"echo; echo '@@{at}'\n{command}" for at, command in enumerate(commands)
    )
    text += "\necho; echo '@@end'\n"
    text = text.replace("ramify serve &", f"ramify serve --port {port} &").replace(
        "127.0.0.1:30000", f"127.0.0.1:{port}"
    )
    if options.wheels:
        text = text.replace(INSTALL, "pip install")
    cache = work.parent / "pip"  # beside the cases, and bound into each
    cache.mkdir(exist_ok=True)
    environment = {"HOME": str(work / "home"), "PATH": f"{python.parent}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    environment |= {
        "PIP_CACHE_DIR": str(cache),
        "UV_CACHE_DIR": str(cache / "uv"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    if where in ("docker", "podman"):
        environment["PATH"] = "/usr/local/bin:/usr/bin:/bin"
    if options.wheels:
        environment |= {"PIP_FIND_LINKS": options.wheels, "UV_FIND_LINKS": options.wheels}
    steps: list[Step] = []
    log = []
    with started(where, options.work) as (prefix, outside):
        words = [
            *prefix,
            "env",
            "-i",
            *(f"{name}={value}" for name, value in environment.items()),
            "bash",
            "-c",
            text,
        ]
        with subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            errors="replace",
        ) as running:
            assert running.stdout is not None
            signal.signal(signal.SIGALRM, lambda *_: os.killpg(running.pid, signal.SIGKILL))
            signal.alarm(TIMEOUT_S)
            began = time.monotonic()
            current = ""
            for line in running.stdout:
                log.append(line)
                if options.verbose:
                    print("   ", line, end="")
                if line.startswith("@@"):
                    if current:
                        steps.append(Step(current, time.monotonic() - began, size(work)))
                    began = time.monotonic()
                    if line == "@@end\n":
                        current = ""
                        break
                    current = commands[int(line[2:])]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            signal.alarm(0)
        written = outside()
    shutil.rmtree(work)
    said = "".join(log)
    if current:
        raise RuntimeError(f"{current}\n{said[-3000:]}")
    if re.search(r"WARNING: .*(script|entry point)", said):
        raise RuntimeError(f"a warning about entry points:\n{said[-3000:]}")
    if written:
        raise RuntimeError(f"files outside of HOME: {written[:10]}")
    return steps


def size(folder: Path) -> int:
    done = subprocess.run(["du", "-sm", str(folder)], capture_output=True, text=True)
    return int(done.stdout.split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument(
        "--python",
        action="append",
        type=Path,
        help="a Python to try the path `program` with; may be repeated",
    )
    parser.add_argument(
        "--wheels",
        help="a folder with a torch without CUDA; pip installs it, in place of uv from PyTorch's index",
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ramify-install-test")
    parser.add_argument("--tests", action="store_true", help="run `make quick` and `make test` as well")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    paths, files = page_paths(options.tests)
    where = place()
    print(f"Place: {where}", flush=True)
    wanted = [(name, Path(sys.executable), commands) for name, commands in {**paths, **CASES}.items()]
    wanted += [(f"program {one}", one, paths["program"]) for one in options.python or ()]
    unknown = set(options.cases) - {name for name, *_ in wanted}
    if unknown:
        known = ", ".join(name for name, *_ in wanted)
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are: {known}")
    failed = 0
    for name, python, commands in wanted:
        if options.cases and name not in options.cases and not name.startswith("program /"):
            continue
        print(f"\n{name}\n| step | seconds | MB of HOME after it |\n| --- | --- | --- |", flush=True)
        try:
            for step in run_case(where, python, commands, files, options):
                print(f"| `{step.command}` | {step.seconds:.0f} | {step.mb} |", flush=True)
        except RuntimeError as error:
            failed += 1
            print(f"FAILED: {error}", flush=True)
    print(f"\n{failed} cases failed" if failed else "\nall cases passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
