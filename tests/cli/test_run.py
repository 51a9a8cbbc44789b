"""`ramify run` on programs in files."""

from __future__ import annotations

import pytest

from ramify.cli import main
from ramify.cli.run import load, read_arguments
from ramify.errors import InvalidRequest, NotFound
from tests.cli.conftest import Folder
from tests.lang.remote import ScriptedFrontend
from tests.server.fake_frontend import LiveServer

PROGRAM = """
    from __future__ import annotations

    import ramify as rm

    @rm.function
    def greet(s, name: str, count: int = 1, extra=None):
        s += "hello " + name
        s += rm.gen("answer", max_tokens=4 * count)
        s += rm.gen("size", choices=["big", "small"])

    @rm.function
    async def later(s, name: str):
        s += name
        s += rm.gen("answer", max_tokens=4)

    @rm.function
    def decides(s, text: str):
        s += rm.user(text)
        s += rm.decide("urgent", bool, "Is it urgent?")

    def plain(s): ...
"""


def test_prints_outputs_and_trace(
    server: LiveServer, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", folder.program("greet"), "name=123", "count=2", "--endpoint", server.url]
    assert main.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("answer = ELLO 123")
    assert "greet" in out
    assert "gen answer" in out


def test_decisions_are_printed_with_their_probabilities(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveServer(ScriptedFrontend([{True: 0.75, False: 0.25}])) as server:
        assert main.main(["run", folder.program("decides"), "text=Help!", "--endpoint", server.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("urgent = Decision(True, {True: 0.750, False: 0.250}")
    assert "True 0.75" in out


def test_async_program(server: LiveServer, folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["run", folder.program("later"), "name=abcd", "--endpoint", server.url]) == 0
    assert capsys.readouterr().out.startswith("answer = ABCD\n")


def test_a_failed_step(server: LiveServer, folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    server.frontend.fail_first = NotFound("No such model.")
    assert main.main(["run", folder.program("later"), "name=abcd", "--endpoint", server.url]) == 2
    out, err = capsys.readouterr()
    assert "failed" in out
    assert err.startswith("ramify: ")
    assert err.count("\n") == 1


def test_values_are_json_unless_the_parameter_is_text(folder: Folder) -> None:
    program = load(folder.program("greet"))
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
def test_bad_arguments(folder: Folder, pairs: list[str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_arguments(load(folder.program("greet")), pairs)


@pytest.mark.parametrize("name", ["plain", "missing"])
def test_no_such_program(folder: Folder, name: str) -> None:
    with pytest.raises(NotFound, match=name):
        load(folder.program(name))


@pytest.mark.parametrize("place", ["program.py", ":fn", "program.py:"])
def test_a_place_has_a_file_and_a_name(place: str) -> None:
    with pytest.raises(InvalidRequest, match=r"file\.py:function"):
        load(place)


def test_no_such_file() -> None:
    with pytest.raises(NotFound, match=r"no file nowhere\.py"):
        load("nowhere.py:fn")
