"""Makes a virtual environment of this clone, for the Makefile: ``python3 .ci/install.py .venv [EXTRA …]``.

It returns within 0.1 s if the environment holds what is asked for. Else:

    pyproject.toml has changed, or an extra is new    an installation, with the extras that were there before
    an installation was killed, the clone was moved,  a new environment; uv's cache has what was
    or the environment's Python is gone               downloaded

The file must parse in Python 3.6: an old Python then prints a sentence, and no SyntaxError.
"""

import ast
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
UNFINISHED = '{"clone": "unfinished"}'
"""Contents of the stamp while packages are installed."""
SETTINGS = (
    ("index-url", "UV_DEFAULT_INDEX"),
    ("extra-index-url", "UV_INDEX"),
    ("find-links", "UV_FIND_LINKS"),
    ("constraint", "UV_CONSTRAINT"),
    ("cert", "SSL_CERT_FILE"),
    ("trusted-host", "UV_INSECURE_HOST"),
    ("proxy", "HTTPS_PROXY"),
    ("proxy", "HTTP_PROXY"),
)
"""Settings of pip, and the variables that uv has for them."""
INDIFFERENT = (
    *("no-index", "disable-pip-version-check", "require-virtualenv", "user", "root-user-action"),
    *("break-system-packages", "timeout", "default-timeout", "retries", "resume-retries", "cache-dir"),
    *("no-cache-dir", "no-input", "no-color", "progress-bar", "quiet", "verbose", "log"),
    *("no-warn-script-location", "no-warn-conflicts", "compile", "no-compile"),
)
"""Settings of pip that uv can do without: `install` looks at no-index, the others change no package."""


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


def install(venv: Path, what: str) -> int:
    """Install the clone with the extras in `what`, and torch for this machine's GPU, or without CUDA
    libraries if it has none; returns the exit status.

    uv takes a sixth of pip's time, and knows PyTorch's indexes: `$TORCH_BACKEND` is its option, by default
    ``auto`` on Linux. If that is empty or these indexes cannot be reached, torch comes from pip's index like
    the rest; if uv fails again, pip installs. pip installs alone if it has a setting that uv lacks.
    """
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    ways = [[*pip, "--editable", what]]
    found = settings_of_pip(python)
    backend = os.environ.get("TORCH_BACKEND", "auto" if sys.platform == "linux" else "")
    lacking = sorted(found.keys() - {name for name, _ in SETTINGS} - {*INDIFFERENT})
    if lacking:
        print(
            f"pip installs, as uv lacks its {', '.join(lacking)}. With uv it would take a sixth of the time."
        )
    elif not run([*pip, "uv"], {}):
        uv = [python, "-m", "uv", "pip", "install", "--python", python, "--editable", what]
        if found.get("no-index", "").lower() in ("y", "yes", "t", "true", "on", "1"):
            uv, backend = [*uv, "--no-index"], ""
        ways[:0] = [[*uv, "--torch-backend", backend], uv] if backend else [uv]
    settings = variables_of_uv(found)
    for way in ways:
        status = run(way, settings)
        if not status:
            break
        if "--torch-backend" in way:
            print(
                "uv failed with PyTorch's index. It tries again with torch from pip's, on Linux with "
                "2.6 GB of CUDA libraries.",
                flush=True,
            )
    return status


def run(command: list[str], settings: dict[str, str]) -> int:
    """Run `command` with `settings` in the environment, and show its messages but for the list of packages
    at the end; returns its exit status."""
    environment = {**settings, **os.environ}
    with subprocess.Popen(
        command, cwd=str(ROOT), env=environment, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if not line.startswith((" + ", " - ", " ~ ", " Downloaded ")):
                print(line, end="", flush=True)
    return running.returncode


def settings_of_pip(python: str) -> dict[str, str]:
    """pip's settings for `pip install`, by name, from its files and its variables."""
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # the later goes before
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.MULTILINE):
            found[name] = ast.literal_eval(value)
    return found


def variables_of_uv(found: dict[str, str]) -> dict[str, str]:
    """pip's settings `found` as environment variables of uv, which reads none of pip's files."""
    # As pip, uv takes the newest release of all indexes. Three retries take 6 s where there is no network.
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_HTTP_RETRIES": "1"}
    for name, uv in SETTINGS:
        if name in found:
            separator = "," if uv == "UV_FIND_LINKS" else " "
            settings[uv] = separator.join(found[name].split())
    return settings


def main(name: str, *extras: str) -> None:
    reason = unfit()
    if reason:
        sys.exit(reason)
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
        f"Installing into {name}: 0.6 GB to download and 2.2 GB on disk; 3.2 and 5.1 GB with CUDA.",
        flush=True,
    )
    make_environment(venv)
    stamp.write_text(UNFINISHED)
    status = install(venv, f".[{','.join(wanted)}]" if wanted else ".")
    if status:
        stamp.write_text(before)  # the environment is as it was, or can be completed
        sys.exit(status)
    folders = map(str, venv.glob("lib/python*/site-packages"))
    subprocess.run([sys.executable, ".ci/link_types.py", *folders], cwd=str(ROOT), check=True)
    stamp.write_text(json.dumps(state))
    print(f"Installed in {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    main(*sys.argv[1:])
