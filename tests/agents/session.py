"""A session of an agent against a server: a command, a second message in the resumed session, a new session."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.agents.clients import COMMAND, URL, Client
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

    @property
    def main(self) -> list[Request]:
        """The requests of the conversation: beside them agents ask for titles, with far shorter prompts."""
        longest = max((request.prompt for request in self.requests), default=0)
        return [request for request in self.requests if request.prompt > longest / 2]


@dataclass(frozen=True)
class Session:
    first: Turn
    resumed: Turn
    new: Turn

    @property
    def shares(self) -> tuple[float, float, float]:
        """Cached shares: of the first prompt in the second request, of the prompt before in the resumed message's, and
        of the new session's own first prompt."""
        before = self.first.main
        return (
            before[1].cached / before[0].prompt,
            self.resumed.main[0].cached / before[-1].prompt,
            self.new.main[0].cached / self.new.main[0].prompt,
        )


def play(client: Client, program: Path, served: Served, folder: Path) -> Session:
    """Run the session in a home and a working folder of its own."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    for name, text in client.files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(URL, served.url))
    turns = []
    with _ended(home):
        if client.setup:
            _command(client, program, client.setup, "", served, home, work)
        for line, message in zip((client.run, client.resume, client.run), MESSAGES, strict=True):
            turns.append(_turn(client, program, line, message, served, home, work))
    return Session(*turns)


def _turn(
    client: Client, program: Path, line: str, message: str, served: Served, home: Path, work: Path
) -> Turn:
    lines, before, ran = len(served.lines), _responses(served), _ran(work)
    status, output = _command(client, program, line, message, served, home, work)
    while (responses := _responses(served)) - before != _responses(served) - before:
        time.sleep(0.1)
    found = [found.groups() for text in served.lines[lines:] if (found := LINE.search(text))]
    requests = [
        Request(endpoint, int(status), finish, *map(int, counts))
        for endpoint, status, finish, *counts in found
    ]
    return Turn(status, output, requests, responses - before, _ran(work) - ran)


def _command(
    client: Client, program: Path, line: str, message: str, served: Served, home: Path, work: Path
) -> tuple[int, str]:
    """The exit status and the output of a command line of the agent."""
    newest = (
        max(home.glob(client.sessions), key=lambda path: path.stat().st_mtime, default=home)
        if client.sessions
        else home
    )
    meant = {"PROMPT": message, "SESSION": newest.name}
    words = [meant.get(word, word).replace(URL, served.url) for word in shlex.split(line)[1:]]
    words = [word.replace("~", str(home), 1) if word.startswith("~/") else word for word in words]
    given = "" if "PROMPT" in line else f"{message}\n{client.replies}"
    process = subprocess.Popen(
        [str(program), *words],
        cwd=work,
        env=environment(client, served.url, home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(given, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return -1, output
    return process.returncode, output


def environment(client: Client, url: str, home: Path) -> Mapping[str, str]:
    """The environment of an agent: its own home, and no way to other hosts."""
    proxies = {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"} if client.proxy else {}
    given = {name: value.replace(URL, url) for name, value in client.env.items()}
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        "NO_COLOR": "1",
        **proxies,
        **given,
    }


@contextlib.contextmanager
def _ended(home: Path) -> Iterator[None]:
    """Kill what agents leave in the background: each process with this home folder."""
    try:
        yield
    finally:
        mark = f"\0HOME={home}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in b"\0" + (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)


def _ran(work: Path) -> int:
    log = work / "ran.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def _responses(served: Served) -> Counter[tuple[str, int]]:
    text = httpx.get(served.url + "/metrics", trust_env=False).text
    return Counter(
        {
            (endpoint, int(status)): int(float(count))
            for endpoint, status, count in RESPONSES.findall(text)
            if endpoint != "/metrics"
        }
    )
