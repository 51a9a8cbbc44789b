"""Compiles Triton kernels ahead of their launches: in parallel processes, for a GPU that need not be there.

Triton compiles a kernel anew for each form: its constants, the dtypes of its arguments, and which integers
divide by 16. One form takes 0.3 to 5 s of one core.

    with noting() as forms:                      no launch is run
        warm_up()
    compile_forms(missing(forms), capability)    in parallel, into Triton's cache folder
    warm_up()                                    finds every kernel there

A cache folder can be carried to another machine with the same versions of Python and triton. Triton keeps
absolute paths in it, so it has to lie in the same place there.
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

from ramify.kernels.triton.launching import interpret


class Form(NamedTuple):
    """One form of a kernel: its module, its name, and the specialisation as Triton writes it (JSON)."""

    module: str
    kernel: str
    specialisation: str


class _Target:
    """As much of a driver as compiling needs (`triton.backends.driver.DriverBase`)."""

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
    """Kernels are planned and compiled for a GPU that is not there, of a compute capability such as 90.

    Launchers take tensors of the CPU or of the meta device inside. Launches must be noted: nothing runs them.
    """
    before = driver._active, interpret.absent_capability
    driver.set_active(_Target(capability))  # as much of one as compiling needs
    interpret.absent_capability = capability
    try:
        yield
    finally:
        driver._active, interpret.absent_capability = before


@contextlib.contextmanager
def noting() -> Iterator[dict[Form, None]]:
    """No launch inside is run. The forms that this process has not compiled yet are noted, in their order.

    The tensors that launches would have written hold anything.
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
    """A cache in which a kernel is looked up, and never compiled."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = super().get_group(filename)
        if not found:
            raise _Missing
        return found


def missing(forms: Iterable[Form]) -> list[Form]:
    """The forms that Triton's cache folder lacks. The others are ready in this process from now on."""
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

    processes : at most; each takes a core and about 0.5 GB
    """
    waiting = deque(forms)
    workers: list[_Worker] = []
    failures: list[str] = []

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
            for worker in workers:
                worker.kill()
            raise
    return failures


class _Worker:
    """A process that compiles one form after the other."""

    def __init__(self, capability: int) -> None:
        environment = os.environ | {"TRITON_STORE_BINARY_ONLY": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"TRITON_CACHE_DIR": str(knobs.cache.dir)}
        # -P: a folder `ramify` in the working directory is not the package.
        command = [sys.executable, "-P", "-m", __name__, str(capability)]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which kills it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._forms, self._answers = self._process.stdin, self._process.stdout
        self.ended = False

    def compile(self, form: Form) -> str | None:
        """The failure, if any. A compiler that crashes ends the process."""
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

    Triton's key of a function depends on which functions that it calls have a key already
    (`JITFunction.cache_key` of 3.6). Compiled in another order, a kernel would not be found again.
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
    has a launcher for each signature, and otherwise builds it at the first launch; 3.9 has none."""
    if not hasattr(nvidia, "make_launcher"):
        return
    build._load_module_from_path = lambda name, path: _NotLoaded()
    nvidia.CudaUtils()
    nvidia.CudaLauncher(kernel.src, kernel.metadata)


class _NotLoaded:
    """In place of a module that was built: it needs the libraries of a GPU's driver."""

    def __getattr__(self, name: str) -> None:
        return None


@contextlib.contextmanager
def driver_library() -> Iterator[None]:
    """Launchers are linked against the driver's library.

    Where there is no driver, a library of empty functions with the same names stands for it: a linker drops a
    library of which nothing is used, and such a launcher does not load on the machine with a GPU."""
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        with tempfile.TemporaryDirectory() as folder, knobs.nvidia.scope():
            sources = Path(nvidia.__file__).parent.glob("driver.*")
            names = {name for path in sources for name in re.findall(r"\bcu[A-Z]\w+", path.read_text())}
            code = "".join(f"void {name}(void) {{}}\n" for name in sorted(names))
            library = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", "-x", "c", "-"]
            with contextlib.suppress(OSError):  # without a compiler, which the launchers miss as well
                subprocess.run([os.environ.get("CC", "cc"), *library], input=code, text=True, check=False)
            knobs.nvidia.libcuda_path = folder
            yield
    else:
        yield


def _worker(capability: int) -> None:
    """Compiles a form for each line of the input; answers each with a line: null, or the failure."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print as well
    with absent(capability), driver_library():
        for line in sys.stdin:
            failure = None
            try:
                _build_launcher(_compile(Form(*json.loads(line))))
            except Exception as error:  # the compiler's types are its own
                failure = f"{type(error).__name__}: {str(error).strip()[:500]}"
            answers.write(json.dumps(failure) + "\n")
            answers.flush()


if __name__ == "__main__":
    _worker(int(sys.argv[1]))
