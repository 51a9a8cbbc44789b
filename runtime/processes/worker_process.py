"""The common part of all workers: a worker reads its orders, and exits when its parent is gone.

A parent starts a worker (`worker_start.py`) with a pipe as standard input, writes one line of JSON (`Orders`)
and keeps the pipe open. End of file on the pipe means that the parent has ended; it also comes after `kill
-9`. The worker then removes the socket directory and exits at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from ramify.engine_messages import Ready
from ramify.errors import EngineError, RamifyError
from ramify.logs import configure_logging
from ramify.runtime.config import EngineConfig
from ramify.runtime.processes.ipc import Outbox
from ramify.runtime.processes.prestart import start

log = logging.getLogger("ramify")

ORPHAN_CHECK_S = 2.0
"""Seconds between two checks of the parent's process id, in addition to waiting for the end of file."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker: one line of JSON on its standard input."""

    sockets: str
    """The engine core's socket directory."""
    config: EngineConfig
    tokenizer: str
    """Folder of the tokenizer's files."""
    weights: str
    """Folder of safetensors files, or a GGUF file."""
    model_name: str
    draft_weights: str | None = None
    """The weights of the draft model, in the same form as `weights`; None without a draft model."""
    draft_tokenizer: str | None = None


def spawn(
    module: str,
    orders: Orders,
    env: dict[str, str],
    arguments: Sequence[str] = (),
    *,
    own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a worker (`prestart.start`) and give it its orders."""
    process = start(module, env, arguments, own_session=own_session)
    give_orders(process, orders)
    return process


def give_orders(process: subprocess.Popen[bytes], orders: Orders) -> None:
    """Send `orders` to a worker that has been started without orders."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, which the thread that waits for it reports
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()


def stop(process: subprocess.Popen[bytes], timeout_s: float = 5.0) -> None:
    """Close the pipe of a worker, and kill the worker if it has not ended after `timeout_s`."""
    close(process)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def close(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe of a worker, which exits when it notices."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


_before_leaving: list[Callable[[], None]] = []


def before_leaving(call: Callable[[], None]) -> None:
    """Have `call` called, in another thread, when the parent is gone, before this worker exits. A parent
    kills a worker that takes longer than 5 s (`stop`)."""
    _before_leaving.append(call)


def take_orders(role: str, *, remove_sockets: bool = True) -> Orders:
    """Read the orders and start watching the parent. A worker's `main` begins with this call.

    `remove_sockets`: whether to remove the socket directory when the parent is gone. False for a worker whose
    parent is another worker, since the engine core still uses the sockets.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = _read_line(0)
    if not line:
        os._exit(0)
    orders = msgspec.json.decode(line, type=Orders)
    configure_logging(orders.config.log_level, orders.config.log_format, role)
    sys.excepthook = functools.partial(_report_unless_orphaned, Path(orders.sockets), sys.excepthook)
    threading.Thread(
        target=_leave_with_parent, args=(orders, os.getppid(), remove_sockets), daemon=True
    ).start()
    return orders


@contextlib.contextmanager
def reporting_start_up(role: str, frontend: Outbox) -> Iterator[None]:
    """If the block raises, send a `Ready` message with the error to the frontend, and exit with status 1."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RamifyError):  # the frontend shows the message of a RamifyError
            log.exception("%s could not start", role)
            error = EngineError(f"The {role} could not start: {type(error).__name__}: {error}")
        frontend.send(Ready(role=role, pid=os.getpid(), error=error.to_info()))
        frontend.close(linger_s=5.0)
        sys.exit(1)


def _report_unless_orphaned(
    sockets: Path,
    report: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """An excepthook that calls `report`, but not if the engine core ended while this worker was still
    starting."""
    if sockets.exists():
        report(kind, error, trace)


def _read_line(fd: int) -> bytes:
    # os.read, not sys.stdin: the lock of a buffered reader would abort the interpreter at exit.
    line = bytearray()
    while chunk := os.read(fd, 65536):
        line += chunk
        if line.endswith(b"\n"):
            break
    return bytes(line)


def _leave_with_parent(orders: Orders, parent: int, remove_sockets: bool) -> None:
    import select

    while True:
        ready, _, _ = select.select([0], [], [], ORPHAN_CHECK_S)
        # A child of the user's script may have inherited the pipe and keep it open after the parent's death.
        if (ready and not os.read(0, 4096)) or os.getppid() != parent:
            if remove_sockets:
                shutil.rmtree(Path(orders.sockets), ignore_errors=True)
            for call in _before_leaving:
                with contextlib.suppress(Exception):
                    call()
            os._exit(0)
