"""What every process of the ring does alike: read its orders, and live no longer than its parent.

A parent starts a worker (`worker_start.py`) with a pipe as standard input, writes
one line of JSON (`Orders`) and holds the pipe open. End of file means that the parent is gone,
however it went (`kill -9` included): the worker removes the socket directory and leaves at once.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from ramify.errors import EngineError, RamifyError
from ramify.ring_messages import Ready
from ramify.runtime.config import EngineConfig
from ramify.runtime.processes.ipc import Outbox
from ramify.runtime.processes.workers import start

log = logging.getLogger("ramify")

ORPHAN_CHECK_S = 2.0


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told on its standard input."""

    sockets: str
    """The ring's socket directory."""
    config: EngineConfig
    tokenizer: str
    """Folder of the tokenizer's files."""
    weights: str
    """Folder of safetensors files, or a GGUF file."""
    model_name: str


def spawn(
    role: str,
    orders: Orders,
    env: dict[str, str],
    arguments: Sequence[str] = (),
    *,
    own_session: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a worker (`workers.start`) and give it its orders."""
    process = start(role, env, arguments, own_session=own_session)
    give_orders(process, orders)
    return process


def give_orders(process: subprocess.Popen[bytes], orders: Orders) -> None:
    """Tell a worker that has been started what it is to do."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: whoever waits for it will see that
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()


def stop(process: subprocess.Popen[bytes], timeout_s: float = 5.0) -> None:
    """End a worker by closing its pipe; kill it when that is not enough."""
    hang_up(process)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe that keeps a worker alive."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def take_orders(role: str, *, remove_sockets: bool = True) -> Orders:
    """Read the orders and start watching the parent. Called first thing by every worker.

    `remove_sockets`: remove the socket directory when the parent is gone (not where the parent is
    itself a worker, whose sockets live on without this one).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = _read_line(0)
    if not line:
        os._exit(0)
    orders = msgspec.json.decode(line, type=Orders)
    sys.excepthook = functools.partial(_report_unless_orphaned, Path(orders.sockets))
    level = getattr(logging, orders.config.log_level.upper(), logging.WARNING)
    logging.basicConfig(
        level=level, format=f"%(asctime)s {role} %(levelname)s %(message)s", stream=sys.stderr
    )
    threading.Thread(
        target=_leave_with_parent, args=(orders, os.getppid(), remove_sockets), daemon=True
    ).start()
    return orders


@contextlib.contextmanager
def reporting_start_up(role: str, frontend: Outbox) -> Iterator[None]:
    """Tell the frontend why a worker could not start, and leave."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RamifyError):  # those say all, and the frontend shows them
            log.exception("%s could not start", role)
            error = EngineError(f"The {role} could not start: {type(error).__name__}: {error}")
        frontend.send(Ready(role=role, pid=os.getpid(), error=error.to_info()))
        frontend.close(linger_s=5.0)
        sys.exit(1)


def _report_unless_orphaned(
    sockets: Path, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A worker that was still starting when its ring ended finds no sockets: nobody wants to hear of it."""
    if sockets.exists():
        sys.__excepthook__(kind, error, trace)


def _read_line(fd: int) -> bytes:
    # Byte by byte without a buffered reader: a lock held by one would abort the interpreter at exit.
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
        # A process forked by the user's script may hold the pipe open after the parent's death.
        if (ready and not os.read(0, 4096)) or os.getppid() != parent:
            if remove_sockets:
                shutil.rmtree(Path(orders.sockets), ignore_errors=True)
            os._exit(0)
