"""Cached pages that move between two actors through Ray's object store. The frontend is in this process."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.loop import wait
from ramify.messages import Generate, TextChunk
from ramify.ray import listed
from ramify.ray.fleet import ListedFleet
from ramify.ray.installed import require
from ramify.ray.options import read_options
from ramify.runtime.fleet.placement import Placement
from ramify.runtime.frontend.frontend import Frontend
from ramify.runtime.processes.detokenizer import joined
from ramify.sampling_params import SamplingParams
from tests.ray.waiting import wait_until
from tests.runtime.tiny import write_tiny

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAME = "moves"
TOKENS, WHOLE = 300, 288
"""Tokens of a prompt, and of its whole pages."""
numbers = itertools.count()


class Replicas:
    """Two replicas, a frontend, and the bytes of the KV snapshots that passed between them."""

    def __init__(self, ray: Any, serve: Any, folder: Path) -> None:
        from ramify.ray.app import HandleTransport, replicas

        self._ray, self._serve = ray, serve
        options = {"model": str(folder), "dtype": "float32", "num_pages": "256", "threads": "1"}
        self.deployment = read_options({**options, "cpus_per_replica": "0.5", "replicas": "2"})
        serve.start(proxy_location="Disabled")
        handle = serve.run(
            replicas(self.deployment), name=NAME, route_prefix=None, external_scaler_enabled=True
        )
        self.snapshots: list[Any] = []
        self.damaged = False
        watch = self._watched

        class Watched(HandleTransport):
            async def export(self, *arguments: Any) -> tuple[bytes, Any]:
                answer, snapshot = await super().export(*arguments)
                return answer, watch(snapshot)

        fleet = functools.partial(
            ListedFleet,
            transport=Watched(handle, self.deployment.version),
            listed=listed.here,
            drain_s=30.0,
        )
        self.frontend = Frontend(self.deployment.server, make_fleet=fleet)
        wait(self.frontend.start())
        wait_until(lambda: len(self.up) == 2, 60)

    def _watched(self, snapshot: Any) -> Any:
        (data,) = self._ray.get(snapshot)
        self.snapshots.append(data)
        if self.damaged:
            snapshot = [self._ray.put(data[:-1] + bytes([data[-1] ^ 1]))]
        return snapshot

    @property
    def up(self) -> list[str]:
        return [one.name for one in self.frontend.replicas.statuses() if one.state == "up"]

    def ask(self, letter: str, monkeypatch: pytest.MonkeyPatch, name: str | None = None) -> TextChunk:
        """Usage of a prompt of TOKENS letters that is placed on the replica `name`."""
        place = Placement.place

        def there(self: Placement, work: Any, now: float, only: Any = None, **options: Any) -> str:
            return place(self, work, now, name, **options)

        request = Generate(
            rid=f"r{next(numbers)}",
            prompt=(letter * TOKENS,),
            sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        )

        async def answer() -> TextChunk:
            return joined([chunk async for chunk in self.frontend.generate(request)])

        with monkeypatch.context() as patch:
            if name is not None:
                patch.setattr(Placement, "place", there)
            done = wait(asyncio.wait_for(answer(), 60))
            assert done.usage is not None
            return done

    def told(self, name: str) -> None:
        """Wait until the frontend knows pages of the replica `name`."""
        fleet: Any = self.frontend._fleet
        wait_until(lambda: fleet._placement._index._trees[name].digests, 60)

    def stats(self, name: str) -> Any:
        return wait(self.frontend.control.stats()).replicas[name]

    def scale_to_one(self) -> None:
        controller = self._ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        model = require("ray.serve._private.common").DeploymentID(name="Model", app_name=NAME)
        self._ray.get(controller.update_deployment_replicas.remote(model, 1))
        wait_until(lambda: len(self.frontend.replicas.statuses()) == 1, 60)

    def close(self) -> None:
        wait(self.frontend.aclose())
        self._serve.shutdown()


@pytest.fixture(scope="module")
def replicas(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny")
    made = Replicas(ray_cluster, require("ray.serve"), folder)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def slow_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is taken to need 1 s a token, so that each move pays."""
    monkeypatch.setattr(Placement, "_pace_of", lambda self, replica, now: 1.0)


# --- the tests, in this order ------------------------------------------------------------------------


def test_a_prompt_is_cached_on_the_replica_to_which_it_is_moved(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas.up
    computed = replicas.ask("a", monkeypatch, first)
    replicas.told(first)
    moved = replicas.ask("a", monkeypatch, second)
    assert (computed.usage.cached_tokens, moved.usage.cached_tokens) == (0, WHOLE)
    assert moved.text == computed.text
    assert replicas.stats(first).exported_tokens == replicas.stats(second).imported_tokens == WHOLE
    (snapshot,) = replicas.snapshots
    assert isinstance(snapshot, bytes)
    assert snapshot.startswith(b"RMFYKVIM")


def test_a_damaged_snapshot_is_refused_and_its_request_computes(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas.up
    replicas.damaged = True
    computed = replicas.ask("b", monkeypatch, first)
    replicas.told(first)
    answer = replicas.ask("b", monkeypatch, second)
    replicas.damaged = False
    assert (computed.usage.cached_tokens, answer.usage.cached_tokens) == (0, 0)
    assert answer.text == computed.text
    assert replicas.stats(second).refused_imports == 1
    assert replicas.stats(second).imported_tokens == WHOLE, "as before"


def test_scaling_down_leaves_what_is_cached_to_the_other_replica(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas.up
    places = {"c": first, "d": second}
    computed = {letter: replicas.ask(letter, monkeypatch, name) for letter, name in places.items()}
    replicas.scale_to_one()
    for letter, before in computed.items():
        after = replicas.ask(letter, monkeypatch)
        assert after.text == before.text
        assert after.usage.cached_tokens == TOKENS - 1, "on whichever replica it was"
