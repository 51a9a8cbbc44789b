"""Machine code in the cache folder, numba's and Triton's: shared by clones, environments and users' projects.

numba by itself keeps it beside the sources. pip leaves files there that it did not install, and the folders
that stay behind when a package is removed hide an editable installation of the same package.

A folder of the cache holds the code of one package of sources: ``kernels.cpu-1f0c…``. Its name is a digest of
all that the code depends on, so whoever has the same sources, processor and versions finds it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import tempfile
from collections.abc import Iterable
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
"""Package with compiled functions → patterns of the files, by package, that these functions are compiled
from. numba takes the values of constants and the code of other functions into a function's own code."""

logger = logging.getLogger(__name__)

KIND = "compiled"
MOST_BYTES = 500_000_000
"""Space for machine code, in bytes; the versions compiled longest ago go first. One takes about 25 MB."""

_CPUINFO = Path("/proc/cpuinfo")


def root() -> Path:
    """`$NUMBA_CACHE_DIR`, as for all of numba's code, or a folder of Ramify's cache."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given).absolute() if given else cache.home() / KIND


def folder(package: str) -> Path:
    """The folder for the code of `package`, such as ``ramify.kernels.cpu``. Its sources are not imported."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    settings = [item for item in settings if item[0] != "NUMBA_CACHE_DIR"]
    identity = (_sources(package), platform.python_version(), _numba_version(), _processor(), settings)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return root() / f"{package.removeprefix('ramify.')}-{key}"


def is_folder(name: str) -> bool:
    """True where `folder` gave this name to a folder, which may stand among folders of other programs."""
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
    """The instruction sets, as Linux lists them."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@functools.cache
def _for_this_process() -> tempfile.TemporaryDirectory[str]:
    """A folder for code that cannot be kept. numba's next choice would be the package's own folders."""
    logger.warning(
        "%s cannot be written, so compiled code is not kept and every start compiles anew. "
        "Set RAMIFY_HOME to a folder that can be written.",
        root(),
    )
    return tempfile.TemporaryDirectory(prefix="ramify-compiled-")


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
def keep_outside_the_package() -> None:
    """Have numba keep the code of the packages in `SOURCES` in `folder`, and nowhere else. Other functions
    stay where numba puts them."""
    from numba.core.caching import CacheImpl, _CacheLocator  # 0.3 s, which not every process needs

    class Locator(_CacheLocator):
        """The place of one function's code (numba's interface)."""

        def __init__(self, function: Any, package: str) -> None:
            self._folder = folder(package)
            self._name = f"{function.__module__.removeprefix(package)[1:]}-{function.__code__.co_firstlineno}"

        def get_cache_path(self) -> str:
            return str(self._folder)

        def get_source_stamp(self) -> str:
            return ""  # the folder's name has the sources

        def get_disambiguator(self) -> str:
            return self._name

        @classmethod
        def from_function(cls, function: Any, path: str) -> Locator | None:
            for package in SOURCES:
                if function.__module__.startswith(f"{package}."):
                    self = cls(function, package)
                    try:
                        self.ensure_cache_path()  # type: ignore[no-untyped-call]
                    except OSError:
                        self._folder = Path(_for_this_process().name)
                    return self
            return None

    CacheImpl._locator_classes = [Locator, *CacheImpl._locator_classes]
