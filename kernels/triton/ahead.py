"""Compiles Triton kernels ahead of their launches: in parallel processes, for a GPU that need not be there.

Triton compiles a kernel anew for each form: its constants, the dtypes of its arguments, and which integers
are divisible by 16. One form takes 0.3 to 5 s of one core.

    with noting() as forms:                      no launch is run
        warm_up()
    compile_forms(missing(forms), capability)    in parallel, into Triton's cache folder
    warm_up()                                    finds every kernel there

A cache folder can be carried to another machine with the same versions of Python and triton. Triton keeps
absolute paths in the folder, so its path must be the same on both machines.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.cache import FileCacheManager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ramify.kernels.triton.tiles import launch


class Form(NamedTuple):
    """One form of a kernel: its module, its name, and the specialisation as Triton writes it (JSON)."""

    module: str
    kernel: str
    specialisation: str


class _Target:
    """A stand-in for a GPU's driver, with the methods that compiling needs
    (`triton.backends.driver.DriverBase`)."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def absent(capability: int) -> Iterator[None]:
    """A context in which kernels are planned and compiled for an absent GPU of compute capability
    `capability`.

    Inside, launchers take tensors on the CPU or the meta device. Launches must be recorded by `noting`,
    because nothing can run them.
    """
    before = driver._active, launch.absent_capability
    driver.set_active(_Target(capability))  # as much of one as compiling needs
    launch.absent_capability = capability
    try:
        yield
    finally:
        driver._active, launch.absent_capability = before


@contextlib.contextmanager
def noting() -> Iterator[dict[Form, None]]:
    """A context in which launches are recorded, not run. Yields the forms that this process has not compiled
    yet, in the order of their launches.

    Tensors that the launches would have written may hold anything.
    """
    forms: dict[Form, None] = {}
    before, run = knobs.runtime.jit_cache_hook, JITFunction.run

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        forms[Form(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # it is not compiled

    def not_run(self: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *args, warmup=True, **named)

    knobs.runtime.jit_cache_hook, JITFunction.run = note, not_run
    try:
        yield forms
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = before, run


class _Missing(Exception):
    pass


class _Lookup(FileCacheManager):
    """A manager of Triton's cache that raises `_Missing` for a kernel not in the cache, so that none is
    compiled."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = super().get_group(filename)
        if not found:
            raise _Missing
        return found


def missing(forms: Iterable[Form]) -> list[Form]:
    """The forms that Triton's cache folder lacks. The other forms are loaded, so this process can launch
    them."""
    before = knobs.cache.manager_class
    knobs.cache.manager_class = _Lookup
    lacking = []
    try:
        for form in forms:
            try:
                _compile(form)
            except _Missing:
                lacking.append(form)
    finally:
        knobs.cache.manager_class = before
    return lacking


def compile_forms(forms: Sequence[Form], capability: int, *, processes: int) -> list[str]:
    """Compile forms into Triton's cache folder. Returns the compiler's message for each form that failed.

    processes : the most processes; each takes a core and about 0.5 GB
    """
    waiting = deque(forms)
    workers: list[_Worker] = []
    failures: list[str] = []
    interrupted = threading.Event()

    def feed() -> None:
        worker: _Worker | None = None
        while waiting:
            try:
                form = waiting.popleft()
            except IndexError:  # another thread was faster
                break
            if worker is None or worker.ended:
                worker = _Worker(capability)  # a form crashed the last one
                workers.append(worker)
                if interrupted.is_set():  # it started while the others were killed
                    worker.kill()
            if failure := worker.compile(form):
                failures.append(f"{form.kernel}: {failure}")
        if worker is not None:
            worker.close()

    count = min(processes, len(forms))
    with ThreadPoolExecutor(max(count, 1)) as threads:
        try:
            for feeding in [threads.submit(feed) for _ in range(count)]:
                feeding.result()
        except BaseException:
            waiting.clear()
            interrupted.set()
            for worker in workers:
                worker.kill()
            raise
    return failures


class _Worker:
    """A process that compiles one form after the other."""

    def __init__(self, capability: int) -> None:
        environment = os.environ | {"TRITON_STORE_BINARY_ONLY": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TRITON_CACHE_DIR": str(knobs.cache.dir)}
        # -P: a folder `ramify` in the working directory is not imported as the package.
        command = [sys.executable, "-P", "-m", __name__, str(capability)]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which kills this process
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._forms, self._answers = self._process.stdin, self._process.stdout
        self.ended = False

    def compile(self, form: Form) -> str | None:
        """Compile `form`; return the error or None. A crash of the compiler ends the worker's process."""
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._forms.write(json.dumps(form) + "\n")
            self._forms.flush()
            answer = self._answers.readline()
        if not answer:
            self.ended = True
            self.close()
            return f"the compiling process ended with status {self._process.returncode}"
        failure: str | None = json.loads(answer)
        return failure

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._forms.close()
        self._process.wait()
        self._answers.close()


@functools.cache
def fix_cache_keys() -> None:
    """Compute the cache keys of all kernels in one order, before any is compiled or looked up.

    Triton's key of a function depends on which of the functions that it calls already have a key
    (`JITFunction.cache_key` of 3.6). In another order some kernels would not be found again.
    """
    package = importlib.import_module(__package__ or "")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in sorted(names):
        for _, value in sorted(vars(importlib.import_module(name)).items()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018 - computed once, and kept


def _compile(form: Form) -> Any:
    fix_cache_keys()
    function: Any = getattr(importlib.import_module(form.module), form.kernel)
    return function.preload(form.specialisation)


def _build_launcher(kernel: Any) -> None:
    """Build into the cache the C functions by which Triton calls the driver and launches a kernel. Triton 3.6
    has a launcher for each signature, which it would otherwise build at the first launch. Triton 3.9 has no
    launchers."""
    if not hasattr(nvidia, "make_launcher"):
        return
    build._load_module_from_path = lambda name, path: _NotLoaded()
    nvidia.CudaUtils()
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


class _NotLoaded:
    """A stand-in for a module that was built, but cannot be loaded without a GPU's driver."""

    def __getattr__(self, name: str) -> None:
        return None


@contextlib.contextmanager
def driver_library() -> Iterator[None]:
    """A context in which launchers can be linked against the driver's library.

    On a machine without a driver, a library of empty functions with the same names stands in for it. The
    names are needed: a linker drops a library of which nothing is used, and a launcher without the library
    does not load on the machine with a GPU."""
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
            sources = Path(nvidia.__file__).parent.glob("driver.*")
            names = {name for path in sources for name in re.findall(r"\bcu[A-Z]\w+", path.read_text())}
            code = "".join(f"void {name}(void) {{}}\n" for name in sorted(names))
            library = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", "-x", "c", "-"]
            with contextlib.suppress(OSError):  # no compiler: building the launchers will fail too
                subprocess.run([os.environ.get("CC", "cc"), *library], input=code, text=True, check=False)
            knobs.nvidia.libcuda_path = folder
            yield
    else:
        yield


def _worker(capability: int) -> None:
    """Compile a form for each line of standard input. Answer with a line of JSON: null, or the failure."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print must not mix with the answers
    with absent(capability), driver_library():
        for line in sys.stdin:
            failure = None
            try:
                _build_launcher(_compile(Form(*json.loads(line))))
            except Exception as error:  # the compiler's errors have types of its own
                failure = f"{type(error).__name__}: {str(error).strip()[:500]}"
            answers.write(json.dumps(failure) + "\n")
            answers.flush()


if __name__ == "__main__":
    _worker(int(sys.argv[1]))
