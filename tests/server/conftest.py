"""Clients of a server in front of a fake frontend; one server a module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.fake_frontend import FakeFrontend, LiveServer


@pytest.fixture(scope="module")
def module_server() -> Iterator[LiveServer]:
    with LiveServer(FakeFrontend(), lora_loading=True) as server:
        yield server


@pytest.fixture
def server(module_server: LiveServer) -> LiveServer:
    module_server.frontend.reset()
    return module_server


@pytest.fixture
def frontend(server: LiveServer) -> FakeFrontend:
    return server.frontend


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=10, verify=False, headers=headers) as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
