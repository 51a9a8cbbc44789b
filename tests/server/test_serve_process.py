"""The server as a process: its ready line, its signals, its exit."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ramify.errors import RamifyError
from ramify.runtime.config import ServerConfig
from ramify.runtime.server.app.serve import PORT_IN_USE, bind, for_others, serve

SCRIPT = """
import asyncio, sys
from ramify.runtime.config import ServerConfig
from ramify.runtime.frontend import frontend
from tests.server.fake_frontend import FakeFrontend

class StubFrontend(FakeFrontend):
    def __init__(self, config, workers):
        super().__init__()
        self.hold_after = 1
    async def start(self): pass
    async def drain(self, seconds):
        if not any(request.scope == "held" for request in self.requests):
            self.release.set()
        await super().drain(seconds)
    async def aclose(self): print("closed", flush=True)

frontend.Frontend = StubFrontend
from ramify.runtime.server.app.serve import serve
sys.exit(serve(ServerConfig(port=0, drain_s=10)))
"""

DRAINING = "Draining: running requests have up to 10 s to end. A second signal (Ctrl-C) ends them at once."
UNBOUNDED = "A chat that names no max_tokens may have 4,000 tokens (--max-output-tokens N: at most N)\n"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_zero(process: subprocess.Popen[str], number: signal.Signals) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == UNBOUNDED
    ready = process.stdout.readline()
    assert ready.startswith("Serving byte-model on http://127.0.0.1:")
    url = ready.split()[-1]
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    with httpx.stream("POST", url + "/generate", json=body, timeout=20) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")  # it runs, and is held
        process.send_signal(number)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert process.wait(20) == 0
    assert process.stdout.read() == f"{DRAINING}\nclosed\n"
    assert process.stderr.read() == ""


def test_a_second_signal_ends_running_and_half_sent_requests(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == UNBOUNDED
    url = httpx.URL(process.stdout.readline().split()[-1])
    body = {"text": "hello", "cache_scope": "held", "stream": True}
    with (
        socket.create_connection((url.host, url.port or 0), timeout=20) as half,
        httpx.stream("POST", url.join("/generate"), json=body, timeout=20) as response,
    ):
        half.sendall(
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 9\r\n\r\n{"
        )
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == f"{DRAINING}\n"
        process.send_signal(signal.SIGINT)
        (error,) = [line for line in lines if "error" in line]
        ended = json.loads(error.removeprefix("data: "))["error"]
        assert (ended["type"], ended["code"]) == ("server_error", "engine_closed"), "no fault of the client"
        answer = half.makefile().read()
    assert process.wait(20) == 0
    assert answer.startswith("HTTP/1.1 503 ")
    assert '"code":"engine_closed"' in answer
    assert "Traceback" not in process.stderr.read()


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert serve(ServerConfig(port=port)) == PORT_IN_USE
    out, err = capsys.readouterr()
    assert out == ""
    remedy = "Choose another by --port (0: any that is free), or use the server that is there."
    assert err == f"ramify: Cannot listen on 127.0.0.1:{port}: Address already in use. {remedy}\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_an_address_for_other_machines_is_told(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Route(socket.socket):
        def connect(self, address: Any) -> None: ...

        def getsockname(self) -> Any:
            return "192.0.2.7", 40000

    monkeypatch.setattr(socket, "socket", Route)
    expected = "; from other machines: http://192.0.2.7:30000" if host == "0.0.0.0" else ""
    assert for_others(host, 30000) == expected


def test_host_that_cannot_be_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(ServerConfig(host="192.0.2.1", port=0, insecure=True)) == PORT_IN_USE
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_binds_ipv6() -> None:
    try:
        listener = bind("::1", 0)
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    with listener:
        assert listener.family == socket.AF_INET6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cold_dir": "/proc/nope"}, "cold_dir is '/proc/nope', which is no folder"),
        ({"cold_dir": __file__}, "cold_dir is .*File exists"),
        ({"host_kv_gb": 1, "keep_alive": "5m", "device": "cpu"}, "host_kv_gb is 1 on the CPU"),
    ],
)
def test_options_that_no_load_could_have_are_refused_at_the_start(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(RamifyError, match=named):
        serve(ServerConfig(port=0, **options))
