"""The supervisor of an engine core, tested with fake processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.engine_messages import FlushCache, Ready, StepText
from ramify.errors import EngineClosed, EngineError, InvalidRequest, NotFound, WorkerDied
from ramify.messages import TextChunk
from ramify.model_info import ModelInfo
from ramify.questions import Calibration, Temperature
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.replica import EngineEvents
from ramify.runtime.fleet.supervisor import EngineSupervisor
from tests.fleet.fakes import model_info
from tests.runtime.tiny import write_tiny


class FakeProcesses:
    """Fake `EngineProcesses`: ready at once, or if `failure` is given, failing to start with it."""

    def __init__(self, failure: BaseException | None, options: dict[str, Any]) -> None:
        self.failure = failure
        self.receive = options["receive"]
        self.died = options["died"]
        self.pids = {"scheduler": 1}
        self.stopped_by: list[threading.Thread] = []
        self.may_stop = threading.Event()
        self.may_stop.set()
        self.gate: asyncio.Event | None = None
        """An event for which the start waits; None for none."""

    async def start(self) -> dict[str, Ready]:
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        info = model_info(trained_layout="decider-1")
        scheduler = Ready(role="scheduler", pid=1, model_info=info, max_prompt_tokens=9)
        return {"scheduler": scheduler, "tokenizer": Ready(role="tokenizer", pid=2)}

    def send(self, message: Any) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def stop(self) -> None:
        self.may_stop.wait(10)
        self.stopped_by.append(threading.current_thread())


class Supervised:
    """A supervisor, a record of its callbacks, and the processes that it has launched.

    failures : errors of the first launches, in order; None for a launch that succeeds
    callbacks : callbacks in place of the recording ones
    calibration : the field of the same name in `EngineConfig`
    """

    def __init__(
        self,
        folder: Path,
        failures: Sequence[BaseException | None] = (),
        callbacks: Mapping[str, Any] = {},
        calibration: str | None = None,
        **options: Any,
    ) -> None:
        self.launched: list[FakeProcesses] = []
        self.failures = list(failures)
        self.deaths: list[WorkerDied] = []
        self.restarts = 0
        self.gave_up: list[EngineError] = []
        self.gate: asyncio.Event | None = None
        own: dict[str, Any] = {
            "receive": lambda message: None,
            "died": lambda error: bool(self.deaths.append(error)),
            "restarted": self._restarted,
            "gave_up": self.gave_up.append,
        }
        events = EngineEvents(**(own | callbacks))
        config = EngineConfig(model=str(folder), load_format="dummy", calibration=calibration)
        self.engine = EngineSupervisor(config, None, events=events, launch=self._launch, **options)

    def _launch(self, *arguments: Any, **options: Any) -> Any:
        processes = FakeProcesses(self.failures.pop(0) if self.failures else None, options)
        processes.gate = self.gate
        self.launched.append(processes)
        return processes

    def _restarted(self) -> None:
        self.restarts += 1

    async def restart(self) -> None:
        """Let a process die, and wait until the restart has ended."""
        self.launched[-1].died("scheduler")
        async with asyncio.timeout(10):
            while self.engine.restarting:
                await asyncio.sleep(0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_any_error_in_a_restart_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        found = Supervised(folder, [None, OSError("no more processes")], name="7")
        await found.engine.start()
        await found.restart()
        assert "no more processes" in str(found.gave_up[0])
        await found.engine.aclose()

    asyncio.run(run())
    assert all(line.startswith("replica 7: ") for line in caplog.messages)
    assert "The scheduler process died" in caplog.messages[0]


@pytest.mark.parametrize(("deaths", "closes"), [(1, False), (2, False), (3, True)])
def test_an_engine_that_dies_while_starting_is_started_once_more(
    folder: Path, deaths: int, closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    death = WorkerDied("The scheduler process ended with code -9 while starting.")

    async def run() -> Supervised:
        found = Supervised(folder, [None, *[death] * deaths])
        await found.engine.start()
        await found.restart()
        await found.engine.aclose()
        return found

    found = asyncio.run(run())
    assert len(found.launched) == 1 + min(deaths + 1, 3)
    assert found.restarts == (not closes)
    if closes:
        assert isinstance(found.gave_up[0], EngineClosed)
        assert "code -9" in str(found.gave_up[0])
        assert found.gave_up[0].remedy
    else:
        assert not found.gave_up
        assert "ready again after" in caplog.messages[-1]


@pytest.mark.parametrize("callback", ["died", "restarted"])
def test_an_engine_comes_back_though_a_callback_raises(folder: Path, callback: str) -> None:
    def raises(*arguments: Any) -> bool:
        raise ValueError("a bug")

    async def run() -> None:
        found = Supervised(folder, callbacks={callback: raises})
        await found.engine.start()
        await found.restart()
        assert not found.gave_up
        assert found.engine.pids == {"scheduler": 1}
        assert len(found.launched) == 2
        await found.engine.aclose()

    asyncio.run(run())


def test_an_engine_is_stopped_beside_the_event_loop(folder: Path) -> None:
    async def run() -> None:
        found = Supervised(folder)
        await found.engine.start()
        await found.restart()
        await found.engine.aclose()
        for processes in found.launched:
            (thread,) = processes.stopped_by
            assert thread is not threading.current_thread()

    asyncio.run(run())


@pytest.mark.parametrize("begun", [False, True])
def test_a_restart_during_the_close_leaves_no_processes(folder: Path, begun: bool) -> None:
    async def run() -> None:
        found = Supervised(folder)
        await found.engine.start()
        found.gate = asyncio.Event()
        first = found.launched[0]
        first.may_stop.clear()
        first.died("scheduler")
        if begun:
            first.may_stop.set()
            while len(found.launched) < 2:
                await asyncio.sleep(0)
        closing = asyncio.ensure_future(found.engine.aclose())
        found.gate.set()
        for _ in range(50):  # a restart that is not cancelled ends meanwhile
            await asyncio.sleep(0)
        first.may_stop.set()
        await closing
        assert not found.engine.pids
        assert not found.restarts
        found.engine.send(FlushCache(rid="late"))  # dropped

    asyncio.run(run())


def test_an_engine_that_hangs_with_a_request_is_replaced(folder: Path) -> None:
    async def run() -> None:
        busy = False
        found = Supervised(folder, busy=lambda: busy, heartbeat_s=0.001, silent_s=0.005)
        await found.engine.start()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(found.launched) == 1, "nothing waits for it"
        busy = True
        async with asyncio.timeout(10):
            while not found.restarts:
                await asyncio.sleep(0.001)
        busy = False
        assert "said nothing" in str(found.deaths[0])
        found.launched[-1].receive(StepText(chunks=(TextChunk(rid="a"),)))
        assert found.engine.heartbeat_age_s < 10
        await found.engine.aclose()

    asyncio.run(run())


def test_a_calibration_belongs_to_the_model_and_a_layout(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"

    async def start(**fields: Any) -> ModelInfo:
        """The info of an engine that starts with this calibration."""
        calibration = Calibration(temperatures={"choice": Temperature(base=2.0)}, **fields)
        path.write_bytes(msgspec.json.encode(calibration))
        found = Supervised(folder, calibration=str(path))
        try:
            await found.engine.start()
            assert found.engine.info is not None
            return found.engine.info
        finally:
            await found.engine.aclose()
            assert all(one.stopped_by for one in found.launched)

    async def run() -> None:
        plain = Supervised(folder)
        await plain.engine.start()
        await plain.engine.aclose()
        assert plain.engine.info is not None
        assert plain.engine.info.calibration is None
        own = plain.engine.info.digest
        assert own != plain.engine.info.fingerprint
        info = await start(model=own, layout="verbatim-1")
        assert info.digest == own
        assert info.calibration is not None
        assert info.calibration.temperatures == {"choice": Temperature(base=2.0)}
        assert (await start(model=own, layout="decider-1")).calibration is not None
        with pytest.raises(InvalidRequest, match="fitted to the model 'other'"):
            await start(model="other", layout="verbatim-1")
        with pytest.raises(InvalidRequest, match="fitted to the layout 'verbatim-0'"):
            await start(model=own, layout="verbatim-0")

    asyncio.run(run())


def test_a_wrong_calibration_is_refused_before_the_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    found = Supervised(folder, calibration=str(tmp_path / "none.json"))
    with pytest.raises(NotFound, match=r"none\.json cannot be read"):
        asyncio.run(found.engine.start())
    assert not found.launched
