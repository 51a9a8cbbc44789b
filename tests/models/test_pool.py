"""The pool of models with frontends that start nothing: loaded, unloaded, waited for, refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ramify.errors import EngineClosed, EngineError, InvalidRequest, NotFound, Overloaded
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.models.memory import Need
from ramify.runtime.models.names import by_name, in_folder, keep_alive_s, named
from ramify.runtime.models.pool import ModelPool
from ramify.runtime.models.status import ModelDoesNotFit
from tests.fleet.fakes import model_info


class Starts:
    """Frontends that start nothing. `starting` and `closed` have the models in order."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.closed: list[str] = []
        self.failing: set[str] = set()
        self.held: asyncio.Event | None = None
        """If set, starts wait for it."""
        self.made: dict[str, Any] = {}

    def make(self, config: EngineConfig, workers: Any) -> Frontend:
        self.made[config.model] = frontend = _Started(self, config)
        return cast(Frontend, frontend)


class _Started:
    def __init__(self, starts: Starts, config: EngineConfig) -> None:
        self.starts, self.config = starts, config
        self.info = model_info(name=config.model, fingerprint=f"print of {config.model}")
        self.pids: dict[str, int] = {}
        self.gave_up = False
        self.loras = type("Loras", (), {"loaded": dict(config.loras)})

    async def start(self) -> None:
        if self.starts.held is not None:
            await self.starts.held.wait()
        if self.config.model in self.starts.failing:
            raise EngineError("no start")
        self.starts.started.append(self.config.model)

    async def drain(self, seconds: float) -> None: ...

    async def aclose(self) -> None:
        self.starts.closed.append(self.config.model)


def pool_of(starts: Starts, sizes: dict[str, int], memory: int = 100, **options: Any) -> ModelPool:
    """A pool of models with these needs in bytes, in `memory` bytes."""
    return ModelPool(
        options.pop("config", EngineConfig()),
        {name: name for name in sizes},
        make=starts.make,
        free=lambda needed, _: memory - needed,
        need=lambda config, _: Need(sizes[config.model], 0, 0),
        **options,
    )


def running(test: Callable[[Starts], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def limited() -> None:
            async with asyncio.timeout(20):
                await test(Starts())

        asyncio.run(limited())

    run.__name__ = test.__name__
    return run


def states(pool: ModelPool) -> dict[str, str]:
    return {one.name: one.state for one in pool.statuses()}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@running
async def test_a_model_is_loaded_at_its_first_use_and_by_its_name(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40, "b": 40})
    assert states(pool) == {"a": "unloaded", "b": "unloaded"}
    async with pool.use("b") as frontend:
        assert frontend.info.name == "b"
        assert states(pool) == {"a": "unloaded", "b": "ready"}
    async with pool.use() as frontend:
        assert frontend.info.name == "a"
    async with pool.use("b"), pool.use("a"):
        pass
    assert starts.started == ["b", "a"]
    await pool.aclose()
    assert sorted(starts.closed) == ["a", "b"]


@running
async def test_requests_share_one_load(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40})
    starts.held = asyncio.Event()
    loads = [asyncio.create_task(pool.load("a")) for _ in range(5)]
    await until(lambda: pool.status("a").waiting == 5)
    loads[0].cancel()
    starts.held.set()
    await asyncio.gather(*loads[1:])
    assert starts.started == ["a"]
    assert pool.status("a").users == 0
    assert loads[0].cancelled()


@running
async def test_the_least_recently_used_idle_model_makes_room(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40, "b": 40, "c": 40})
    for name in ("a", "b", "a"):
        await pool.load(name)
    await pool.load("c")
    assert states(pool) == {"a": "ready", "b": "unloaded", "c": "ready"}
    async with pool.use("a"):
        await pool.load("b")
        assert states(pool) == {"a": "ready", "b": "ready", "c": "unloaded"}


@running
async def test_a_pinned_model_stays_and_a_model_without_room_is_refused_with_the_numbers(
    starts: Starts,
) -> None:
    gib = 2**30
    pool = pool_of(starts, {"a": 4 * gib, "b": 3 * gib, "c": 7 * gib}, 9 * gib, pinned=["a"], keep_alive_s=0)
    await pool.start()
    assert states(pool) == {"a": "ready", "b": "unloaded", "c": "unloaded"}
    async with pool.use("b"):
        with pytest.raises(ModelDoesNotFit) as caught:
            await pool.load("c")
        assert states(pool)["b"] == "ready"
    assert caught.value.status == 503
    assert "c needs 7.00 GiB" in caught.value.message
    assert "2.00 GiB are free, and unloading would free 3.00 GiB" in caught.value.message
    assert "Held by" not in caught.value.message  # other models, which the client may not know
    await pool.unload("a")  # by name also a pinned one
    await pool.load("c")
    assert sorted(starts.closed[:2]) == ["a", "b"]


@running
async def test_a_busy_model_is_never_unloaded_and_later_requests_of_it_wait_behind(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 60, "b": 60})
    first = pool.use("a")
    await first.__aenter__()
    load = asyncio.create_task(pool.load("b"))
    await until(lambda: pool.status("b").state == "loading")
    later = asyncio.create_task(pool.load("a"))
    await until(lambda: pool.status("a").waiting == 1)
    assert starts.started == ["a"]
    assert starts.closed == []
    await first.__aexit__(None, None, None)
    await asyncio.gather(load, later)
    assert starts.started == ["a", "b", "a"]
    assert starts.closed == ["a", "b"]


@running
async def test_a_load_that_nobody_waits_for_lets_the_busy_model_go_on(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 60, "b": 60})
    async with pool.use("a"):
        load = asyncio.create_task(pool.load("b"))
        await until(lambda: pool.status("b").state == "loading")
        later = asyncio.create_task(pool.load("a"))
        await until(lambda: pool.status("a").waiting == 1)
        load.cancel()
        await later
    assert starts.started == ["a"]
    await until(lambda: pool.status("b").state == "unloaded")


@running
async def test_keep_alive_unloads_an_idle_model_and_a_request_changes_it(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40, "b": 40}, keep_alive_s=0.0)
    async with pool.use("a"), pool.use("b", keep_alive_s=None):
        assert states(pool) == {"a": "ready", "b": "ready"}
    await until(lambda: states(pool) == {"a": "unloaded", "b": "ready"})
    await pool.load("a", keep_alive_s=300.0)
    assert 299 < cast(float, pool.status("a").expires_in_s) <= 300
    async with pool.use("b", keep_alive_s=0.0):
        pass
    await until(lambda: states(pool)["b"] == "unloaded")
    assert states(pool)["a"] == "ready"


@running
async def test_the_keep_alive_of_a_request_is_for_this_request(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40}, keep_alive_s=300.0)
    for others in (300.0, None):
        async with pool.use("a"), pool.use("a", keep_alive_s=0.0):
            pass  # the longest of requests that overlap counts
        assert 299 < cast(float, pool.status("a").expires_in_s) <= 300
        async with pool.use("a", keep_alive_s=others):
            pass
        left = pool.status("a").expires_in_s
        assert left is None if others is None else 299 < cast(float, left) <= 300
    async with pool.use("a", keep_alive_s=0.0):
        pass
    await until(lambda: states(pool)["a"] == "unloaded")
    await pool.load("a")
    assert 299 < cast(float, pool.status("a").expires_in_s) <= 300


@running
async def test_unload_waits_for_the_users_and_later_ones_load_again(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40})
    async with pool.use("a"):
        unload = asyncio.create_task(pool.unload("a"))
        await asyncio.sleep(0)
        later = asyncio.create_task(pool.load("a"))
        await until(lambda: pool.status("a").waiting == 1)
        assert starts.closed == []
    await asyncio.gather(unload, later)
    assert starts.started == ["a", "a"]
    async with pool.use("a"):
        unloads = [asyncio.create_task(pool.unload("a")) for _ in range(2)]
        await asyncio.sleep(0)
        later = asyncio.create_task(pool.load("a"))
        await until(lambda: pool.status("a").waiting == 1)
    await asyncio.gather(*unloads, later)
    assert starts.started == ["a", "a", "a"]  # two unloads at once are one
    assert (await pool.unload("a")).state == "unloaded"
    assert (await pool.unload("a")).state == "unloaded"


@running
async def test_a_failed_start_is_told_to_all_and_tried_again(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40, "b": 90})
    starts.failing.add("a")
    found = await asyncio.gather(pool.load("a"), pool.load("a"), return_exceptions=True)
    assert [str(one) for one in found] == ["no start", "no start"]
    assert pool.status("a").state == "failed"
    assert pool.status("a").error == "no start"
    await pool.load("b")  # the failed one holds no memory
    starts.failing.clear()
    await pool.load("a")
    assert pool.status("a").error is None


@running
async def test_a_model_whose_engine_has_given_up_is_started_anew(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40, "b": 40})
    async with pool.use("a"), pool.use("b"):
        starts.made["a"].gave_up = True
        load = asyncio.create_task(pool.load("a"))
        await until(lambda: pool.status("a").waiting == 1)
        assert starts.closed == []
    await load
    assert starts.started == ["a", "b", "a"]
    assert starts.closed == ["a"]


@running
async def test_a_draining_pool_refuses_and_closes(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 60, "b": 60}, keep_alive_s=0.0)
    async with pool.use("a"):
        load = asyncio.create_task(pool.load("b"))
        await until(lambda: pool.status("b").state == "loading")
        await pool.drain(1.0)
        with pytest.raises(EngineClosed):
            await load
        with pytest.raises(EngineClosed):
            await pool.load("a")
    await pool.aclose()
    assert starts.started == starts.closed == ["a"]


@running
async def test_the_queue_of_a_model_is_bounded(starts: Starts) -> None:
    pool = pool_of(starts, {"a": 40}, config=EngineConfig(max_waiting=1))
    starts.held = asyncio.Event()
    load = asyncio.create_task(pool.load("a"))
    await until(lambda: pool.status("a").waiting == 1)
    with pytest.raises(Overloaded):
        await pool.load("a")
    starts.held.set()
    await load


@running
async def test_names_aliases_and_adapters(starts: Starts) -> None:
    loras = {"pirate": "p", "b:poet": "q"}
    config = ServerConfig(served_model_name=("a", "gpt-4"), loras=loras, models=["b"])
    pool = pool_of(starts, {"a": 4, "b": 4}, config=config)
    found = {
        name: pool.resolve(name)
        for name in (None, "", "default", "gpt-4", "a:pirate", "pirate", "b:latest", "b", "poet", "b:poet")
    }
    assert [*found.values()] == ["a"] * 6 + ["b"] * 4
    assert pool.resolve("default:pirate") == "a"
    with pytest.raises(NotFound):
        pool.resolve(":" * 5000)
    with pytest.raises(NotFound, match="There is no model 'c' here"):
        pool.resolve("c")
    with pytest.raises(NotFound, match="There is no model 'c' here"):
        pool_of(starts, {"a": 4}, config=ServerConfig(loras={"c:poet": "q"}, models=["b"]))


def test_models_in_a_folder(tmp_path: Path) -> None:
    for name in ("b.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    assert [*in_folder(tmp_path)] == ["b", "big", "hf"]

    starts = Starts()
    pool = ModelPool(EngineConfig(), {}, folder=tmp_path, make=starts.make)
    with pytest.raises(NotFound):
        asyncio.run(pool.find("late"))
    (tmp_path / "late.gguf").touch()
    assert asyncio.run(pool.find("late")) == "late"
    (tmp_path / "later.gguf").touch()
    asyncio.run(pool.look())
    assert pool.names == ("b", "big", "hf", "late", "later")
    tmp_path.rename(tmp_path.with_name("moved"))
    asyncio.run(pool.look())
    assert pool.names == ("b", "big", "hf", "late", "later")
    tmp_path.with_name("moved").rename(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(NotFound, match="holds no model"):
        ModelPool(EngineConfig(), {}, folder=tmp_path / "none")
    with pytest.raises(NotFound, match="No such file"):
        ModelPool(EngineConfig(), {}, folder=tmp_path / "missing")


@running
async def test_a_folder_that_does_not_answer_holds_up_only_who_asks_for_an_unknown_model(
    starts: Starts,
) -> None:
    """As one on a file server that is away."""
    answers, asked = threading.Event(), threading.Event()

    class Slow(type(Path())):  # type: ignore[misc]
        def iterdir(self) -> Iterator[Path]:
            asked.set()
            assert not waits or answers.wait(20)
            return iter(())

    waits = False
    pool = pool_of(starts, {"a": 40}, folder=Slow("models"))
    waits = True
    unknown = asyncio.create_task(pool.find("late"))
    await asyncio.to_thread(asked.wait, 20)
    await pool.load("a")
    assert states(pool) == {"a": "ready"}
    assert not unknown.done()
    answers.set()
    with pytest.raises(NotFound):
        await unknown


def test_a_model_named_before_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    pool = ModelPool(EngineConfig(), {"a": "x"}, folder=tmp_path)
    assert [one.model for one in pool.statuses()] == ["x"]


def test_names_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "odd=name.gguf").touch()
    assert named("small=org/repo:Q4_K_M") == ("small", "org/repo:Q4_K_M")
    assert named(str(tmp_path / "odd=name.gguf")) == ("odd=name", str(tmp_path / "odd=name.gguf"))
    assert named("org/repo") == ("org/repo", "org/repo")
    with pytest.raises(ValueError, match="NAME=MODEL"):
        named("=x")
    assert by_name(["a=x", "org/b"]) == {"a": "x", "org/b": "org/b"}
    with pytest.raises(ValueError, match="two models of the name 'a', x and y"):
        by_name(["a=x", "a=y"])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), ("0", 0.0), ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), (90, 90.0), ("1.5h", 5400.0)],
)
def test_durations(value: object, seconds: float) -> None:
    assert keep_alive_s(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [-1, "-1", "-5m"])
def test_a_negative_duration_is_for_ever(value: object) -> None:
    assert keep_alive_s(value) is None


@pytest.mark.parametrize("value", ["soon", "5 m", "", None, True, "5mx", [5], "nan"])
def test_wrong_durations(value: object) -> None:
    with pytest.raises(InvalidRequest, match="keep_alive is"):
        keep_alive_s(value)
