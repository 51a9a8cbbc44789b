"""Each agent, unmodified, in a session on each API that it speaks, against `ramify serve`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.clients import CLIENTS, Client
from tests.agents.page import PAGE, snippets
from tests.agents.serving import scripted_server
from tests.agents.session import Player
from tests.end_to_end.served import Served


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model makes the call that its parameter names, for all agents in turn."""
    if "AGENTS_FOLDER" not in os.environ:
        pytest.skip("AGENTS_FOLDER names no folder with agents")
    with scripted_server(request.param, tmp_path_factory.mktemp("model")) as served:
        yield served


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("served", "client"),
    [pytest.param(client.script, client, id=client.id) for client in CLIENTS],
    indirect=["served"],
)
def test_a_session(served: Served, client: Client, tmp_path: Path) -> None:
    program = client.program(Path(os.environ["AGENTS_FOLDER"]))
    if program is None:
        pytest.skip(f"{client.package} is not in AGENTS_FOLDER")
    assert Player(client, program, served, tmp_path).play().faults(client) == []


def test_the_page_shows_what_is_run() -> None:
    assert snippets() in PAGE.read_text()
