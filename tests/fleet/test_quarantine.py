"""A request that kills whatever engine core it is in fails, and those beside it lose nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.engine_messages import Abort, StepText
from ramify.errors import WorkerDied
from ramify.messages import Finish, Generate, TextChunk
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.supervisor import RESTART_LIMIT, EngineSupervisor
from ramify.runtime.frontend.frontend import Frontend

LENGTH = 100
"""Tokens of each output."""
KILLS_AT = 40


class FakeEngine:
    """Says one token of each request at a step; a request whose prompt is (666,) kills it at `KILLS_AT`."""

    def __init__(self, owner: EngineSupervisor) -> None:
        self.pids: dict[str, int] = {}
        self.owner = owner
        self.said: dict[str, int] = {}
        self.poisoned: set[str] = set()
        self.dead = False

    def send(self, message: Any) -> None:
        if isinstance(message, Generate):
            assert message.rid not in self.said, "it was sent twice"
            self.said[message.rid] = 0
            if message.prompt == ((666,),):
                self.poisoned.add(message.rid)
        elif isinstance(message, Abort):
            self.said.pop(message.rid, None)

    def disconnect(self) -> None:
        self.dead = True

    def stop(self) -> None:
        self.dead = True

    def step(self) -> None:
        if self.dead:
            return
        if any(self.said.get(rid) == KILLS_AT for rid in self.poisoned):
            self.dead = True
            self.owner._worker_died("scheduler")
            return
        chunks = []
        for rid, at in list(self.said.items()):
            finish = Finish(reason="length") if at == LENGTH - 1 else None
            chunks.append(TextChunk(rid=rid, ids=(at,), text=chr(at), finish=finish))
            self.said[rid] += 1
            if finish is not None:
                del self.said[rid]
        self.owner._handle(StepText(chunks=tuple(chunks)))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("poisons", [1, 2])
def test_only_what_kills_fails(replicas: int, poisons: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FakeEngine] = []

    async def start(self: EngineSupervisor) -> None:
        self._engine = FakeEngine(self)  # type: ignore[assignment]
        self.info: Any = SimpleNamespace(fingerprint="", page_size=16)
        self._running = True
        engines.append(self._engine)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineSupervisor, "_start_engine", start)
    monkeypatch.setattr(EngineSupervisor, "start", start)
    monkeypatch.setattr(Frontend, "max_prompt_tokens", 1000)
    rounds = 0

    async def asked(frontend: Frontend, rid: str, token: int) -> list[int]:
        request = Generate(rid=rid, prompt=((token,),))
        return [token async for chunk in frontend.generate(request) for token in chunk.ids]

    async def run() -> list[Any]:
        nonlocal rounds
        frontend = Frontend(EngineConfig(replicas=replicas, device="cpu", max_running=32))
        await frontend.start()
        prompts = [666] * poisons + list(range(1, 13))
        tasks = [asyncio.ensure_future(asked(frontend, f"r{at}", one)) for at, one in enumerate(prompts)]
        late: list[asyncio.Task[list[int]]] = []
        while not all(task.done() for task in tasks + late):
            rounds += 1
            assert rounds < 100_000, "something waits for ever"
            for engine in engines:
                engine.step()
            if rounds % 50 == 0 and len(late) < 6:  # others come in meanwhile
                late.append(asyncio.ensure_future(asked(frontend, f"late{rounds}", 7)))
            await asyncio.sleep(0)
        assert not frontend._requests.quarantine.busy
        await frontend.aclose()
        return await asyncio.gather(*tasks, *late, return_exceptions=True)

    found = asyncio.run(run())
    assert [type(one) for one in found[:poisons]] == [WorkerDied] * poisons
    assert found[poisons:] == [list(range(LENGTH))] * len(found[poisons:])
    assert len(engines) > replicas + RESTART_LIMIT - 1, (
        "engine cores died, and deaths with a known cause do not count"
    )
