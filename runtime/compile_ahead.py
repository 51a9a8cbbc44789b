"""Compiles numba functions before they are needed, in parallel processes: at most one for each core.

numba compiles the functions of a module when it is first imported, on one core, and caches the machine code
on disk. With an empty cache that takes about 25 s. In that case an engine that starts, and `ramify pull`,
first import the modules in parallel processes:

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
    "15 to 90 s",
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
"""The CPU kernels. Of 26 s of processor time on a Xeon (AVX-512), their two groups take 12 s each."""

GRAMMARS = Modules(
    "grammar engine",
    "15 to 45 s",
    (
        (f"{_AUTOMATON}.construction.subset_construction",),
        (
            f"{_AUTOMATON}.masks.loops",
            f"{_AUTOMATON}.masks.nondeterministic_walk",
            f"{_AUTOMATON}.construction.pruning",
            f"{_AUTOMATON}.construction.runs",
        ),
    ),
    f"{_AUTOMATON}.masks.token_trie",
)
"""The grammar compiler and the walk over the vocabulary, which the first constraint needs. The two groups
take 16 s and 13 s."""

_free_cores = threading.Semaphore(len(usable_cores()))
"""Permits for compiling processes, one for each core. The kernels' processes are submitted first."""


def compile_kernels() -> None:
    """Compile the CPU kernels, unless they are in the cache. Meanwhile the functions of the grammars are
    compiled in the background.

    Does not raise if compiling fails: the kernel then fails when it is imported.
    """
    if not _entry(KERNELS).is_dir():
        _ensure(KERNELS, meanwhile=threading.Thread(target=_ensure, args=(GRAMMARS,), daemon=True).start)


def compile_grammars() -> None:
    """Compile the functions that constraints need, unless they are in the cache."""
    if not grammars_are_compiled():
        _ensure(GRAMMARS)


def grammars_are_compiled() -> bool:
    """Whether the cache has the functions that constraints need. If not, their import takes up to a
    minute."""
    return _entry(GRAMMARS).is_dir()


def _entry(modules: Modules) -> Path:
    """The folder in the cache that exists if `modules` have been compiled."""
    return (
        machine_code.folder(modules.last.rpartition(".")[0]) / f"{modules.title.replace(' ', '-')}-compiled"
    )


def _ensure(modules: Modules, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Compile `modules` unless they are in the cache. If several processes call this, one compiles, and the
    others wait. `meanwhile` is called while the compiling runs."""

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
    except Exception as error:  # the functions are compiled when they are needed, which reports the error
        log.info("not compiled ahead: %s", error)


def _import(modules: tuple[str, ...]) -> None:
    """Import `modules` in a new process. Raises `subprocess.CalledProcessError` if an import fails."""
    code = f"import gc; gc.disable(); import {', '.join(modules)}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with _free_cores:
        subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True)
