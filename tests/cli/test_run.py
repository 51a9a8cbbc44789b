"""`ramify run` on programs in files."""

from __future__ import annotations

import pytest

from ramify.cli import main
from ramify.cli.inputs.program_file import load, read_arguments
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
        return {"length": len(s["answer"])}

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
    assert "\nreturned = {'length': 8}\n\ngreet " in out


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
        (
            ["nam=x"],
            r"no parameter 'nam'\. Did you mean name\? It is greet\(name: str, count: int = 1, extra=None",
        ),
        (["count=2"], r"needs name=…\. It is greet\(name: str, "),
    ],
)
def test_bad_arguments(folder: Folder, pairs: list[str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_arguments(load(folder.program("greet")), pairs)


@pytest.mark.parametrize("at", range(4))
def test_flags_and_arguments_come_in_any_order(
    at: int, server: LiveServer, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [folder.program("greet"), "name=123", "count=2"]
    arguments[at:at] = ["--endpoint", server.url]
    assert main.main(["run", *arguments]) == 0
    assert "returned = {'length': 8}" in capsys.readouterr().out


def listed(error: NotFound) -> list[str]:
    return [note.rpartition(":")[2] for note in error.__notes__]


PROGRAMS = ["greet name=… count=… extra=…", "later name=…", "decides text=…"]


def test_an_unknown_program_lists_those_of_the_file(folder: Folder) -> None:
    with pytest.raises(NotFound, match=r"no program 'gret'\. Did you mean greet\? There are:") as raised:
        load(folder.program("gret"))
    assert listed(raised.value) == PROGRAMS
    with pytest.raises(NotFound, match=r"no program 'plain'\. Write @ramify\.function above a function"):
        load(folder.program("plain"))


def test_the_name_of_an_only_program_may_be_left_out(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFound, match=r"has 3 programs\. Name one:") as raised:
        load(str(folder.path / "greeting.py"))
    assert listed(raised.value) == PROGRAMS
    assert main.main(["run", str(folder.path / "greeting.py"), "--endpoint", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.endswith("greeting.py:decides text=…\n")
    with pytest.raises(NotFound, match=r"has no program\. Write @ramify"):
        load(str(folder.write("none.py", "x = 1\n")))
    one = folder.write("one.py", "import ramify as rm\n@rm.function\ndef only(s): ...\nother = only\n")
    assert load(str(one)).__name__ == "only"
    imports = folder.write("imports.py", "from one import only\n")
    assert load(str(imports)).__name__ == "only"
    imports.write_text(f"{one.read_text()}from greeting import greet\n")
    assert load(str(imports)).__name__ == "only"
    assert load(f"{imports}:greet").__name__ == "greet"


def test_only_parameters_that_can_be_given_by_name_are_listed(folder: Folder) -> None:
    file = folder.write("any.py", "import ramify as rm\n@rm.function\ndef f(s, a, *xs, **kw): ...\n")
    with pytest.raises(NotFound) as raised:
        load(f"{file}:nope")
    assert listed(raised.value) == ["f a=…"]
    with pytest.raises(InvalidRequest, match="no parameter 'xs'"):
        read_arguments(load(str(file)), ["xs=1"])


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("def f():\n    return 1 / 0\nf()\n", 2, "ZeroDivisionError: division by zero"),
        ("def f(:\n", 1, "SyntaxError: invalid syntax"),
        ("import ramify as rm\nrm.function(lambda: 0)\n", 2, "TypeError: <lambda> takes no state; "),
        ("import nothing_here\n", 1, "ModuleNotFoundError: No module named 'nothing_here'"),
    ],
)
def test_a_file_that_raises_shows_its_own_lines(
    folder: Folder, text: str, line: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.write("broken.py", text)
    assert main.main(["run", f"{path}:f", "--endpoint", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ramify: {path} cannot be imported. {said}")
    assert f", at {path}:{line}.\n" in err
    assert f'  File "{path}", line {line}' in err
    assert err.count("  File ") == err.count(str(path)) - 2


@pytest.mark.parametrize("place", ["program", ":fn", "program.py:"])
def test_a_place_has_a_file_and_a_name(place: str) -> None:
    with pytest.raises(InvalidRequest, match=r"file\.py:function"):
        load(place)


def test_no_such_file() -> None:
    with pytest.raises(NotFound, match=r"no file nowhere\.py"):
        load("nowhere.py:fn")
