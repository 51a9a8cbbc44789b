"""A server of several models in processes of their own: loaded when used, killed, unloaded, drained."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.served import Served, serve
from tests.runtime.tiny import write_model, write_tokenizer
from tests.server.fake_frontend import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPTIONS = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
PROMPT, OTHER = "hello " * 700, "farewell " * 500
"""4,200 and 4,500 tokens: long enough that reading their pages is faster than computing them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two", "three")):
        write_tokenizer(folder / name)
        write_model(folder / name, seed=seed, context_length=16384)
    return folder


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[Served]:
    options = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-memory-gb", "0.05")
    memory = ("--models-memory-gb", "2.3")  # each needs 1.05 GiB, of which 1 is the workspace
    cold = ("--cold-dir", str(tmp_path / "cold"))
    with serve(str(folder / "one"), f"second={folder / 'two'}", "--models-dir", str(folder),
               "--keep-alive", "5m", *cold, *memory, *options) as served:  # fmt: skip
        yield served


def answer_of(client: httpx.Client, model: str, prompt: str) -> tuple[str, int]:
    """(text, cached tokens) of the answer of `model`."""
    answer = client.post("/generate", json={"text": prompt, "model": model, "sampling_params": OPTIONS})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["text"], found["meta_info"]["cached_tokens"]


def text_of(client: httpx.Client, model: str) -> str:
    return answer_of(client, model, PROMPT)[0]


def schedulers(server: int) -> set[int]:
    """Process ids of the schedulers that the process `server` has started."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and "scheduler.process" in (entry / "cmdline").read_text():
                found.add(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def states(client: httpx.Client) -> dict[str, str]:
    return {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}


def test_models_in_processes_of_their_own(served: Served, tmp_path: Path) -> None:
    server = served.process.pid
    with httpx.Client(base_url=served.url, timeout=120) as client:
        assert states(client) == dict.fromkeys(("one", "second", "three", "two"), "unloaded")
        first = text_of(client, "one")
        before = schedulers(server)
        second = text_of(client, "second")
        assert first != second
        (of_second,) = schedulers(server) - before

        # A killed process of one model ends no stream of another, and the model itself goes on.
        body: Any = {"text": "x", "stream": True, "sampling_params": OPTIONS | {"max_new_tokens": 6000}}
        with client.stream("POST", "/generate", json=body | {"model": "one"}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(of_second, signal.SIGKILL)
            assert text_of(client, "second") == second
            client.post("/abort_request", json={"abort_all": True})
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert before <= schedulers(server)
        assert client.get("/readyz").json()["models"]["one"] == "ready"

        # Two fit: the third takes the memory of the one that was not used for longest.
        text_of(client, "second")
        assert text_of(client, "two") == second  # the same files by another name
        assert states(client) == {"one": "unloaded", "second": "ready", "three": "unloaded", "two": "ready"}
        assert not before & schedulers(server)
        text, cached = answer_of(client, "one", PROMPT)
        assert text == first
        assert cached >= 4000, "its pages were in the cold tier"

        # An unload writes what was used just before; models share the folder, and no pages.
        text, cached = answer_of(client, "one", OTHER)
        assert cached < 100
        assert client.post("/models/one/unload").json()["state"] == "unloaded"
        again, cached = answer_of(client, "one", OTHER)
        assert again == text
        assert cached >= 4400
        assert len(list((tmp_path / "cold").iterdir())) == 2

        # SIGTERM: streams of both models end whole.
        streamed: dict[str, list[Any]] = {}
        begun = threading.Barrier(3)

        def stream_of(model: str) -> None:
            short = body | {"model": model, "sampling_params": OPTIONS | {"max_new_tokens": 1500}}
            with httpx.stream("POST", served.url + "/generate", json=short, timeout=120) as response:
                begun.wait(60)
                streamed[model] = events(response)

        threads = [threading.Thread(target=stream_of, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        begun.wait(60)
    served.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(120)
    assert served.process.wait(60) == 0
    for found in streamed.values():
        assert found[-1] == "[DONE]"
        assert found[-2]["meta_info"]["finish_reason"]["type"] == "length"
