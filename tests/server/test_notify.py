"""The server tells its service manager when it is ready, alive and stopping."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.runtime.server.app.notify import keep_alive, notify
from tests.server.test_serve_process import SCRIPT


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """The socket of a service manager, which NOTIFY_SOCKET names."""
    path = str(tmp_path / "notify") if request.param == "path" else f"@ramify-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path.replace("@", "\0", 1) if path[0] == "@" else path)
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield listener


def test_a_server_is_ready_alive_and_stopping(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.DEVNULL) as process:
        found = [manager.recv(100)]
        while found.count(b"WATCHDOG=1") < 3 or b"READY=1" not in found:
            found.append(manager.recv(100))
        assert set(found) == {b"READY=1", b"WATCHDOG=1"}
        assert found.count(b"READY=1") == 1
        process.terminate()
        while (last := manager.recv(100)) == b"WATCHDOG=1":
            pass
        assert last == b"STOPPING=1"
    assert process.returncode == 0


async def test_a_server_whose_engine_has_closed_is_not_alive(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000")
    asked: list[bool] = []

    def works() -> bool:
        asked.append(len(asked) != 1)
        if len(asked) == 3:
            task.cancel()
        return asked[-1]

    task = asyncio.create_task(keep_alive(works))
    await asyncio.wait((task,))
    assert asked == [True, False, True]
    manager.setblocking(False)
    assert [manager.recv(100), manager.recv(100)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        manager.recv(100)


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "2000", "WATCHDOG_PID": "1"}])
async def test_another_process_has_the_watchdog(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    await keep_alive(lambda: pytest.fail("there is no watchdog"))


@pytest.mark.parametrize("path", ["", "vsock:1:2", "/nowhere/notify"])
def test_no_manager_is_no_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify("READY=1")
