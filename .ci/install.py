"""Makes a virtual environment of this clone, for the Makefile: ``python3 .ci/install.py .venv [EXTRA …]``.

It returns within 0.1 s if the environment holds what is asked for. Else:

    pyproject.toml has changed, or an extra is new    pip install, with the extras that were there before
    an installation was killed, the clone was moved,  a new environment; pip's cache has what was
    or the environment's Python is gone               downloaded

The file must parse in Python 3.6: an old Python then prints a sentence, and no SyntaxError.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN_MB = 10
"""Size in MB from which a download is shown."""
UNFINISHED = '{"clone": "unfinished"}'
"""Contents of the stamp while pip installs."""


def unfit() -> str:
    """Why this Python or machine cannot run Ramify, with the remedy; empty if nothing is known against it."""
    here = "%s is %s" % (sys.executable, platform.python_version())  # noqa: UP031
    another = here + ". Name another: make PYTHON=python3.12 demo"
    if sys.version_info < (3, 11):  # noqa: UP036
        return "Ramify needs Python 3.11 or later; " + another
    if sys.maxsize < 2**32:
        return "Ramify needs a 64-bit Python, as torch does; the 32-bit " + another
    if "musl" in str(sysconfig.get_config_var("SOABI")):
        return "Ramify needs glibc, as torch does; this Linux has musl (Alpine). Use a Debian image."
    return ""


def make_environment(venv: Path) -> None:
    """Make `venv` with pip in it. Exits with a message if this Python lacks what that needs."""
    python = venv / "bin" / "python"
    if not python.exists():  # or a link to a Python that is gone
        shutil.rmtree(venv, ignore_errors=True)
        command = [sys.executable, "-m", "venv", str(venv)]
    elif subprocess.run([str(python), "-c", "import pip"], capture_output=True).returncode:
        command = [str(python), "-m", "ensurepip"]
    else:
        return
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        print(made.stdout, made.stderr, sep="", end="")
        sys.exit(
            f"{sys.executable} cannot make an environment with pip. On Debian and Ubuntu: apt install "
            f"python3.{sys.version_info[1]}-venv. Elsewhere name a whole Python: make PYTHON=python3.12 demo"
        )


def pip(venv: Path, *arguments: str) -> int:
    """Run ``pip install``, and show what it downloads from `SHOWN_MB` on; returns its exit status."""
    python = str(venv / "bin" / "python")
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(command, cwd=str(ROOT), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            download = re.match(r"\s*Downloading (?:\S*/)?([^-\s]+)\S* \(([\d.]+) MB\)", line)
            if download and float(download[2]) >= SHOWN_MB:
                print(f"  downloading {download[1]}, {download[2]} MB", flush=True)
    return running.returncode


def install_torch(venv: Path, requirement: str) -> None:
    """Install the build of torch for this machine's GPU, or without CUDA libraries if it has none.

    uv knows PyTorch's indexes. `$TORCH_BACKEND` is uv's option, by default ``auto`` on Linux; if it is empty,
    torch comes from pip's own index like the rest.
    """
    backend = os.environ.get("TORCH_BACKEND", "auto" if sys.platform == "linux" else "")
    if not backend or pip(venv, "--quiet", "uv"):
        return
    python = str(venv / "bin" / "python")
    command = [python, "-m", "uv", "pip", "install", "--python", python, "--no-deps", requirement]
    if subprocess.run([*command, "--torch-backend", backend]).returncode:
        print(
            "PyTorch's index gave no torch. It comes from pip's, on Linux with 2.6 GB of CUDA libraries.",
            flush=True,
        )


def main(name: str, *extras: str) -> None:
    reason = unfit()
    if reason:
        sys.exit(reason)
    import tomllib

    venv = Path(name).absolute()
    stamp = venv / ".installed"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    state: dict[str, object] = {"clone": str(ROOT), "environment": str(venv)}
    before = stamp.read_text() if stamp.is_file() else "{}"
    old = json.loads(before)
    if any(old.get(key, place) != place for key, place in state.items()):
        print(f"Making {name} anew: its installation was not finished, or the clone was moved.")
        shutil.rmtree(venv)
        before = "{}"
    wanted = sorted({*extras, *old.get("extras", [])})
    state |= {"project": hashlib.sha256(project.encode()).hexdigest(), "extras": wanted}
    if state == old and (venv / "bin" / "python").exists():
        return
    started = time.monotonic()
    print(
        f"Installing into {name}: 0.6 GB to download and 2.4 GB on disk; 3.2 and 5.3 GB with CUDA.",
        flush=True,
    )
    make_environment(venv)
    stamp.write_text(UNFINISHED)
    dependencies = tomllib.loads(project)["project"]["dependencies"]
    install_torch(venv, next(each for each in dependencies if each.startswith("torch>")))
    status = pip(venv, "--editable", f".[{','.join(wanted)}]" if wanted else ".")
    if status:
        stamp.write_text(before)  # the environment is as it was, or can be completed
        sys.exit(status)
    folders = map(str, venv.glob("lib/python*/site-packages"))
    subprocess.run([sys.executable, ".ci/link_types.py", *folders], cwd=str(ROOT), check=True)
    stamp.write_text(json.dumps(state))
    print(f"Installed in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main(*sys.argv[1:])
