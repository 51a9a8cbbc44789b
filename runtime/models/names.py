"""Names of models: NAME=MODEL on the command line, the models in a folder, and how long they are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from ramify.errors import InvalidRequest, NotFound
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.model.checkpoint import SPLIT
from ramify.spelling import nearest

LATEST = ":latest"
"""The tag that Ollama gives to a name without a tag."""
ANY = "default"
"""Name of the first model in SGLang's examples."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def named(text: str) -> tuple[str, str]:
    """(name for clients, model) of `text`, which is NAME=MODEL or MODEL. An existing path may contain "="."""
    name, equals, model = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        return name_of(text), text
    if not name or not model:
        raise ValueError(f"models names {text!r}; it must be MODEL or NAME=MODEL.")
    return name, model


def by_name(texts: Iterable[str]) -> dict[str, str]:
    """Name → model of `texts` as `named` reads them. Raises ValueError if two have the same name."""
    found: dict[str, str] = {}
    for name, model in map(named, texts):
        if name in found:
            raise ValueError(
                f"models has two models of the name {name!r}, {found[name]} and {model}: name one NAME=MODEL."
            )
        found[name] = model
    return found


def name_of(model: str) -> str:
    """Name of a model that was given none: of a file its stem, of a folder its name, else the text itself."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stem
    if path.is_dir():
        return path.resolve().name
    return DEFAULT_MODEL if model.lower() == DEFAULT_MODEL.lower() else model


def in_folder(folder: Path) -> dict[str, str]:
    """Name → path of the models in `folder`, by name: its .gguf files, of a split model the first, and its
    folders with a config.json or with .gguf files. Raises `NotFound` if `folder` cannot be read."""
    found: dict[str, str] = {}
    try:
        for path in sorted(folder.expanduser().iterdir()):
            if path.suffix == ".gguf" and path.is_file():
                split = SPLIT.fullmatch(path.stem)
                if split is None or int(split["index"]) == 1:
                    found[path.stem if split is None else split["stem"]] = str(path)
            elif path.is_dir() and ((path / "config.json").is_file() or any(path.glob("*.gguf"))):
                found[path.name] = str(path)
    except OSError as error:
        raise NotFound(
            f"models_dir is {str(folder)!r}: {error.strerror}.", field="models_dir", remedy="Name a folder."
        ) from None
    return found


def unknown(name: str, known: Iterable[str], field: str = "model") -> NotFound:
    """The error for a model that is not served, named by `field`."""
    names = list(known)
    listed = ", ".join(map(repr, [*names[:20], *(["…"] if len(names) > 20 else [])]))
    near = nearest(name, names)
    use = f"Use one of {listed}." if names else None
    return NotFound(
        f"There is no model {name[:200]!r} here.",
        field=field,
        remedy=f"{near} {use}" if near else use,
    )


def keep_alive_s(value: object, field: str = "keep_alive") -> float | None:
    """Seconds that a model is kept after its last request, of Ollama's `keep_alive`; None: for ever.

    A number is in seconds; a text is a number or a duration such as "5m" or "1h30m"; a negative one means for
    ever. Raises `InvalidRequest` for another value.
    """
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    sign, magnitude = (-1, text[1:]) if text.startswith("-") else (1, text)
    parts = _DURATION.findall(magnitude)
    try:
        whole = "".join(number + unit for number, unit in parts) == magnitude
        seconds = sum(float(n) * _UNITS[unit] for n, unit in parts) if parts and whole else float(magnitude)
    except ValueError:
        seconds = math.nan
    if isinstance(value, bool) or math.isnan(seconds):
        raise InvalidRequest(
            f"{field} is {repr(value)[:100]}; it must be a duration.",
            field=field,
            remedy='Write seconds, as 300, or "5m", "1h30m"; 0 unloads at once, -1 keeps the model loaded.',
        )
    return None if sign < 0 or math.isinf(seconds) else seconds
