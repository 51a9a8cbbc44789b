"""Two replicas of the tiny model: forks stay together, and no request is lost when a process dies."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import ramify as rm
from ramify.constraint import json_schema
from ramify.errors import WorkerDied
from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.runtime.config import ServerConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.fleet.fleet import ReplicaFleet
from ramify.runtime.fleet.kv_connector import KVConnector
from ramify.runtime.fleet.local import LocalFleet
from ramify.runtime.fleet.placement import NoReplica, Placement, Work
from ramify.runtime.frontend.requests import Requests
from ramify.runtime.processes.detokenizer import joined
from ramify.runtime.server.app.app import create_app
from ramify.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

ROLES = ("scheduler", "tokenizer", "detokenizer")
PREFIX = 400


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Engine]:
    with Engine(str(tiny_folder), dtype="float32", num_pages=256, threads=1, replicas=2) as engine:
        yield engine


@pytest.fixture
def equal_paces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make placement depend only on counts, not on the measured speed of this machine."""
    monkeypatch.setattr(Placement, "_pace_of", lambda self, replica, now: 1.0)


def fleet_of(engine: Engine) -> ReplicaFleet:
    fleet = engine._frontend._fleet
    assert isinstance(fleet, ReplicaFleet)
    return fleet


def round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = itertools.count()

    def place(self: Placement, work: Work, now: float, only: str | None = None, **options: Any) -> str:
        if not self._replicas:
            raise NoReplica
        name = list(self._replicas)[next(turns) % len(self._replicas)]
        self._reserve(work, name, 0, now)
        return name

    monkeypatch.setattr(Placement, "place", place)
    monkeypatch.setattr(KVConnector, "fetch", lambda *arguments: False)


@rm.function
def eight(s: rm.State, text: str) -> None:
    s += text
    views = s.fork(8)
    for index, view in enumerate(views):
        view += f" {index}"
        view += rm.gen("said", max_tokens=4, temperature=0.0, ignore_eos=True)
    views.join()


def computed(engine: Engine, text: str) -> int:
    """Fork `text` into 8 branches; returns the number of prompt tokens computed."""
    state = eight.run(text, backend=engine)
    assert len(state["said"]) == 8
    return state.usage.prompt_tokens - state.usage.cached_tokens


def test_a_fork_computes_its_prefix_once_and_by_turns_twice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, equal_paces: None
) -> None:
    engine.flush_cache()
    assert PREFIX <= computed(engine, "a" * PREFIX) < PREFIX + 8 * 8
    round_robin(monkeypatch)
    assert 2 * PREFIX <= computed(engine, "b" * PREFIX) < 2 * PREFIX + 8 * 8


def test_what_is_cached_is_found_again_in_its_scope_alone(engine: Engine, equal_paces: None) -> None:
    def cached(scope: str, text: str) -> int:
        return engine.complete(text * 300, max_tokens=1, scope=scope).usage.cached_tokens

    assert [cached("one", letter) for letter in "xyz"] == [0, 0, 0]
    assert [cached("two", letter) for letter in "xyz"] == [0, 0, 0]
    assert [cached("one", letter) for letter in "zyx"] == [299, 299, 299]


def test_pages_move_to_where_a_request_goes_and_off_a_replica_that_drains(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, equal_paces: None
) -> None:
    engine.flush_cache()
    fleet, place, text = fleet_of(engine), Placement.place, "m" * 300
    whole = 288  # tokens of the whole pages
    assert isinstance(fleet, LocalFleet)

    async def held_by(name: str, *, some: bool = True) -> None:
        while bool(fleet._placement._index._trees[name].digests) != some:
            await asyncio.sleep(0.01)

    def answer(name: str) -> rm.Completion:
        def there(self: Placement, work: Work, now: float, only: str | None = None, **options: Any) -> str:
            return place(self, work, now, name, **options)

        monkeypatch.setattr(Placement, "place", there)
        return engine.complete(text, max_tokens=24, temperature=0.0, ignore_eos=True)

    computed = answer("0")
    wait(asyncio.wait_for(held_by("0"), 60))
    fetched = answer("1")
    assert (computed.usage.cached_tokens, fetched.usage.cached_tokens) == (0, whole)
    assert fetched.text == computed.text
    stats = engine.stats().replicas
    assert (stats["0"].exported_tokens, stats["1"].imported_tokens) == (whole, whole)
    engine.flush_cache()
    wait(asyncio.wait_for(held_by("1", some=False), 60))
    answer("0")
    wait(asyncio.wait_for(held_by("0"), 60))
    wait(fleet.drain("0", 60))
    left = answer("1")
    assert (left.usage.cached_tokens, left.text) == (299, computed.text), "its output has come along"
    assert wait(fleet.add_one()) == "0"


def test_prompts_are_computed_on_one_replica_and_continued_on_the_other(tiny_folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 256, "threads": 1}
    with Engine(str(tiny_folder), replicas=2, prefill_replicas=1, **options) as engine:
        done = [
            engine.complete("q" * 300, max_tokens=24, temperature=temperature, seed=1, ignore_eos=True)
            for temperature in (0.0, 1.0)
        ]
        replicas = engine.stats().replicas
        assert [one.usage.cached_tokens for one in done] == [288, 299]
        assert replicas["0"].output_tokens == 0
        assert replicas["0"].computed_tokens == 288
        assert replicas["1"].imported_tokens == 288
    with Engine(str(tiny_folder), **options) as engine:
        for one, temperature in zip(done, (0.0, 1.0), strict=True):
            alone = engine.complete(
                "q" * 300, max_tokens=24, temperature=temperature, seed=1, ignore_eos=True
            )
            assert one.text == alone.text


def said(engine: Engine, name: str, options: dict[str, Any], chunks: list[TextChunk]) -> Awaitable[None]:
    number = json_schema({"type": "integer", "minimum": 10**60})

    async def collect() -> None:
        request = Generate(
            rid=f"{name}-{id(chunks)}",
            prompt=(f"abc {name}",),
            sampling=SamplingParams(**({"max_tokens": 120, "ignore_eos": True} | options)),
            constraint=number if name.startswith("integer") else None,
        )
        async for chunk in engine.generate(request):
            chunks.append(chunk)

    return collect()


REQUESTS: dict[str, dict[str, Any]] = {
    f"{kind} {index}": {**options, "seed": index}
    for index in range(4)
    for kind, options in (
        ("greedy", {"temperature": 0.0}),
        ("seeded", {"temperature": 1.0, "logprobs": 1}),
        ("stop", {"temperature": 1.0, "stop": ("never", "e")}),
        ("integer", {"temperature": 1.0, "max_tokens": 150, "ignore_eos": False}),
    )
}


def test_a_killed_replica_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    move = Requests.move

    def moving(self: Requests, error: WorkerDied | None, rids: Sequence[str]) -> bool:
        moved.extend(rids)
        return move(self, error, rids)

    monkeypatch.setattr(Requests, "move", moving)
    round_robin(monkeypatch)  # so that each replica has eight

    async def streams(kill: str | None) -> dict[str, list[TextChunk]]:
        chunks: dict[str, list[TextChunk]] = {name: [] for name in REQUESTS}
        tasks = [asyncio.ensure_future(said(engine, name, REQUESTS[name], chunks[name])) for name in REQUESTS]
        if kill is not None:
            while not all(len(chunks[name]) >= 4 for name in REQUESTS if name.startswith("seeded")):
                await asyncio.sleep(0.001)
            os.kill(engine.pids[kill], signal.SIGKILL)
        await asyncio.gather(*tasks)
        return chunks

    unbroken = wait(streams(None))
    for turn, role in enumerate(ROLES):
        broken = wait(asyncio.wait_for(streams(f"{turn % 2}/{role}"), 120))
        for name in REQUESTS:
            one, whole = joined(broken[name]), joined(unbroken[name])
            assert (one.text, one.ids, one.finish) == (whole.text, whole.ids, whole.finish), (role, name)
            assert one.forced == whole.forced, (role, name)
            assert one.usage.completion_tokens == whole.usage.completion_tokens, (role, name)
        while any(one.state != "up" for one in engine.replicas()):
            time.sleep(0.05)
    assert moved, "no request was in flight at any of the deaths"
    assert engine.stats().running == 0


def test_the_http_surface(engine: Engine, tiny_folder: Path) -> None:
    async def visit() -> None:
        app = create_app(engine._frontend, ServerConfig(model=str(tiny_folder), replicas=2))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:30000") as http:
            assert (await http.get("/health")).status_code == 200
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2}
            answer = (await http.post("/v1/chat/completions", json=chat)).json()
            assert len(answer["choices"]) == 2
            streamed = await http.post("/v1/chat/completions", json={**chat, "stream": True})
            assert streamed.text.rstrip().endswith("data: [DONE]")
            assert (await http.post("/tokenize", json={"model": "tiny", "prompt": "abc"})).json()[
                "count"
            ] == 3
            assert (await http.get("/tokenizer_info")).json()["eos_token"] == "<|end|>"
            embedded = await http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]})
            assert len(embedded.json()["data"]) == 2
            metrics = (await http.get("/metrics")).text
            for replica in "01":
                assert f'ramify_scheduler_up{{replica="{replica}"}} 1.0' in metrics
                assert f'ramify_kv_pages{{replica="{replica}",state="in_use"}} 0.0' in metrics
                assert f'ramify_kv_transfer_tokens_total{{direction="import",replica="{replica}"}}' in metrics
                assert f'ramify_kv_transfer_refused_total{{replica="{replica}"}} 0.0' in metrics
            live = (await http.get("/live")).json()
            assert live["stats"]["pages_total"] == 512
            assert set(live["stats"]["replicas"]) == {"0", "1"}
            assert [node["parent"] if isinstance(node, dict) else node[0] for node in live["tree"]]
            assert (await http.post("/flush_cache")).status_code == 200

    wait(visit())
    assert engine.stats().pages_evictable == 0


def test_each_replica_has_its_cores(engine: Engine) -> None:
    cores = sorted(os.sched_getaffinity(0))
    own = [os.sched_getaffinity(engine.pids[f"{replica}/scheduler"]) for replica in "01"]
    if len(cores) > 1:
        assert not own[0] & own[1]
    assert own[0] | own[1] == set(cores)
