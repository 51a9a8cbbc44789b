"""The LoRA adapter of requests: the step's, else the run's, else the backend's; and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import ramify as rm
from ramify.answers import AnswerStore
from ramify.errors import InvalidRequest
from ramify.lang.backends.scripted import ScriptedBackend
from ramify.model_info import ModelInfo
from tests.lang.steps import program_of


@rm.function
def asks(s: Any, topic: str) -> None:
    s += f"About {topic}: " + rm.gen("first", max_tokens=4)
    s += rm.gen("second", max_tokens=4, lora="sql")
    s += rm.select("third", ["yes", "no"])
    s += rm.select("fourth", ["yes", "no"], lora="legal")
    s += rm.gen("fifth", choices=["yes", "no"], lora="")


class Adapted(ScriptedBackend):
    """A backend with adapters."""

    def __init__(self, lora: str = "") -> None:
        super().__init__({"first": "a", "second": "b", "third": "yes", "fourth": "yes", "fifth": "no"})
        self.lora = lora
        self.revisions = {"sql": "1", "legal": "1", "own": "1", "run": "1"}

    async def info(self) -> ModelInfo:
        return msgspec.structs.replace(await super().info(), fingerprint="one")

    async def lora_revisions(self) -> dict[str, str]:
        return dict(self.revisions)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [("", {}, ""), ("own", {}, "own"), ("own", {"lora": "run"}, "run"), ("own", {"lora": ""}, "")],
)
def test_of_a_run(compiled: bool, own: str, options: dict[str, str], expected: str) -> None:
    backend = Adapted(own)
    asks.run("x", backend=backend, compiled=compiled, **options)
    assert [request.lora for request in backend.requests] == [expected, "sql", expected, "legal", ""]


def test_a_name_must_be_text() -> None:
    with pytest.raises(InvalidRequest, match="lora is 3"):
        asks.run("x", backend=Adapted(), lora=3)


def test_stored_answers_are_those_of_one_adapter(tmp_path: Path) -> None:
    greedy = program_of("Q" + rm.gen("first", max_tokens=4, temperature=0.0))

    def asked(backend: Adapted, lora: str) -> int:
        before = len(backend.requests)
        assert greedy.run(backend=backend, lora=lora)["first"] == "a"
        return len(backend.requests) - before

    backend = Adapted()
    backend.answers = AnswerStore(tmp_path / "answers")  # type: ignore[attr-defined]
    assert [asked(backend, lora) for lora in ("", "sql", "legal", "sql", "")] == [1, 1, 1, 0, 0]
    backend.revisions["sql"] = "2"
    assert [asked(backend, lora) for lora in ("sql", "legal")] == [1, 0]


def test_a_results_file_goes_on_with_the_same_adapters(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    backend = Adapted("own")
    asks.run_batch([{"topic": "x"}], backend=backend, out=out)
    del backend.revisions["sql"]
    backend.revisions["new"] = "1"
    asks.run_batch([{"topic": "x"}, {"topic": "y"}], backend=backend, out=out)
    backend.revisions["own"] = "2"
    with pytest.raises(InvalidRequest, match="the LoRA adapter own was"):
        asks.run_batch([{"topic": "x"}, {"topic": "y"}], backend=backend, out=out)
