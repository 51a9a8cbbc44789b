"""Addresses and command lines are shown without the credentials in them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import ramify as rm
from ramify.bench.client import Endpoint
from ramify.bench.plan import Plan
from ramify.bench.report import report
from ramify.bench.workloads import Sizes
from ramify.cli import main
from ramify.credentials import command_line, without_credentials
from ramify.lang.backends.http import HttpClient
from ramify.loop import wait
from ramify.unreachable import unreachable

NOBODY = "http://me:hunter2@127.0.0.1:9"
"""An address at which nobody listens."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:hunter2@host:80/v1", "http://host:80/v1"),
        ("https://hunter2@host", "https://host"),
        ("http://me:hunter2@more@host/a@b", "http://host/a@b"),
        ("http://me:hun/ter2@host/v1", "http://host/v1"),
        (
            "404 for 'https://me:hunter2@host/x?api_key=hunter2&n=2'.",
            "404 for 'https://host/x?api_key=…&n=2'.",
        ),
        ("http://host:80/org/repo@rev", "http://host:80/org/repo@rev"),
        ("http://[::1]:80/a@b", "http://[::1]:80/a@b"),
        ("org/repo@rev, a.py:f", "org/repo@rev, a.py:f"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


@pytest.mark.parametrize(
    ("words", "given", "shown"),
    [
        (
            "run a.py --endpoint-key hunter2 --key id",
            {"endpoint_key": "hunter2", "key": "id"},
            "run a.py --endpoint-key '…' --key id",
        ),
        (
            "bench --api hunter2 --max-tokens 4",
            {"api_key": "hunter2", "max_tokens": 4},
            "bench --api '…' --max-tokens 4",
        ),
        ("serve --api-key=hunter2", {"api_key": "hunter2"}, "serve --api-key='…'"),
        (
            "run a.py api_key=hunter2 token=hunter2 tokens=4 key=id",
            {},
            "run a.py api_key='…' token='…' tokens=4 key=id",
        ),
        (
            "run a.py --endpoint http://me:hunter2@host 'name=two words'",
            {},
            "run a.py --endpoint http://host 'name=two words'",
        ),
    ],
)
def test_command_lines(words: str, given: dict[str, object], shown: str) -> None:
    assert command_line(shlex.split(words), given) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "a.py", "--endpoint", NOBODY, "--give-up-after", "0"],
        ["run", "a.py", "--endpoint", "http://me:hun/hunter2@host"],
        ["run", "a.py", "--endpoint", "http://host/v1?key=hunter2"],
        ["bench", "--url", NOBODY],
        ["bench", "--url", NOBODY, "--model", "m"],
        ["chat", "--endpoint", NOBODY],
    ],
)
def test_no_error_of_a_command_shows_them(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("import ramify as rm\n@rm.function\ndef f(s):\n    s += rm.gen('x')\n")
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert "host" in err or "127.0.0.1:9" in err
    assert "hunter2" not in out + err


def test_neither_reports_nor_objects_show_them() -> None:
    openai = rm.OpenAI("m", base_url=NOBODY)
    shown = [
        *map(repr, (openai, rm.RuntimeEndpoint(NOBODY), wait(openai.info()))),
        report([], Plan([Endpoint("server", NOBODY, "m")], ["single"], Sizes())),
        unreachable(NOBODY, ConnectionRefusedError())[0],
        HttpClient(NOBODY).base_url,
    ]
    for text in shown:
        assert "127.0.0.1:9" in text
        assert "hunter2" not in text
