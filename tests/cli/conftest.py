"""A server in front of a fake frontend, and a folder with the programs of a test module."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.cli import main
from tests.server.fake_frontend import FakeFrontend, LiveServer


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend()) as server:
        yield server


@dataclasses.dataclass
class Folder:
    """A folder with ``greeting.py``, and `ramify run` on it against a server."""

    path: Path

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def program(self, name: str = "greet") -> str:
        return f"{self.path / 'greeting.py'}:{name}"

    def run(self, server: LiveServer, *arguments: str, name: str = "greet", output: str = "out.jsonl") -> int:
        """The exit status of `ramify run` with results in `output`, a path below the folder."""
        out = ["--output", str(self.path / output), "--endpoint", server.url]
        return main.main(["run", self.program(name), *arguments, *out])

    def results(self) -> list[dict[str, Any]]:
        """The lines of ``out.jsonl`` without its header, by index."""
        lines = [json.loads(line) for line in (self.path / "out.jsonl").read_text().splitlines()]
        return sorted((line for line in lines if "index" in line), key=lambda line: int(line["index"]))


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    """A folder whose ``greeting.py`` is the module's `PROGRAM`. Modules loaded from it are forgotten."""
    found = Folder(tmp_path)
    found.write("greeting.py", textwrap.dedent(request.module.PROGRAM))
    path, modules = list(sys.path), set(sys.modules)
    yield found
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
