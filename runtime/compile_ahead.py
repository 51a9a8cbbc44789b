"""Compiles numba's functions before they are needed, by as many processes as there are cores.

numba compiles the functions of a module when it is first imported, on one core, and keeps the machine code on
disk. Where nothing has been compiled yet that takes about 40 s. So an engine that starts there, and
`ramify pull`, first import the modules in processes beside each other:

    core 0   attention, sampling                ──▶ layer_stack, in this process
    core 1   linear, linear_masked, rope, lora   ──▶ the grammars' modules

Threads would not help: numba holds one lock for a whole process.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ramify import cache, machine_code
from ramify.runtime.cores import usable_cores

log = logging.getLogger("ramify")


class Modules(NamedTuple):
    """Modules to compile by importing them: each group in a process of its own, then `last` in this one."""

    title: str
    takes: str
    """Time on two cores, for the log."""
    groups: tuple[tuple[str, ...], ...]
    last: str


_CPU, _AUTOMATON = "ramify.kernels.cpu", "ramify.grammar.automaton"

KERNELS = Modules(
    "CPU kernels",
    "20 s to 2 minutes",
    (
        (f"{_CPU}.attention", f"{_CPU}.sampling", f"{_CPU}.gated_delta", f"{_CPU}.rowwise"),
        (
            f"{_CPU}.linear",
            f"{_CPU}.parts.packing",
            f"{_CPU}.linear_masked",
            f"{_CPU}.rope",
            f"{_CPU}.lora",
            f"{_CPU}.experts",
        ),
    ),
    f"{_CPU}.layer_stack",
)
"""The CPU kernels: 15 s and 12 s, then 1 s, on an AMD EPYC (Zen 5). All modules take 57 s of processor time
there, and 150 s on Zen 3."""

GRAMMARS = Modules(
    "grammar engine",
    "20 s to 1 minute",
    (
        (f"{_AUTOMATON}.subset_construction",),
        tuple(f"{_AUTOMATON}.{name}" for name in ("loops", "nondeterministic_walk", "pruning", "runs")),
    ),
    f"{_AUTOMATON}.token_trie",
)
"""The grammar compiler and the walk of all tokens: 16 s and 13 s. The first constraint needs them."""

_free_cores = threading.Semaphore(len(usable_cores()))
"""Threads that start compiling processes, one a core; the kernels' are submitted first."""


def compile_kernels() -> None:
    """Return when the CPU kernels are compiled; the functions of the grammars follow in the background.

    A kernel that cannot be compiled fails when it is imported.
    """
    if not _entry(KERNELS).is_dir():
        _ensure(KERNELS, meanwhile=threading.Thread(target=_ensure, args=(GRAMMARS,), daemon=True).start)


def compile_grammars() -> None:
    """Return when the functions that constraints need are compiled."""
    if not _entry(GRAMMARS).is_dir():
        _ensure(GRAMMARS)


def _entry(modules: Modules) -> Path:
    """The folder of the cache that exists once these modules have been compiled."""
    return (
        machine_code.folder(modules.last.rpartition(".")[0]) / f"{modules.title.replace(' ', '-')}-compiled"
    )


def _ensure(modules: Modules, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Compile `modules` unless that was done before; of several processes one does, and the others wait."""

    def build(folder: Path) -> None:
        log.warning(
            "Compiling the %s for this processor, once: %s on two cores.", modules.title, modules.takes
        )
        with ThreadPoolExecutor(len(modules.groups)) as threads:
            compiling = [threads.submit(_import, group) for group in modules.groups]
            meanwhile()
            for group in compiling:
                group.result()
        importlib.import_module(modules.last)
        (folder / "modules").write_text(f"{modules.groups} {modules.last}\n")

    try:
        entry = cache.ensure(_entry(modules), build)
        cache.bound(machine_code.KIND, machine_code.MOST_BYTES, using=entry.parent)
    except Exception as error:  # whoever needs these functions compiles them, or says what is wrong
        log.info("not compiled ahead: %s", error)


def _import(modules: tuple[str, ...]) -> None:
    """Raises `subprocess.CalledProcessError` where an import fails."""
    code = f"import gc; gc.disable(); import {', '.join(modules)}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with _free_cores:
        subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True)
