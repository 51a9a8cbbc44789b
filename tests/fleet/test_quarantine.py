"""A request that kills every engine core on which it runs fails. The requests beside it lose nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ramify.engine_messages import Abort, StepText
from ramify.errors import WorkerDied
from ramify.messages import Finish, Generate, TextChunk
from tests.fleet.fakes import FakeEngine, Served

LENGTH = 100
"""Number of tokens of each output."""
KILLS_AT = 40


class MortalEngine(FakeEngine):
    """An engine core that outputs one token of each request at a step. The prompt (666,) kills the engine
    core after `KILLS_AT` tokens."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sizes: dict[str, int] = {}
        """Request → number of its output tokens."""
        self.poisoned: set[str] = set()
        self.unexplained = 0
        """Number of deaths for which no request was found to be the cause."""

    def send(self, message: Any) -> None:
        super().send(message)
        if isinstance(message, Generate):
            assert message.rid not in self.sizes, "it was sent twice"
            self.sizes[message.rid] = 0
            if message.prompt == ((666,),):
                self.poisoned.add(message.rid)
        elif isinstance(message, Abort):
            self.sizes.pop(message.rid, None)

    def step(self) -> None:
        if any(self.sizes.get(rid) == KILLS_AT for rid in self.poisoned):
            self.sizes.clear()
            self.unexplained += not self.died(WorkerDied("The scheduler process died."))
            self.came_back()
            return
        chunks = []
        for rid, at in list(self.sizes.items()):
            finish = Finish(reason="length") if at == LENGTH - 1 else None
            chunks.append(TextChunk(rid=rid, ids=(at,), text=chr(at), finish=finish))
            self.sizes[rid] += 1
            if finish is not None:
                del self.sizes[rid]
        self.receive(StepText(chunks=tuple(chunks)))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("poisons", [1, 2])
def test_only_what_kills_fails(replicas: int, poisons: int) -> None:
    served = Served(MortalEngine, replicas=replicas, max_running=32)
    rounds = 0

    async def read(rid: str, token: int) -> list[int]:
        return [token for chunk in await served.ask(rid, (token,)) for token in chunk.ids]

    async def run() -> list[Any]:
        nonlocal rounds
        await served.frontend.start()
        prompts = [666] * poisons + list(range(1, 13))
        tasks = [asyncio.ensure_future(read(f"r{at}", one)) for at, one in enumerate(prompts)]
        late: list[asyncio.Task[list[int]]] = []
        while not all(task.done() for task in tasks + late):
            rounds += 1
            assert rounds < 100_000, "something waits for ever"
            for engine in served.engines:
                engine.step()  # type: ignore[attr-defined]
            if rounds % 50 == 0 and len(late) < 6:  # others come in meanwhile
                late.append(asyncio.ensure_future(read(f"late{rounds}", 7)))
            await asyncio.sleep(0)
        await served.frontend.aclose()
        return await asyncio.gather(*tasks, *late, return_exceptions=True)

    found = asyncio.run(run())
    assert [type(one) for one in found[:poisons]] == [WorkerDied] * poisons
    assert found[poisons:] == [list(range(LENGTH))] * len(found[poisons:])
    engines: list[Any] = served.engines
    assert 0 < sum(engine.unexplained for engine in engines) <= 2 * poisons, "one by one, causes are known"
