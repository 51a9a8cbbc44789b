"""The default model says what it is for, where nobody named a model."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import NoReturn

import pytest

import ramify as rm
from ramify.cli import main
from ramify.runtime.config import DEFAULT_MODEL
from ramify.runtime.default_model import NOTICE, tell_of_default_model
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.server.app import serve


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A first notice of this process, and engines that start nothing."""

    async def start(frontend: Frontend) -> None:
        pass

    monkeypatch.setattr(Frontend, "start", start)
    monkeypatch.setattr(Frontend, "info", None)
    tell_of_default_model.cache_clear()
    yield
    tell_of_default_model.cache_clear()


def in_use(host: str, port: int) -> NoReturn:
    raise OSError(errno.EADDRINUSE, "in use")


def test_an_engine_without_a_name_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    for engine in (rm.Engine(), rm.Engine(max_running=2)):
        with engine:
            pass
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.WARNING, NOTICE)]


def test_a_model_that_was_named_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with rm.Engine(DEFAULT_MODEL), rm.Engine(model=DEFAULT_MODEL):
        pass
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "notices"),
    [([], 1), (["--log-level", "error"], 0), (["--model", DEFAULT_MODEL], 0), ([DEFAULT_MODEL], 0)],
)
def test_serve_says_so_at_its_log_level(
    arguments: list[str],
    notices: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = "ramify.runtime.processes.prestart.PrestartedWorkers"
    monkeypatch.setattr(workers, lambda config: contextlib.nullcontext())
    monkeypatch.setattr(serve, "configure_logging", lambda level, *_: caplog.set_level(level.upper()))
    monkeypatch.setattr(serve, "bind", in_use)
    assert main.main(["serve", *arguments]) == serve.PORT_IN_USE
    assert [record.message for record in caplog.records] == [NOTICE] * notices
    assert NOTICE not in capsys.readouterr().out
