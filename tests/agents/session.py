"""Sessions of an agent: a command, a second message in the resumed session, and a new session."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.agents.clients import COMMAND, OUTPUT, URL, Client
from tests.end_to_end.served import Served

FINAL = "The command has printed its marker."
"""The sentence of the scripted model."""
LIMIT_S = 120
"""Time limit of one command of an agent."""
NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not exist."""
LINE = re.compile(r"rid=\S+ endpoint=(\S+) status=(\d+) finish=(\S+) prompt=(\d+) cached=(\d+) output=(\d+)")
RESPONSES = re.compile(r'ramify_http_responses_total\{endpoint="([^"]+)",status="(\d+)"\} (\S+)')
MESSAGES = (
    f"Run the command `{COMMAND}` and tell me its output.",
    "Say that once more.",
    f"Please run `{COMMAND}`, then say what it printed.",
)


@dataclass(frozen=True)
class Request:
    """A generation, from the server's log."""

    endpoint: str
    status: int
    finish: str
    prompt: int
    cached: int
    output: int


@dataclass(frozen=True)
class Turn:
    """One command of an agent: its output, and what the server has seen of it."""

    status: int
    output: str
    requests: list[Request]
    responses: Counter[tuple[str, int]]
    """HTTP responses by route and status."""
    ran: int
    """How often `COMMAND` ran."""
    returned: bool
    """Whether `OUTPUT` is near the end of a prompt."""

    @property
    def main(self) -> list[Request]:
        """The requests of the conversation: beside them agents ask for titles, with far shorter prompts."""
        longest = max((request.prompt for request in self.requests), default=0)
        return [request for request in self.requests if request.prompt > 0.7 * longest]


@dataclass(frozen=True)
class Session:
    first: Turn
    resumed: Turn
    new: Turn

    @property
    def shares(self) -> tuple[float, ...]:
        """Cached tokens of the second request as a share of the first prompt, of the resumed session as a
        share of the prompt before, and of the new session as a share of its first prompt."""
        first, second, *_ = self.first.main
        resumed, new = self.resumed.main[0], self.new.main[0]
        pairs = (second, first), (resumed, self.first.main[-1]), (new, new)
        return tuple(min(request.cached / before.prompt, 1.0) for request, before in pairs)

    def faults(self, client: Client) -> list[str]:
        """Descriptions of all that went wrong."""
        found = []
        turns = {"first": (self.first, 1), "resumed": (self.resumed, 0), "new": (self.new, 1)}
        for name, (turn, calls) in turns.items():
            checks = {
                f"exit status {turn.status}": turn.status == 0,
                f"the command ran {turn.ran} times": turn.ran == calls,
                "the command's output did not come back": turn.returned or not calls or not client.tool,
                "the final sentence is not shown": FINAL in _plain(turn.output.encode()),
                f"{len(turn.main)} requests": len(turn.main) == 1 + calls,
            }
            found += [f"{name}: {fault}" for fault, passed in checks.items() if not passed]
            found += [f"{name}: {path} {status}" for path, status in turn.responses if status >= 400]
        if not found:
            names = zip(turns, self.shares, client.shares, strict=True)
            found += [f"{name}: {share:.0%} cached" for name, share, least in names if share < least]
        return found


class Player:
    """Runs an agent's commands in a home and a working folder of its own, under `folder`."""

    def __init__(self, client: Client, program: Path, served: Served, folder: Path) -> None:
        self._client, self._program, self._served = client, program, served
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        for name, text in client.files.items():
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(URL, served.url))

    def play(self) -> Session:
        client = self._client
        # Agents share prompts, such as one agent's on two APIs.
        httpx.post(self._served.url + "/flush_cache", trust_env=False).raise_for_status()
        with self._ended():
            if client.setup:
                status, output = self._command(client.setup, "")
                assert status == 0, output
            run, resume = self._command, self._in_terminal if client.terminal else self._command
            return Session(
                self._turn(run, client.run, MESSAGES[0]),
                self._turn(resume, client.resume, MESSAGES[1]),
                self._turn(run, client.run, MESSAGES[2]),
            )

    def _turn(self, command: Callable[[str, str], tuple[int, str]], line: str, message: str) -> Turn:
        served = self._served
        lines, before, ran = len(served.lines), _responses(served), self._ran()
        prompts = self._prompts()
        status, output = command(line, message)
        after, responses = self._prompts() - prompts, _responses(served) - before
        returned = any(OUTPUT in prompt for prompt in after)
        found = [found.groups() for text in served.lines[lines:] if (found := LINE.search(text))]
        requests = [
            Request(path, int(status), end, *map(int, counts)) for path, status, end, *counts in found
        ]
        return Turn(status, output, requests, responses, self._ran() - ran, returned)

    def _command(self, line: str, message: str) -> tuple[int, str]:
        """The exit status and the output of a command line of the agent; -1 if it ran for `LIMIT_S`."""
        process = subprocess.Popen(
            self._words(line, message),
            cwd=self.work,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            given = "" if "PROMPT" in line else f"{message}\n{self._client.replies}"
            output, _ = process.communicate(given, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return -1, output
        return process.returncode, output

    def _in_terminal(self, line: str, message: str) -> tuple[int, str]:
        """Type `message` once the agent shows the session so far, and wait for the answer; -1 without one."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        process = subprocess.Popen(
            self._words(line, message),
            cwd=self.work,
            env={**self._environment(), "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        shown, deadline = b"", time.monotonic() + LIMIT_S

        def wait_for(text: str, keys: str = "") -> str:
            """The output from now on, once `text` is in it. Keys that come too early are lost: `keys` are
            pressed every 5 s."""
            nonlocal shown
            start, pressed = len(shown), -math.inf
            while text not in (plain := _plain(shown[start:])) and (now := time.monotonic()) < deadline:
                if keys and now > pressed + 5:
                    os.write(master, keys.encode())
                    pressed = now
                if select.select([master], [], [], 0.5)[0]:
                    shown += os.read(master, 65536)
            return plain

        try:
            wait_for(FINAL)
            wait_for(message, message)
            output = wait_for(FINAL, "\r")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(master)
            os.close(slave)
        return 0 if FINAL in output else -1, output

    def _words(self, line: str, message: str) -> list[str]:
        """The arguments of a command line, with the message, this server and this home folder in it."""
        meant = {"PROMPT": message}
        if "SESSION" in line:
            sessions = self.home.glob(self._client.sessions)
            meant["SESSION"] = max(sessions, key=lambda path: path.stat().st_mtime, default=self.home).name
        words = [meant.get(word, word).replace(URL, self._served.url) for word in shlex.split(line)[1:]]
        return [str(self._program), *(word.replace("~/", f"{self.home}/") for word in words)]

    def _environment(self) -> dict[str, str]:
        """The environment of the agent: its own home, and no way to other hosts."""
        client = self._client
        proxies = (
            {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"} if client.proxy else {}
        )
        given = {name: value.replace(URL, self._served.url) for name, value in client.env.items()}
        own = {"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", "NO_COLOR": "1"}
        return {**own, **proxies, **given}

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Kill what the agent leaves in the background: each process with this home folder."""
        try:
            yield
        finally:
            mark = f"\0HOME={self.home}\0".encode()
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if mark in b"\0" + (folder / "environ").read_bytes():
                        os.kill(int(folder.name), signal.SIGKILL)

    def _prompts(self) -> Counter[str]:
        """The ends of the latest prompts."""
        live = f"{self._served.url}/live"
        found: list[str] = []
        for program in httpx.get(live, trust_env=False).json()["programs"]:
            details = httpx.get(live, params={"program": program["id"]}, trust_env=False).json()["chosen"]
            found += [call["prompt"] for call in details["calls"]]
        return Counter(found)

    def _ran(self) -> int:
        log = self.work / "ran.log"
        return len(log.read_text().splitlines()) if log.exists() else 0


def _responses(served: Served) -> Counter[tuple[str, int]]:
    text = httpx.get(served.url + "/metrics", trust_env=False).text
    counts = {(path, int(status)): int(float(count)) for path, status, count in RESPONSES.findall(text)}
    return Counter({key: count for key, count in counts.items() if key[0] not in ("/metrics", "/live")})


def _plain(shown: bytes) -> str:
    """The words that a terminal was sent, without the spinner that may turn between them."""
    text = re.sub(rb"\x1b\[[0-9;?<>=$]*[@-~]|[^ -~]", b" ", shown)
    return " ".join(text.decode().split())
