"""An application of Ray Serve with two replicas of the tiny model: deaths, forks, scaling down."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import ramify as rm
from ramify.ray.installed import require
from tests.ray.waiting import wait_until
from tests.runtime.tiny import write_model, write_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAME = "ramify"
PREFIX = 400
PROMPTS = [letter * 40 for letter in "abcd"]
MAX_TOKENS = 900
"""Tokens of each stream: at 1 ms a token, a stream lasts until the last one has begun."""


class App:
    """The deployed application."""

    def __init__(self, serve: Any, folder: Path) -> None:
        self.serve = serve
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # One for all streams: to make a client takes 0.1 s, in which others' streams would go on.
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.options = {
            "model": str(folder),
            "dtype": "float32",
            "num_pages": "256",
            "cpus_per_replica": "0.5",
            "threads": "1",
            "deterministic": "true",
            # An answer given before is drafted from the tree: its stream would last 0.2 s instead of 1.5 s.
            "speculation": "false",
        }
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        from ramify.ray.app import build

        app = build({**self.options, "replicas": "2"})
        serve.run(app, name=NAME, external_scaler_enabled=True)

    def scale(self, ray: Any, replicas: int) -> None:
        """Set the number of replicas, as Ray Serve's autoscaler does."""
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        model = require("ray.serve._private.common").DeploymentID(name="Model", app_name=NAME)
        ray.get(controller.update_deployment_replicas.remote(model, replicas))

    @property
    def states(self) -> dict[str, int]:
        """Number of the model's replicas in each state."""
        app = self.serve.status().applications[NAME]
        return {
            str(getattr(key, "value", key)): n for key, n in app.deployments["Model"].replica_states.items()
        }

    def ask(self, prompt: str, on_text: Callable[[], None] = lambda: None) -> str:
        """The streamed output of MAX_TOKENS tokens."""
        with self.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            stream=True,
            temperature=1.0,
            seed=7,
            extra_body={"ignore_eos": True},
        ) as stream:
            parts = []
            for chunk in stream:
                parts += [choice.delta.content or "" for choice in chunk.choices]
                on_text()
        return "".join(parts)


@pytest.fixture(scope="module")
def app(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    serve = require("ray.serve")
    try:
        folder = tmp_path_factory.mktemp("models") / "tiny"
        folder.mkdir()
        write_model(folder, context_length=1024)
        write_tokenizer(folder)
        yield App(serve, folder)
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def whole(app: App) -> list[str]:
    """Answer to each prompt without any disturbance."""
    return [app.ask(prompt) for prompt in PROMPTS]


# --- the processes of this machine -----------------------------------------------------------------


def processes() -> dict[int, tuple[int, str]]:
    """Process id → parent's id and command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found[int(folder.name)] = (int(stat[1]), command)
    return found


class Actor:
    """The actor of a replica."""

    def __init__(self, ray: Any, name: str) -> None:
        self.name = name
        self._ray = ray
        self._actor = ray.get_actor(name, namespace="serve")
        self.pid: int = ray.get(self._actor.is_allocated.remote())[0]
        self.scheduler = scheduler_of(self.pid)

    @property
    def requests(self) -> int:
        """Number of its requests; a request's call lasts as long as the request."""
        sessions = 1
        return int(self._ray.get(self._actor.get_num_ongoing_requests.remote())) - sessions


def names(ray: Any) -> set[str]:
    """Live actors of the replicas."""
    found = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}
    return {name for name in found if f"::{NAME}#Model#" in name}


def actors(ray: Any) -> list[Actor]:
    return [Actor(ray, name) for name in names(ray)]


def scheduler_of(actor: int) -> int:
    (pid,) = [
        pid
        for pid, (parent, command) in processes().items()
        if parent == actor and "scheduler.process" in command
    ]
    return pid


@contextmanager
def streams(app: App, replicas: list[Actor]) -> Iterator[list[str]]:
    """One stream for each prompt. Inside the block the schedulers are stopped, after the first text of
    each stream. After the block the streams have ended, and the list holds the answers."""
    schedulers = [replica.scheduler for replica in replicas]
    answers = [""] * len(PROMPTS)
    begun = [threading.Event() for _ in PROMPTS]

    def ask(index: int) -> None:
        try:
            answers[index] = app.ask(PROMPTS[index], begun[index].set)
        finally:
            begun[index].set()

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for one in begun:
        assert one.wait(60)
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert not any(answers), "a stream has ended before its scheduler stood still"
        yield answers
    finally:
        for pid in schedulers:
            if pid in processes():
                os.kill(pid, signal.SIGCONT)
        for thread in threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def equal(answers: list[str], whole: list[str]) -> bool:
    """Whether all answers are equal; prints the first difference of each."""
    for one, other in zip(answers, whole, strict=True):
        same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        print(f"{len(one)} and {len(other)} characters; the first that differs: {same}")
    return answers == whole


# --- the tests, in this order ------------------------------------------------------------------------


def test_a_fork_computes_its_prefix_once(app: App) -> None:
    @rm.function
    def eight(s: rm.State) -> None:
        s += "x" * PREFIX
        views = s.fork(8)
        for index, view in enumerate(views):
            view += f" {index}"
            view += rm.gen("said", max_tokens=4, temperature=0.0, ignore_eos=True)
        views.join()

    state = eight.run(backend=rm.RuntimeEndpoint(app.url))
    assert len(state["said"]) == 8
    computed = state.usage.prompt_tokens - state.usage.cached_tokens
    assert PREFIX <= computed < PREFIX + 8 * 8, "on two replicas it would be twice the prefix"


def test_a_killed_actor_loses_nothing(app: App, whole: list[str], ray_cluster: Any) -> None:
    replicas = actors(ray_cluster)
    assert len(replicas) == 2
    with streams(app, replicas) as answers:
        victim = max(replicas, key=lambda replica: replica.requests)
        assert victim.requests > 0
        os.kill(victim.pid, signal.SIGKILL)
    assert equal(answers, whole)
    # Ray Serve, which still counts the dead one for a moment, puts another in its place.
    kept = {replica.name for replica in replicas} - {victim.name}
    wait_until(lambda: names(ray_cluster) > kept and victim.name not in names(ray_cluster), 120)
    wait_until(lambda: app.states == {"RUNNING": 2}, 120)
    assert [app.ask(prompt) for prompt in PROMPTS] == whole


def test_scaling_down_loses_nothing(app: App, whole: list[str], ray_cluster: Any) -> None:
    replicas = actors(ray_cluster)
    for _ in range(5):  # as often as placement, which goes by measured times, leaves one without a stream
        with streams(app, replicas) as answers:
            both = all(replica.requests > 0 for replica in replicas)
            if both:
                app.scale(ray_cluster, 1)
                wait_until(lambda: app.states.get("STOPPING") == 1, 60)
        assert equal(answers, whole)
        if both:
            break
    assert both
    wait_until(lambda: app.states == {"RUNNING": 1}, 60)
    (left,) = actors(ray_cluster)
    assert left.pid in {replica.pid for replica in replicas}, "the other one"
    assert httpx.get(f"{app.url}/health", timeout=30).status_code == 200
