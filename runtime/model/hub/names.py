"""Names of models on the hub, and the quantised models that a repository of GGUF files holds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from ramify.errors import InvalidRequest, NotFound
from ramify.runtime.model.checkpoint import SPLIT

USUAL = "Q4_K_M"
"""The preferred format, if it fits the machine, for names without a format, as in llama.cpp and Ollama."""

_NAME = re.compile(
    r"(?:https?://)?(?:hf\.co/|huggingface\.co/)?(?P<repository>\w[\w.-]*(?:/\w[\w.-]*)?)"
    r"(?:@(?P<revision>\w[\w./-]*))?(?::(?P<quant>\w[\w.-]*))?"
)
_LABEL = re.compile(
    r"(?:^|.*?[-._])(?P<label>(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP\d\w*|NVFP\d\w*|B?FP?16|FP?32))", re.IGNORECASE
)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Matches GGUF files that are no language model: vision towers, and importance matrices for quantisation."""


@dataclass(frozen=True)
class HubName:
    """A name on the hub: ``org/repo``, ``org/repo@revision`` or ``org/repo:QUANT``, each also after
    ``hf.co/``."""

    repository: str
    revision: str = "main"
    quant: str | None = None


def parsed(name: str) -> HubName | None:
    """The parts of `name`; None if no repository on the hub can have this name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return HubName(found["repository"], found["revision"] or "main", found["quant"])


@dataclass(frozen=True)
class Quant:
    """A model in GGUF files. `label` is the format named by the files, such as Q4_K_M, or the file name if it
    names no format; `files` are paths in the repository, and `size` is in bytes."""

    label: str
    files: tuple[str, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.label} ({self.size / 2**30:.2f} GiB)"


def quants_of(sizes: Mapping[str, int]) -> list[Quant]:
    """The models in a repository, the smallest first. A model with a missing split is left out.

    sizes : path → bytes, of the repository's files

    Example: a-Q8_0-00001-of-00002.gguf and a-Q8_0-00002-of-00002.gguf are one model, Q8_0.
    """
    parts: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in sorted(sizes):
        path = PurePosixPath(name)
        if path.suffix.lower() != ".gguf" or _NO_MODEL.search(path.name):
            continue
        split = SPLIT.fullmatch(path.stem)
        stem, count = (split["stem"], int(split["count"])) if split else (path.stem, 1)
        parts[str(path.with_name(stem)), count].append(name)
    return sorted(
        (
            Quant(_label(PurePosixPath(stem).name), tuple(files), sum(sizes[file] for file in files))
            for (stem, count), files in parts.items()
            if len(files) == count
        ),
        key=lambda quant: (quant.size, quant.files),
    )


def _label(stem: str) -> str:
    found = _LABEL.fullmatch(stem)
    return found["label"].upper() if found else stem


def named(quants: list[Quant], wanted: str, where: str) -> Quant:
    """The model with the label or the file name `wanted`; case is ignored. `where` is the repository.

    Raises `NotFound`, with all labels, if there is no such model, and `InvalidRequest` if there are several.
    """
    wanted = wanted.lower()
    found = [quant for quant in quants if wanted in _names(quant)]
    if len(found) == 1:
        return found[0]
    if found:
        files = ", ".join(quant.files[0] for quant in found)
        raise InvalidRequest(
            f"{where} holds {len(found)} models in {wanted.upper()}: {files}.",
            field="model",
            remedy=f"Name a file: {where}:{PurePosixPath(found[0].files[0]).name}.",
        )
    there = ", ".join(map(str, quants)) or "no GGUF files"
    raise NotFound(
        f"{where} holds no model in {wanted.upper()}. It has {there}.",
        field="model",
        remedy=f"Name one of them: {where}:{quants[0].label}." if quants else "Leave the format out.",
    )


def _names(quant: Quant) -> set[str]:
    path = PurePosixPath(quant.files[0])
    return {quant.label.lower(), quant.files[0].lower(), path.name.lower(), path.stem.lower()}


def by_preference(quants: list[Quant]) -> list[Quant]:
    """`quants` in the order in which they are tried: `USUAL`; then the others of at most 4 bits, the largest
    first; then those of more bits, the smallest first; last those whose file names give no format.

    Example: Q2_K, Q3_K_M, Q4_K_M, Q6_K and Q8_0 are tried in the order Q4_K_M, Q3_K_M, Q2_K, Q6_K, Q8_0.
    """

    def place(quant: Quant) -> tuple[int, int]:
        digits = re.search(r"\d+", quant.label)
        if not digits or _LABEL.fullmatch(quant.label) is None:
            return 3, quant.size
        few = int(digits[0]) <= 4
        return (0 if quant.label == USUAL else 1 if few else 2), -quant.size if few else quant.size

    return sorted(quants, key=place)
