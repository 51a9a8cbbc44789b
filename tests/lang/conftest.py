from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ramify as rm
from ramify import retry
from tests.end_to_end.served import serve
from tests.lang.engines import OPTIONS, write_long


class Clock:
    """The clock of retries, which advances only in pauses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.during: list[Callable[[], object] | None] = []
        """Functions for the next pauses, each called in one."""
        self.stands = False
        """Whether pauses do not end."""

    async def sleep(self, seconds: float) -> None:
        if self.stands:
            await asyncio.Event().wait()
        self.pauses.append(seconds)
        self.now += seconds
        if self.during and (call := self.during.pop(0)) is not None:
            await asyncio.to_thread(call)
        await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(retry, "_clock", lambda: clock.now)
    monkeypatch.setattr(retry, "_sleep", clock.sleep)
    return clock


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes."""
    return write_long(tmp_path_factory.mktemp("models") / "long")


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[rm.Engine]:
    with rm.Engine(str(model_folder), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="session")
def endpoint(model_folder: Path) -> Iterator[rm.RuntimeEndpoint]:
    """The same model behind `ramify serve`."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with serve("--model", str(model_folder), *flags) as served:
        backend = rm.RuntimeEndpoint(served.url)
        yield backend
        backend.close()
