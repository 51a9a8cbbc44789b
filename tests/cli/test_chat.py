"""`ramify chat` with scripted models, a scripted keyboard, and a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ramify as rm
from ramify.cli import chat, main
from ramify.errors import BackendError, InvalidRequest, NotFound
from ramify.lang.prompt.chat import chatml
from ramify.model_info import ThinkingFormat
from ramify.sampling_params import SamplingParams
from tests.server.conftest import speak
from tests.server.fake_frontend import LiveServer

Keyboard = Callable[..., None]
SAMPLING = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture
def server(server: LiveServer) -> LiveServer:
    """The server, with a model whose chat template writes nothing around turns."""
    turns = {">user": "", "user>assistant": "", "assistant>user": ""}
    speak(server.frontend, prefix=turns, suffix={"user": "", "assistant": ""})
    return server


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Keyboard:
    def type_lines(*lines: str) -> None:
        waiting = list(lines)

        def read(prompt: str = "") -> str:
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("builtins.input", read)

    return type_lines


def converse(backend: Any, *lines: str, system: str | None = None, typed: bool = False) -> chat.Chat:
    found = chat.Chat(backend, SAMPLING, system, typed=typed)
    found.converse(iter(lines))
    return found


def test_the_next_turn_begins_with_the_tokens_of_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    model = rm.ScriptedBackend({"answer": ["One.", "Two."]})
    converse(model, "first", " ", "second", "/quit", "never sent", system="Be brief.")
    assert capsys.readouterr() == ("One.\nTwo.\n", "")
    before, after = map(model.prompt_text, model.requests)
    assert re.findall(r"system\nBe brief.|user\nfirst", before) == ["system\nBe brief.", "user\nfirst"]
    assert after.startswith(before + "One.<|im_end|>")
    assert len(model.requests) == 2


def test_figures_are_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    converse(rm.ScriptedBackend({"answer": ["One.", "Two."]}), "first", "second", typed=True)
    figures = re.findall(
        r"\[prompt (\d+), (\d+)% cached; answer (\d+), [\d.]+ tokens/s\]", capsys.readouterr().out
    )
    assert [int(cached) > 0 for _, cached, _ in figures] == [False, True]


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("answer", ["one two three", "one two"])
def test_an_answer_that_was_cut_is_told(typed: bool, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = msgspec.structs.replace(SAMPLING, max_tokens=3)
    chat.Chat(rm.ScriptedBackend([answer]), sampling, typed=typed).converse(iter(["Count."]))
    told = "The answer was cut after 3 tokens (--max-tokens is 3).\n"
    assert capsys.readouterr().err == (told if answer == "one two three" else "")


def test_thoughts_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    thinking = msgspec.structs.replace(chatml(), thinking=ThinkingFormat())
    model = rm.ScriptedBackend({"answer": "<think>2 and 2</think>4"}, chat_format=thinking)
    converse(model, "/thoughts", "2 + 2?", "/thoughts", typed=True)
    first, _, rest = capsys.readouterr().out.partition("[thought for ")
    assert "no thoughts" in first
    assert "2 and 2" not in first
    assert re.match(r"\d+ tokens; /thoughts shows them\]\x1b\[0m\n4\n", rest)
    assert rest.count("2 and 2") == 1
    assert rest.rstrip().endswith("2 and 2")


def test_a_new_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    model = rm.ScriptedBackend({"answer": ["1", "2", "3"]})
    converse(model, "first", "/reset", "second", "/system Be loud.", "third")
    assert ["first" in model.prompt_text(request) for request in model.requests] == [True, False, False]
    assert ["loud" in model.prompt_text(request) for request in model.requests] == [False, False, True]


def test_a_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    (tmp_path / "wrong.json").write_text("[")
    model = rm.ScriptedBackend({"answer": ['{"n": 1}', "words"]})
    converse(model, f"/schema {tmp_path}/schema.json", "How many?", "/schema off", "In words?")
    assert capsys.readouterr().out == '{"n": 1}\nwords\n'
    assert [request.constraint is None for request in model.requests] == [False, True]
    for wrong in ("wrong.json", "none.json"):
        with pytest.raises((InvalidRequest, OSError), match=wrong):
            converse(model, f"/schema {tmp_path}/{wrong}")


def test_tools_are_confirmed(
    tmp_path: Path, type_lines: Keyboard, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools.py").write_text('def add(a: int, b: int) -> int:\n    "Add."\n    return a + b\n')
    add = rm.ToolCall("add", {"a": 2, "b": 3})
    model = rm.ScriptedBackend({"answer 0": [[add], [add]], "answer 1": ["It is 5.", "I may not."]})
    type_lines("y", "n")
    found = converse(model, f"/tools {tmp_path}/tools.py", "2 + 3?", "And again?", typed=True)
    out = capsys.readouterr().out
    assert "→ 5" in out
    assert "It is 5.\n" in out
    assert "tool_call" not in out
    assert "Add." in model.prompt_text(model.requests[0])
    assert "5" in model.prompt_text(model.requests[1])[len(model.prompt_text(model.requests[0])) :]
    assert "did not allow" in model.prompt_text(model.requests[3])
    assert found.content is not None
    with pytest.raises(InvalidRequest, match="needs a terminal"):
        converse(model, f"/tools {tmp_path}/tools.py")


def test_save(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    converse(rm.ScriptedBackend({"answer": "One."}), "first", f"/save {path}")
    assert json.loads(path.read_text()) == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "One."},
    ]
    with pytest.raises(InvalidRequest, match="File exists"):
        converse(rm.ScriptedBackend({}), f"/save {path}")


def test_what_is_wrong_ends_a_pipe_and_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = rm.ScriptedBackend({"answer": ["One.", "Two."]})
    converse(model, "/rest", "/nonsense", "/schema", "first", "/help", typed=True)
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "There is no /rest. Did you mean /reset?"
    assert len(err.splitlines()) == 3
    assert "One." in out
    assert "/schema FILE" in out
    with pytest.raises(InvalidRequest, match="no /rest"):
        converse(model, "/rest", "second")
    with pytest.raises(InvalidRequest, match=r"nofile\.json: No such file"):
        converse(model, "/schema nofile.json")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    converse(model, f"/tools {tmp_path}/wrong.py", typed=True)
    assert "wrong.py cannot be imported. SyntaxError: invalid syntax, at " in capsys.readouterr().err
    converse(model, "//etc is a folder?")
    assert "user\n/etc is" in model.prompt_text(model.requests[-1])


def test_lines_and_blocks(type_lines: Keyboard) -> None:
    type_lines("one", "two \\", "lines", '"""', "a", 'b"""', '"""c"""', '"""d', "e")
    assert list(chat._lines(typed=False)) == ["one", "two \nlines", "\na\nb", "c", "d\ne"]


def test_server(server: LiveServer, type_lines: Keyboard, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines("hello there", "", "and again", "/exit", "never sent")
    for flag, url in (("--endpoint", server.url + "/v1"), ("--url", server.url)):
        type_lines("hello there", "", "and again", "/exit", "never sent")
        assert main.main(["chat", flag, url, "--max-tokens", "8", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.count("\n") == 2
    assert len(server.frontend.requests) == 4


def test_another_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (NotFound("no /get_model_info"), BackendError("no Ramify server")):

        async def info(_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(rm.RuntimeEndpoint, "info", info)
        assert isinstance(chat._connect(server.url, None, None), rm.OpenAI)


def test_a_server_that_fails(
    server: LiveServer, type_lines: Keyboard, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines("hello there")
    server.frontend.fail_first = InvalidRequest("No.")
    assert main.main(["chat", "--url", server.url]) == 2
    assert capsys.readouterr().err == "ramify: No.\n"


def test_one_message(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main.main(["chat", "--url", server.url, "--one-message", "--max-tokens", "2"]) == 0
    (request,) = server.frontend.requests
    assert "one\ntwo" in "".join(map(str, request.prompt))


@pytest.mark.parametrize("text", ["/save FILE", "//etc", "/quit"])
def test_one_message_is_no_command(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main.main(["chat", "--url", server.url, "--one-message", "--max-tokens", "2"]) == 0
    (request,) = server.frontend.requests
    assert "".join(map(str, request.prompt)) == text
    assert not list(tmp_path.iterdir())


class Terminal:
    """`ramify chat` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "ramify", "chat", *arguments])
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """The next output, up to and with `text`."""
        end = time.monotonic() + 60
        while text not in self.seen and time.monotonic() < end:
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 4096).decode(errors="replace")
        assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def until_asked(self) -> None:
        """Wait until the program reads a line. Between its prompt and the reading a Ctrl-C is lost."""
        self.until("> ")
        stat = Path(f"/proc/{self.pid}/stat")
        while stat.read_text().rpartition(") ")[2][0] != "S":  # the test's time limit ends it
            pass

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(server: LiveServer) -> None:
    terminal = Terminal("--url", server.url, "--max-tokens", "8", "--temperature", "0")
    try:
        terminal.until_asked()
        server.frontend.hold_after = 2
        terminal.type("hello there\n")
        assert server.frontend.held.wait(60)
        terminal.until("LO")
        terminal.type("\x03")
        terminal.until("stopped")
        terminal.until_asked()
        assert server.frontend.idle.wait(60)  # the request has ended
        server.frontend.hold_after = None
        terminal.type("\x03")
        terminal.until_asked()
        terminal.type("and again\n")
        assert "\x1b[2m[prompt" in terminal.until("tokens/s]")
        terminal.until_asked()
        terminal.type("\x04")
        assert terminal.status() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(terminal.pid, signal.SIGKILL)
    prompt = "".join(map(str, server.frontend.requests[-1].prompt))
    assert "hello there" in prompt  # with the part of its answer that was shown
