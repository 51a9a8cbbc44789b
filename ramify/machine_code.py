"""The cache of numba's and Triton's machine code, shared by all clones, environments and projects of a user.

By default numba keeps machine code beside the sources. pip does not remove files that it did not install. So
folders would remain when a package is removed, and hide an editable installation of the same package.

A folder of the cache, such as ``kernels.cpu-1f0c…``, has the machine code of one package. Its name contains a
digest of all that the code depends on, so any process with the same sources, processor and versions finds it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ramify.cache as cache

SOURCES = {
    "ramify.kernels.cpu": (
        "ramify.kernels",
        *("machine/*.py", "weights/*.py", "arguments/*.py", "cpu/**/*.py"),
    ),
    "ramify.grammar.automaton": ("ramify.grammar", "*.py", "automaton/**/*.py", "rules/**/*.py"),
}
"""Package with compiled functions → (package, patterns of files in it): the sources on which the machine code
depends. These include other modules, as numba compiles constants and called functions into a function's
code."""

logger = logging.getLogger(__name__)

KIND = "compiled"
MOST_BYTES = 500_000_000
"""Bound on the size of all machine code, in bytes. The folders that were compiled longest ago are removed
first. One folder takes about 25 MB."""

_CPUINFO = Path("/proc/cpuinfo")


def root() -> Path:
    """The folder of numba's machine code: `$NUMBA_CACHE_DIR` if it is set, else a folder in Ramify's
    cache."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given).absolute() if given else cache.home() / KIND


def folder(package: str) -> Path:
    """The folder for the machine code of `package`, such as ``ramify.kernels.cpu``.

    `package` is not imported.
    """
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    settings = [item for item in settings if item[0] != "NUMBA_CACHE_DIR"]
    sources = _sources(package), digest(Path(__file__).parent, [Path(__file__).name])  # `part` is here
    identity = (sources, platform.python_version(), _numba_version(), _processor(), settings)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return root() / f"{package.removeprefix('ramify.')}-{key}"


def is_folder(name: str) -> bool:
    """Whether `name` begins like the names that `folder` gives.

    In `$NUMBA_CACHE_DIR` there may be folders of other programs.
    """
    return any(name.startswith(f"{package.removeprefix('ramify.')}-") for package in SOURCES)


@functools.cache
def _sources(package: str) -> str:
    top, *patterns = SOURCES.get(package, (package, "**/*.py"))
    found = find_spec(top)
    assert found is not None, top
    assert found.origin is not None, top
    return digest(Path(found.origin).parent, patterns)


def digest(top: Path, patterns: Iterable[str]) -> str:
    """A digest of the names and contents of the files below `top` that match one of `patterns`."""
    whole = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in top.glob(pattern)}):
        whole.update(f"{path.relative_to(top)}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()


@functools.cache
def _numba_version() -> str:
    return importlib.metadata.version("numba")


@functools.cache
def _processor() -> str:
    """The processor's instruction sets as Linux lists them, else the processor's name."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@functools.cache
def _warn_not_kept(reason: str) -> None:
    logger.warning(
        "Compiled code cannot be kept in %s: %s. Every start compiles anew. "
        "Set RAMIFY_HOME to a folder that can be written, on a disk with 1 GB free.",
        root(),
        reason,
    )


def keep_triton_kernels() -> None:
    """Have Triton keep kernels in Ramify's cache, unless `$TRITON_CACHE_DIR` names another folder."""
    if "TRITON_CACHE_DIR" in os.environ:
        return
    folder = cache.home() / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = os.access(folder, os.W_OK)
    except OSError:
        kept = False
    os.environ["TRITON_CACHE_DIR"] = str(folder) if kept else _for_this_process().name


@functools.cache
def _for_this_process() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, for kernels of Triton's that cannot be kept."""
    _warn_not_kept("it cannot be written")
    return tempfile.TemporaryDirectory(prefix="ramify-compiled-")


@functools.cache
def keep_outside_the_package() -> None:
    """Make numba keep the machine code of the packages in `SOURCES` only in `folder(package)`.

    For other functions numba's own choice of folder remains. Where the folder cannot be written, or its
    disk is full, a warning says so; code that is there is used all the same.
    """
    from numba.core.caching import (  # takes 0.3 s, and not every process needs it
        Cache,
        CacheImpl,
        _CacheLocator,
    )

    class Locator(_CacheLocator):
        """The location of one function's machine code (an interface of numba)."""

        def __init__(self, function: Any, package: str) -> None:
            self._folder = folder(package)
            self._name = f"{function.__module__.removeprefix(package)[1:]}-{function.__code__.co_firstlineno}"

        def get_cache_path(self) -> str:
            return str(self._folder)

        def get_source_stamp(self) -> str:
            return ""  # the folder's name depends on the sources

        def get_disambiguator(self) -> str:
            return self._name

        @classmethod
        def from_function(cls, function: Any, path: str) -> Locator | None:
            for package in SOURCES:
                if function.__module__.startswith(f"{package}."):
                    return cls(function, package)
            return None

    @contextlib.contextmanager
    def guard(_: Cache) -> Iterator[None]:
        """Context in which numba reads or writes its cache. An error of the disk fails no import."""
        try:
            yield
        except OSError as error:
            _warn_not_kept(error.strerror or str(error))

    Cache._guard_against_spurious_io_errors = guard  # type: ignore[method-assign,assignment]
    CacheImpl._locator_classes = [Locator, *CacheImpl._locator_classes]


def part(**options: Any) -> Any:
    """A decorator, with numba's `options`, for a function that only compiled functions call.

    The function becomes LLVM code, which is optimised and compiled within each compiled function that calls
    it. numba would do so also for each function alone, with all that it calls, which took half of the time
    to compile. Called from Python, the function ends the process.
    """
    import numba

    compiler = _part_compiler()
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": compiler}
    return numba.njit(**options)


@functools.cache
def _part_compiler() -> Any:
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler

    class PartLibrary(JITCodeLibrary):
        """LLVM code of a part and of the parts that it calls. It has no addresses (an interface of numba)."""

        def finalize(self) -> None:
            for library in dict.fromkeys(self._linking_libraries):
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)
            self._finalized = True

        def get_pointer_to_function(self, name: str) -> int:
            return 0

        @property
        def codegen(self) -> Any:
            return self

        def set_env(self, name: str, environment: object) -> None:
            """Do nothing: numba would write the address of `environment`, which object mode needs."""

    class PartCompiler(Compiler):
        def compile_extra(self, function: Any) -> Any:
            codegen = self.state.targetctx.codegen()
            self.state.library = PartLibrary(codegen, function.__qualname__)  # type: ignore[no-untyped-call]
            return super().compile_extra(function)  # type: ignore[no-untyped-call]

    return PartCompiler
