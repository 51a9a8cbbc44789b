"""`ramify cache`: lists the files on disk with their sizes, and removes them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from ramify import cache, machine_code
from ramify.errors import InvalidRequest

KINDS = {
    "models": "models that were fetched",
    "packed": "weights as kernels read them; made at the first load of a model",
    "compiled": "compiled kernels and grammar engines, a folder for each version of the sources",
    "triton": "compiled Triton kernels",
    "grammars": "compiled constraints",
    "vocabularies": "tokens by their bytes, for grammars",
    "tokenizers": "tokenizers of GGUF files",
    "headers": "headers of models that were inspected",
    "forms": "what each type of GGUF tensor takes",
    "batches": "files of batches and their answers, which no start makes again",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "kinds:\n" + "\n".join(f"  {kind:<13} {what}" for kind, what in KINDS.items())
    parser.add_argument(
        "--clear",
        metavar="WHAT",
        nargs="+",
        help="Remove the entries of a kind, or whose names begin with WHAT. all: everything but batches.",
    )


def run_command(options: argparse.Namespace) -> int:
    kept = cache.entries()
    apart = machine_code.root()  # NUMBA_CACHE_DIR may be anywhere
    compiled = [] if apart.is_relative_to(cache.home()) else cache.entries_in(apart, machine_code.KIND)
    compiled = [entry for entry in compiled if machine_code.is_folder(entry.name)]
    found = kept + compiled
    if options.clear:
        chosen = _chosen(found, options.clear)
        for entry in chosen:
            cache.remove(entry)
        print(f"Removed {len(chosen)} entries, {_size(sum(entry.size for entry in chosen))}.")
        return 0
    print(f"{cache.home()}: {_size(sum(entry.size for entry in kept))}")
    for kind in sorted({entry.kind for entry in found}):
        entries = [entry for entry in found if entry.kind == kind]
        total = _size(sum(entry.size for entry in entries))
        print(f"\n{kind}: {total}{', ' + KINDS[kind] if kind in KINDS else ''}")
        for entry in entries if kind in ("models", "packed", "compiled") else []:
            day = time.strftime("%Y-%m-%d", time.localtime(entry.used))
            print(f"  {_size(entry.size):>9}  {day}  {entry.path if entry in compiled else entry.name}")
    return 0


def _chosen(found: Sequence[cache.Entry], names: Sequence[str]) -> list[cache.Entry]:
    """The entries of `found` that `names` select. Raises `InvalidRequest` for a name that selects none."""
    chosen = []
    for name in names:
        if not name:
            raise InvalidRequest("--clear has an empty name.", remedy="Give a kind, a name, or all.")
        meant = [
            entry
            for entry in found
            if name == entry.kind
            or entry.name.startswith(name)
            or (name == "all" and entry.kind != "batches")
        ]
        if not meant and name not in ("all", *KINDS):
            raise InvalidRequest(
                f"There is no {name!r} in {cache.home()}.", remedy="ramify cache lists what there is."
            )
        chosen += [entry for entry in meant if entry not in chosen]
    return chosen


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
