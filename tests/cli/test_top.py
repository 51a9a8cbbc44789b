"""`ramify top`: frames of given figures, of a fake server, and in a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from ramify.cli import main, top
from ramify.cli.top import Sample, frame, read_metrics
from tests.server.fake_frontend import LiveServer
from tests.server.test_cache import Holding
from tests.server.test_keys import write

STATS = {"running": 2, "waiting": 1, "compiling": 3, "page_size": 16}
PAGES = {"total": 100, "free": 20, "evictable": 20, "leased": 20, "in_use": 40, "pinned": 10}


def running(rid: str, **fields: Any) -> dict[str, Any]:
    given = {"program": "judge", "client": "me", "age_s": 10.0, "first_s": 5.0, "prompt_tokens": 50}
    return {"rid": rid, "cached": 40, "out": 20, **given, **fields}


def sample(*requests: dict[str, Any], at: float = 100.0, **fields: Any) -> Sample:
    pages = {f"pages_{name}": value for name, value in PAGES.items()}
    throughput = {"interval_s": 5.0, "output_tokens": [50] * 6}
    throughput |= {"prompt_tokens": [100] * 6, "cached_tokens": [75] * 6}
    live = {"model": "m", "up_s": at, "healthy": True, "in_flight": 4, "stats": STATS | pages}
    return Sample(at, live | {"throughput": throughput, "running": requests}, **fields)


def shown(now: Sample, before: Sample | None = None, **options: Any) -> list[str]:
    given = {"url": "http://here", "width": 100, "height": None, "sort": "age", "paused": False}
    return frame(now, before, **given | options)


def test_the_head_of_a_frame() -> None:
    lines = shown(sample())
    assert lines[0] == "ramify top  http://here  m  up 2 min  healthy"
    assert lines[1].split("  ")[-4:] == ["2 running", "1 waiting", "3 wait for a grammar", "4 in flight"]
    assert "10.0 written/s  20.0 of prompts/s, 75% of them cached  (last 30 s)" in lines[2]
    assert lines[3].endswith("first token -  between tokens -")
    assert "100 x 16 tokens: 40 in use #, 10 pinned =, 10 leased -, 20 evictable :, 20 free ." in lines[4]
    assert [lines[5].count(mark) for mark in "#=-:."] == [35, 9, 9, 17, 18]
    assert "PAUSED" in shown(sample(), paused=True)[0]
    assert not any(line.startswith("cold") for line in lines)


def test_what_the_cold_tier_has_read_and_written() -> None:
    now = sample()
    now.live["stats"] |= {"cold_tokens": 7500, "cold_bytes": 169_000_000, "cold_written_bytes": 2_000_000}
    assert "cold      7500 tokens, 169 MB read, 2 MB written" in shown(now)


def test_requests_by_column_and_within_the_height() -> None:
    now = sample(
        running("slow", age_s=30.0, out=5, program="b"),
        running("quick", age_s=20.0, out=90, program="c", client="you"),
        running("new", age_s=0.25, first_s=None, prompt_tokens=0, out=0, program="a", client="zed"),
    )

    def order(sort: str) -> list[str]:
        return [line.split()[-1] for line in shown(now, sort=sort)[8:11]]

    assert order("age") == ["slow", "quick", "new"]
    assert order("out") == order("rate") == ["quick", "slow", "new"]
    assert order("program") == ["new", "slow", "quick"]
    assert order("client") == ["slow", "quick", "new"]
    rows = [line.split() for line in shown(now)[7:11]]
    assert rows[0][0] == "AGE*"
    assert rows[2] == ["20.0", "s", "50", "40", "90", "18.0", "output", "c", "you", "quick"]
    assert rows[3] == ["250", "ms", "-", "-", "0", "-", "waiting", "a", "zed", "new"]
    cut = shown(sample(*[running(str(number)) for number in range(50)]), height=14, width=20)
    assert (len(cut), max(map(len, cut)), cut[-1]) == (14, 20, "and 45 more")


HISTOGRAM = "ramify_time_to_first_token_seconds"


def metrics(few: int, many: int) -> str:
    """Metrics with a histogram of two endpoints, and of two keys."""
    return "\n".join(
        [
            f"# TYPE {HISTOGRAM} histogram",
            *(
                f'{HISTOGRAM}_bucket{{endpoint="{path}",le="{bound}"}} {number}'
                for path in ("/a", "/b")
                for bound, number in (("0.1", few), ("0.5", many), ("+Inf", many))
            ),
            *(f'{HISTOGRAM}_count{{endpoint="{path}"}} {many}' for path in ("/a", "/b")),
            *(f'{HISTOGRAM}_sum{{endpoint="{path}"}} {many * 0.25}' for path in ("/a", "/b")),
            "# TYPE ramify_key_requests counter",
            f'ramify_key_requests_total{{key="ada"}} {many}',
            "# TYPE ramify_key_tokens counter",
            'ramify_key_tokens_total{key="ada",kind="prompt"} 70',
            'ramify_key_tokens_total{key="bob",kind="generation"} 30',
            "# TYPE ramify_steps counter\nramify_steps_total 5\n",
        ]
    )


def test_latencies_of_the_last_seconds_and_usage_by_key() -> None:
    before = sample(at=100.0, metrics=read_metrics(metrics(100, 100)))
    now = sample(at=130.0, metrics=read_metrics(metrics(100, 104)))
    assert "first token 250 ms, p95 <= 500 ms" in shown(now, before)[3]
    assert "p95 <= 100 ms" in shown(now)[3]
    keys = [line.split() for line in shown(now)[-3:]]
    assert keys == [
        ["KEY", "REQUESTS", "REFUSED", "PROMPT", "CACHED", "WRITTEN"],
        ["ada", "104", "0", "70", "0", "0"],
        ["bob", "0", "0", "0", "0", "30"],
    ]
    assert top._same_server(before, now)
    assert now.live is not None
    restarted = Sample(130.0, now.live | {"up_s": 3.0})
    assert not top._same_server(before, restarted), "its counters began anew"


def test_models_with_their_states() -> None:
    models = [
        {"id": "a", "state": "ready", "size": 1.5e9, "max_model_len": 8192},
        {"id": "b", "state": "off"},
    ]
    lines = [line.split() for line in shown(sample(models=models))[-2:]]
    assert lines == [["a", "ready", "1.50", "GB", "8192"], ["b", "off", "-", "-"]]
    assert not any("MODEL" in line for line in shown(sample(models=[{"id": "a"}])))


def test_once_prints_a_frame(capsys: pytest.CaptureFixture[str]) -> None:
    frontend = Holding()
    frontend.hold_after = 2
    with LiveServer(frontend) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 5}, "program": {"program": "p"}}
        asking = threading.Thread(target=http.post, args=("/generate",), kwargs={"json": body})
        asking.start()
        assert frontend.held.wait(60)
        assert main.main(["top", "--once", "--url", server.url]) == 0
        server.call(frontend.release.set)
        asking.join(60)
    lines = capsys.readouterr().out.splitlines()
    (request,) = [line.split() for line in lines if "python-httpx" in line]
    assert request[2:6] == ["5", "0", "2", request[5]]
    assert request[-4] == "output"
    (held,) = [line.split() for line in lines if "ada/1@x" in line]
    assert held == ["60", "s", "-", "30", "2", "session", "codex", "codex/1", "ada/1@x"]
    assert not any("\x1b" in line for line in lines)


def test_a_key_that_may_not_see_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveServer(Holding(), api_key="k") as server:
        assert main.main(["top", "--once", "--url", server.url]) == 1
        assert "refused: The API key is missing" in capsys.readouterr().out
        assert main.main(["top", "--once", "--url", server.url, "--endpoint-key", "k"]) == 0
        assert "ada/1@x" in capsys.readouterr().out


def test_keys_of_a_server_of_several_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key comes from the environment. A key of operators sees whose the requests and holds are."""
    keys = write(tmp_path / "keys.toml", ada={}, root={"admin": True})
    frontend = Holding()
    frontend.hold_after = 2
    with LiveServer(frontend, keys=str(keys)) as server:
        monkeypatch.setenv("RAMIFY_ENDPOINT_KEY", "rk-ada")
        assert main.main(["top", "--once", "--url", server.url]) == 1
        refusal = capsys.readouterr().out
        assert "refused: " in refusal
        assert "The key 'ada' may not use /live. Use a key with admin = true" in refusal
        headers = {"x-api-key": "rk-ada"}
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 5}}
        asking = threading.Thread(
            target=httpx.post, args=(f"{server.url}/generate",), kwargs={"json": body, "headers": headers}
        )
        asking.start()
        assert frontend.held.wait(60)
        monkeypatch.setenv("RAMIFY_ENDPOINT_KEY", "rk-root")
        assert main.main(["top", "--once", "--url", server.url]) == 0
        server.call(frontend.release.set)
        asking.join(60)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (request,) = [line for line in lines if line and line[-1].startswith("ada/r")]
    (held,) = [line for line in lines if line and line[-1] == "ada/1@x"]
    assert (request[-2], held[-2]) == ("ada", "ada")


def test_no_server_and_wrong_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert main.main(["top", "--once", "--url", url]) == 1
    assert "not reachable" in capsys.readouterr().out
    assert main.main(["top", "--interval", "0"]) == 2
    assert "--interval is 0; it must be at least 0.1" in capsys.readouterr().err


class Screen:
    """`ramify top` in a pseudo-terminal, and what it has written."""

    def __init__(self, url: str, term: str) -> None:
        own, theirs = pty.openpty()
        command = [sys.executable, "-m", "ramify", "top", "--url", url, "--interval", "0.1"]
        environment = os.environ | {"TERM": term, "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.terminal = own
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until `text` has come since the last call."""
        self.seen = ""
        while text not in self.seen:
            assert select.select([self.terminal], [], [], 60)[0], self.seen
            self.seen += os.read(self.terminal, 65536).decode()

    def press(self, key: str) -> None:
        os.write(self.terminal, key.encode())

    def close(self) -> int:
        status = self.process.wait(60)
        os.close(self.terminal)
        return status


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_it_goes_on_when_the_server_is_restarted_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    screen = Screen(f"http://127.0.0.1:{port}", "xterm")
    try:
        screen.until("not reachable")
        server = LiveServer(Holding())
        server._listener.close()
        server._listener = socket.create_server(("127.0.0.1", port))
        with server:
            screen.until("ada/1@x")
            screen.press("p")
            screen.until("PAUSED")
            screen.press("p")
            screen.press("s")
            screen.until("OUT*")
        screen.until("not reachable")
        screen.press("q")
        screen.until("\x1b[?1049l")
    finally:
        screen.process.send_signal(signal.SIGCONT)
        assert screen.close() == 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_frames_below_each_other_where_the_cursor_cannot_move() -> None:
    with LiveServer(Holding()) as server:
        screen = Screen(server.url, "dumb")
        try:
            for _ in range(2):
                screen.until("ada/1@x")
                assert "\x1b" not in screen.seen
        finally:
            screen.process.send_signal(signal.SIGINT)
            assert screen.close() == 130
