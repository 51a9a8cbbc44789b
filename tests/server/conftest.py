"""Clients of a server in front of a fake desk; one server a module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.desk import FakeDesk, LiveServer


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(FakeDesk()) as server:
        yield server


@pytest.fixture
def server(module_server: LiveServer) -> LiveServer:
    module_server.desk.reset()
    return module_server


@pytest.fixture
def desk(server: LiveServer) -> FakeDesk:
    return server.desk


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10, verify=False) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
