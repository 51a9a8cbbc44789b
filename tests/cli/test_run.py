"""`ramify run` on programs in files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.cli.run import load, read_arguments
from ramify.errors import InvalidRequest, NotFound
from tests.server.fake_frontend import FakeFrontend, LiveServer

PROGRAM = """
    from __future__ import annotations

    import ramify as rm
    from helper import GREETING

    @rm.function
    def greet(s, name: str, count: int = 1, extra=None):
        s += GREETING + name
        s += rm.gen("answer", max_tokens=4 * count)
        s += rm.gen("size", choices=["big", "small"])

    @rm.function
    async def later(s, name: str):
        s += name
        s += rm.gen("answer", max_tokens=4)

    def plain(s): ...
"""


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend()) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("greeting", "helper"):  # what the test imports is forgotten at its end
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "helper.py").write_text('GREETING = "hello "\n')
    path = tmp_path / "greeting.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return str(path)


def test_prints_outputs_and_trace(server: LiveServer, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", f"{file}:greet", "name=123", "count=2", "--endpoint", server.url]
    assert main.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("answer = ELLO 123")
    assert "greet" in out
    assert "gen answer" in out


def test_async_program(server: LiveServer, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", f"{file}:later", "name=abcd", "--endpoint", server.url]) == 0
    assert capsys.readouterr().out.startswith("answer = ABCD\n")


def test_a_failed_step(server: LiveServer, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.frontend.fail_first = NotFound("No such model.")
    assert main.main(["run", f"{file}:later", "name=abcd", "--endpoint", server.url]) == 2
    out, err = capsys.readouterr()
    assert "failed" in out
    assert err.startswith("ramify: ")
    assert err.count("\n") == 1


def test_values_are_json_unless_the_parameter_is_text(file: str) -> None:
    program = load(f"{file}:greet")
    assert read_arguments(program, ["name=5", "count=5", "extra=[1, 2]"]) == {
        "name": "5",
        "count": 5,
        "extra": [1, 2],
    }
    assert read_arguments(program, ["name=a=b", "extra=plain text"]) == {"name": "a=b", "extra": "plain text"}


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        (["name"], "not key=value"),
        (["nam=x"], "no parameter 'nam'; it has name, count, extra"),
        (["count=2"], "needs name="),
    ],
)
def test_bad_arguments(file: str, pairs: list[str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_arguments(load(f"{file}:greet"), pairs)


@pytest.mark.parametrize("name", ["plain", "missing"])
def test_no_such_program(file: str, name: str) -> None:
    with pytest.raises(NotFound, match=name):
        load(f"{file}:{name}")


@pytest.mark.parametrize("place", ["program.py", ":fn", "program.py:"])
def test_a_place_has_a_file_and_a_name(place: str) -> None:
    with pytest.raises(InvalidRequest, match=r"file\.py:function"):
        load(place)


def test_no_such_file() -> None:
    with pytest.raises(NotFound, match=r"no file nowhere\.py"):
        load("nowhere.py:fn")
