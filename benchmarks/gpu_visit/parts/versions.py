"""The device, its driver, and the libraries."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu_visit.figures import Figures

ROOT = Path(__file__).parents[3]
QUERY = (
    "driver_version,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,power.limit,"
    "memory.used,memory.total,persistence_mode,mig.mode.current"
)
LIBRARIES = ("triton", "transformers", "numpy", "numba", "pyzmq", "msgspec", "xgrammar", "llguidance", "gguf")
FOLDERS = ("ramify", "lang", "runtime", "grammar", "radix", "kernels", "benchmarks", "tests")


def run(figures: Figures) -> None:
    cores = len(os.sched_getaffinity(0))
    figures.add("versions", **software(), **tools(), cores=cores, tiny=figures.tiny)
    if figures.tiny:
        figures.add("device", device="none: a rehearsal in Triton's interpreter")
        return
    with figures.attempt("device"):
        device = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        figures.add(
            "device",
            device=device.name,
            capability=f"{device.major}.{device.minor}",
            processors=device.multi_processor_count,
            l2_bytes=device.L2_cache_size,
            free_bytes=free,
            total_bytes=total,
        )
    with figures.attempt("nvidia-smi"):
        facts = smi()
        figures.add("nvidia-smi", driver=facts.pop("driver_version"), **facts)


def software() -> dict[str, str | None]:
    """The date, the commit, and the versions of libraries; None for a library that is not installed."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version_of(name) for name in LIBRARIES},
    }


def smi() -> dict[str, str]:
    """The fields of `QUERY`, of the first GPU.

    Raises
    ------
    OSError, subprocess.SubprocessError
        If there is no nvidia-smi, or it does not answer.
    RuntimeError
        If it fails, or its answer does not have these fields.
    """
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    values = said.stdout.strip().split(", ")
    if said.returncode or len(values) != len(QUERY.split(",")):
        raise RuntimeError(f"nvidia-smi answers with {said.returncode}: {said.stdout}{said.stderr}")
    return dict(zip(QUERY.split(","), values, strict=True))


def tools() -> dict[str, str | None]:
    """Paths of a C compiler and Python's header, with which Triton 3.6 compiles launchers; None for one that
    is missing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return {"cc": compiler, "Python.h": str(header) if header.exists() else None}


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a host's own build may be installed without metadata
        try:
            return str(getattr(importlib.import_module(name), "__version__", "of unknown version"))
        except ImportError:
            return None


def commit() -> str:
    """The commit, and a digest of the sources. The digest is needed because a copied tree may differ from the
    commit, or have no repository."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    sources = f"sources {digest.hexdigest()[:12]}"
    try:
        said = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return sources
    return sources if said.returncode else f"{said.stdout.strip()} ({sources})"
