"""`ramify cache`: what is kept on disk, how large it is, and how to be rid of it."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ramify import cache
from ramify.errors import InvalidRequest

KINDS = {
    "models": "models that were fetched",
    "packed": "weights as kernels read them; made at the first load of a model",
    "compiled": "compiled kernels and grammar engines: numba's files",
    "grammars": "compiled constraints",
    "vocabularies": "tokens by their bytes, for grammars",
    "tokenizers": "tokenizers of GGUF files",
    "headers": "headers of models that were inspected",
    "forms": "what each type of GGUF tensor takes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Kinds: " + "; ".join(f"{kind}, {what}" for kind, what in KINDS.items()) + "."
    parser.add_argument(
        "--clear",
        metavar="WHAT",
        nargs="+",
        help="remove all of these kinds, or entries whose names begin so; all: everything",
    )


def run(options: argparse.Namespace) -> int:
    compiled = _numba_files()
    folders: defaultdict[Path, list[cache.Entry]] = defaultdict(list)
    for entry in compiled:
        folders[entry.path.parent].append(entry)
    kept = [entry for entry in cache.entries() if entry.path not in folders]  # NUMBA_CACHE_DIR may be in it
    found = kept + compiled
    if options.clear:
        chosen = _chosen(found, options.clear)
        chosen = [entry for entry in chosen if os.access(entry.path.parent, os.W_OK)]
        for entry in chosen:
            cache.remove(entry)
        print(f"Removed {len(chosen)} entries, {_size(sum(entry.size for entry in chosen))}.")
        return 0
    print(f"{cache.home()}: {_size(sum(entry.size for entry in kept))}")
    for kind in sorted({entry.kind for entry in found}):
        entries = [entry for entry in found if entry.kind == kind]
        total = _size(sum(entry.size for entry in entries))
        print(f"\n{kind}: {total}{', ' + KINDS[kind] if kind in KINDS else ''}")
        for entry in entries if kind in ("models", "packed") else []:
            day = time.strftime("%Y-%m-%d", time.localtime(entry.used))
            print(f"  {_size(entry.size):>9}  {day}  {entry.name}")
        for folder, files in sorted(folders.items()) if kind == "compiled" else []:
            print(f"  {_size(sum(file.size for file in files)):>9}  {len(files)} files in {folder}")
    return 0


def _numba_files() -> list[cache.Entry]:
    """The machine code of Ramify's functions. numba keeps it in NUMBA_CACHE_DIR, beside the sources or in the
    user's cache folder."""
    others = [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "numba")]
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        others.append(Path(given).absolute())
    found = {}
    for source in _source_folders():
        name = f"{source.name}_{hashlib.sha1(str(source).encode()).hexdigest()}"  # as numba names it
        for folder in (source / "__pycache__", *(other / name for other in others)):
            for path in folder.glob("*.nb[ic]"):
                with contextlib.suppress(FileNotFoundError):  # numba replaces its files
                    stat = path.stat()
                    found[path] = cache.Entry("compiled", path.name, path, stat.st_size, stat.st_mtime)
    return list(found.values())


def _source_folders() -> set[Path]:
    """The folders whose functions numba compiles."""
    specs = [find_spec(f"ramify.{package}") for package in ("kernels", "grammar")]
    origins = [Path(spec.origin) for spec in specs if spec and spec.origin]
    return {path.parent for origin in origins for path in origin.parent.rglob("*.py")}


def _chosen(found: Sequence[cache.Entry], names: Sequence[str]) -> list[cache.Entry]:
    """The entries that `names` mean. Raises `InvalidRequest` for a name that means none."""
    chosen = []
    for name in names:
        meant = [entry for entry in found if name in ("all", entry.kind) or entry.name.startswith(name)]
        if not meant and name not in ("all", *KINDS):
            raise InvalidRequest(
                f"There is no {name!r} in {cache.home()}.", remedy="ramify cache lists what there is."
            )
        chosen += [entry for entry in meant if entry not in chosen]
    return chosen


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
