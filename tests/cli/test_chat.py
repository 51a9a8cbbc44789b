"""`ramify chat` with a scripted keyboard."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from ramify.cli import main
from ramify.errors import WorkerDied
from ramify.messages import ModelInfo, ThinkingFormat
from tests.server.fake_frontend import FakeFrontend, LiveServer

Keyboard = Callable[..., None]


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Keyboard:
    def type_lines(*lines: str) -> None:
        waiting = list(lines)

        def read(prompt: str) -> str:
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        monkeypatch.setattr("builtins.input", read)

    return type_lines


def test_endpoint(server: LiveServer, type_lines: Keyboard, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines("hello there", "", "and again", "/exit", "never sent")
    arguments = ["chat", "--endpoint", server.url + "/v1", "--system", "Be brief.", "--max-tokens", "8"]
    assert main.main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"LO THERE\n\[prompt \d+, of these cached 0; answer 8; \d\.\d s\]\nND AGAIN\n", out)
    first, second = server.frontend.requests
    assert [turn.role for turn in first.chat or ()] == ["system", "user"]
    assert [turn.content for turn in second.chat or ()][2] == "LO THERE"


def test_endpoint_breaks_off(
    server: LiveServer, type_lines: Keyboard, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines("hello there")
    server.frontend.fail_after = (2, WorkerDied("The scheduler died."))
    assert main.main(["chat", "--endpoint", server.url]) == 2
    assert capsys.readouterr().err == "ramify: The scheduler died.\n"


class FakeEngine(FakeFrontend):
    made: FakeEngine
    thinking: ThinkingFormat | None = None

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options
        type(self).made = self
        assert self.info.chat_format is not None
        chat_format = msgspec.structs.replace(self.info.chat_format, thinking=self.thinking)
        found = msgspec.structs.replace(self.info, chat_format=chat_format)

        async def info() -> ModelInfo:
            return found

        self.info = info  # type: ignore[assignment]

    def __enter__(self) -> FakeEngine:
        assert self.options == {"page_size": 8}
        return self

    def __exit__(self, *_: object) -> None: ...


def test_thoughts_in_channels_are_shown_and_not_sent_again(
    type_lines: Keyboard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Harmony(FakeEngine):
        thinking = ThinkingFormat(channels=True)

        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            self.script = [f"{thought}<|channel|>final<|message|>Hello."] * 2

    monkeypatch.setattr("ramify.runtime.engine.engine.Engine", Harmony)
    type_lines("hi", "again")
    assert main.main(["chat", "--page-size", "8"]) == 0
    assert capsys.readouterr().out.startswith("Hm.\n\nHello.\n[prompt")
    assert [turn.content for turn in Harmony.made.requests[1].chat or ()] == ["hi", "Hello.", "again"]


def test_engine(
    type_lines: Keyboard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ramify.runtime.engine.engine.Engine", FakeEngine)
    type_lines("hello there")
    assert main.main(["chat", "--page-size", "8", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("LO THERE\n[prompt 17, of these cached 0; answer 8;")


def test_nobody_there(type_lines: Keyboard, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines("hi")
    assert main.main(["chat", "--endpoint", "http://127.0.0.1:9"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
