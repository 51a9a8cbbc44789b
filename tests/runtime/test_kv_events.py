"""KV events: a subscriber that knows only vLLM's format learns the contents of the prefix trees."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ramify.engine_messages import PageRun, TreeChange
from ramify.errors import EngineError
from ramify.radix.cache import PrefixCache
from ramify.radix.tree_log import TreeLog
from ramify.runtime.config import EngineConfig, ServerConfig
from ramify.runtime.engine.engine import Engine
from ramify.runtime.frontend.kv_events import BlockStored, HeldBlocks, KVEvents
from ramify.runtime.frontend.loras import LoadedLora
from ramify.runtime.lora_names import tree_scope
from ramify.runtime.processes.ipc import Publisher
from ramify.runtime.scheduler.control import KVEventPublisher
from tests.runtime.kv_subscriber import Prefix, Subscriber

PAGE = 4
ANY = "tcp://127.0.0.1:0"
SCOPES = {
    "": (None, ()),
    tree_scope("tenant", None): (None, ("tenant",)),
    tree_scope("", "f00d"): ("sql", ()),
    tree_scope("a:b", "f00d"): ("sql", ("a:b",)),
    tree_scope("", "beef"): ("beef", ()),
}
"""A tree's scope → (adapter, extra keys) as a router sees them. The adapter "beef" is no longer loaded."""


class Replica:
    """A prefix tree with random traffic, and the publisher of its changes."""

    def __init__(self, told: Any) -> None:
        self.told = told
        self.held: list[TreeChange] = []
        log = TreeLog(PAGE, tokens=True)
        self.cache = PrefixCache(60, PAGE, log=log)
        self.publisher = KVEventPublisher(self.cache.tree, log, self.held.append)

    def request(self, text: np.ndarray, scope: str) -> None:
        lock = self.cache.acquire(self.cache.match(text, scope))
        new = self.cache.allocate(-(-len(text) // PAGE) - lock.length // PAGE)
        if new is not None:
            self.cache.commit(lock, text, lock.pages[: lock.length // PAGE] + new)
            self.cache.free(new[-1:] if lock.private_from < len(lock.pages) else [])
        self.cache.release(lock)

    def tell(self) -> None:
        self.publisher.publish_changes()
        while self.held:
            self.told(self.held.pop(0))

    def prefixes(self) -> set[Prefix]:
        """Every prefix of whole pages in the tree, by its nodes."""
        found: set[Prefix] = set()
        stack: list[Any] = [(root, ()) for root in self.cache.tree.roots.values()]
        while stack:
            node, before = stack.pop()
            tokens = before + tuple(np.frombuffer(node.tokens, np.int32).tolist())
            root = node
            while root.parent is not None:
                root = root.parent
            ends = range(PAGE, len(tokens) + 1, PAGE)
            found.update((*SCOPES[root.scope], tokens[:end]) for end in ends)
            stack += [(child, tokens) for child in node.children.values()]
        return found


class Published:
    """A frontend's publisher and a subscriber."""

    def __init__(self, **config: Any) -> None:
        loras = {"sql": LoadedLora(path="", revision="f00d")}
        self.events = KVEvents(EngineConfig(kv_events=ANY, kv_events_replay=ANY, **config), lambda: loras)

        async def begin() -> None:
            self.events.start_publishing("m")

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        self.publisher = self.events.publisher
        # The test answers requests for replays itself, in its own thread.
        loop.remove_reader(int(self.publisher._sockets[1].fileno()))
        self.publisher._loop = None
        loop.close()
        assert self.publisher.replay_address is not None
        self.subscriber = Subscriber(self.publisher.address, self.publisher.replay_address)

    def catch_up(self) -> None:
        self.subscriber.ask()
        while not self.subscriber.answered():
            self.publisher.answer()
        self.subscriber.hear()

    def close(self) -> None:
        self.subscriber.close()
        self.events.close()


@pytest.fixture
def published() -> Iterator[Published]:
    one = Published()
    yield one
    one.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_has_what_the_trees_hold(published: Published, seed: int) -> None:
    """Two replicas with commits, evictions, flushes and a death. Some live messages are lost."""
    draw = random.Random(seed)
    tells = published.events.publish_change
    replicas = {name: Replica(lambda change, name=name: tells(name, change)) for name in "ab"}
    texts = [np.array([draw.randrange(3) for _ in range(90)], np.int32) for _ in range(8)]
    losing = False
    for step in range(150):
        name, scope = draw.choice("ab"), draw.choice(list(SCOPES))
        replicas[name].request(draw.choice(texts)[: draw.randint(1, 90)], scope)
        if draw.random() < 0.03:
            replicas[name].cache.flush()
        if draw.random() < 0.02:
            tells(name, None)
            replicas[name] = Replica(lambda change, name=name: tells(name, change))
        for replica in replicas.values():
            if draw.random() < 0.5:
                replica.tell()
        losing = draw.random() < (0.9 if losing else 0.1)
        published.subscriber.receive(lose=losing)
        if step % 10 == 9:
            for replica in replicas.values():
                replica.tell()
            published.catch_up()
            held = set().union(*(replica.prefixes() for replica in replicas.values()))
            blocks = published.subscriber.blocks
            assert set(blocks.values()) == held
            assert len(blocks) == len(held), "two scopes have no hash in common"
    assert published.subscriber.cleared >= 1


def test_blocks_that_are_not_held_cannot_be_removed() -> None:
    blocks = HeldBlocks(dict)
    run = PageRun(scope="", before=None, digests=(7,), tokens=bytes(16))
    assert not blocks.events_of("a", TreeChange(epoch=1, number=4, removed=(7,)))
    (stored,) = blocks.events_of("a", TreeChange(epoch=1, number=5, added=(7,), runs=(run,)))
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [7]


def test_a_whole_is_told_as_the_difference(published: Published) -> None:
    replica = Replica(lambda change: None)
    replica.request(np.arange(20, dtype=np.int32), "")
    replica.tell()  # lost
    replica.told = lambda change: published.events.publish_change("a", change)
    replica.request(np.arange(40, dtype=np.int32), "")
    replica.publisher.publish_whole()
    whole = replica.held[-1]
    assert whole.whole
    published.events.publish_change("a", whole)
    published.catch_up()
    assert set(published.subscriber.blocks.values()) == replica.prefixes()
    replica.cache.flush()
    replica.request(np.arange(100, 112, dtype=np.int32), "")
    replica.publisher.publish_whole()
    published.events.publish_change("a", replica.held[-1])
    published.catch_up()
    assert set(published.subscriber.blocks.values()) == replica.prefixes()


def test_live_messages_gaps_and_the_end_of_what_is_kept(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(lambda change: published.events.publish_change("a", change))

    def send(start: int) -> None:
        replica.request(np.arange(start, start + 8, dtype=np.int32), "")
        replica.tell()

    published.subscriber.joined(lambda: published.publisher.publish(b"\x93\xcb" + bytes(8) + b"\x90\x00"))
    published.catch_up()
    send(0)
    assert published.subscriber._live.poll(20_000)
    published.subscriber.receive()
    assert len(published.subscriber.blocks) == 2, "without a replay"
    monkeypatch.setattr(Publisher, "KEPT", 2)
    for start in (10, 20, 30):
        send(start)
    seen = published.subscriber.last
    published.catch_up()
    assert published.subscriber.gaps == 2
    assert published.subscriber.last == seen, "the first of three is not kept any more, and that shows"


def test_the_topic_names_the_server_and_the_model(published: Published) -> None:
    published.catch_up()
    (topic,) = published.subscriber.topics
    kv, host, model = topic.split("@")
    assert (kv, model) == ("kv", "m")
    assert host == os.uname().nodename
    with contextlib.closing(Published(kv_events_topic="mine")) as other:
        other.catch_up()
        assert other.subscriber.topics == {"mine"}


def test_requests_for_replays_that_are_none_are_ignored(published: Published) -> None:
    for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b""]):
        published.subscriber._replay.send_multipart(frames)
    published.catch_up()
    assert published.subscriber.last == 0


def test_a_subscriber_that_asks_again_at_once_leaves_turns_of_the_loop_to_others(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber, turns = published.publisher, published.subscriber, 0
    answer, answers = publisher._replay, []

    def answer_and_ask_again(asker: bytes, *frames: bytes) -> None:
        answer(asker, *frames)
        if frames[1] == publisher.END:
            answers.append(turns)
            if len(answers) < 20:
                subscriber.ask()
                assert publisher._sockets[1].poll(20_000)

    monkeypatch.setattr(publisher, "_replay", answer_and_ask_again)

    async def others() -> None:
        nonlocal turns
        publisher.attach(asyncio.get_running_loop())
        subscriber.ask()
        async with asyncio.timeout(60):
            while len(answers) < 20:
                turns += 1
                await asyncio.sleep(0)
        asyncio.get_running_loop().remove_reader(int(publisher._sockets[1].fileno()))
        publisher._loop = None

    asyncio.run(others())
    assert len(set(answers)) >= 10, "a turn has two answers at most: the descriptor's and a scheduled one"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_events": "5557"}, "must be tcp://HOST:PORT"),
        ({"kv_events": "tcp://127.0.0.1:99999"}, "must be tcp://HOST:PORT"),
        ({"kv_events": "ipc://x"}, "must be tcp://HOST:PORT"),
        ({"kv_events": "tcp://*:5557"}, "other machines can reach"),
        ({"kv_events": "tcp://10.0.0.1:5557", "api_key": "k"}, "--insecure"),
        ({"kv_events": ANY, "kv_events_replay": "tcp://[::]:5558"}, "kv_events_replay is 'tcp://[::]:5558'"),
        ({"kv_events_replay": ANY}, "kv_events is not"),
        ({"kv_events_topic": "x"}, "kv_events is not"),
        ({"kv_events": ANY, "prefix_cache": "naive"}, "naive"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        ServerConfig(**options)
    assert says in str(raised.value)


def test_other_machines_by_name() -> None:
    ServerConfig(kv_events="tcp://*:5557", kv_events_replay="tcp://[::]:5558", insecure=True, api_key="k")
    EngineConfig(kv_events="tcp://[::1]:5557")
    with pytest.raises(ValueError, match="--insecure"):
        EngineConfig(kv_events="tcp://*:5557")


def test_a_port_that_is_taken_is_named(published: Published) -> None:
    with pytest.raises(EngineError, match=r"Cannot listen on tcp://127\.0\.0\.1:\d+"):
        KVEvents(EngineConfig(kv_events=published.publisher.address), dict)


def test_without_events_the_log_keeps_no_tokens() -> None:
    log = TreeLog(PAGE)
    cache = PrefixCache(8, PAGE, log=log)
    lock = cache.acquire(cache.match([]))
    cache.commit(lock, range(8), cache.allocate(2) or [])
    sent: list[TreeChange] = []
    KVEventPublisher(cache.tree, log, sent.append).publish_changes()
    assert len(sent[0].added) == 2
    assert sent[0].runs == ()
    (page, _) = log.whole(cache.tree.nodes())
    assert page.tokens == b""


def until(engine: Engine, subscriber: Subscriber, told: Callable[[], bool]) -> None:
    """Wait for `told()`. An answer may come before the events of its last step."""
    deadline = time.monotonic() + 20
    while not told():
        assert time.monotonic() < deadline, where_it_stopped(engine, subscriber)
        time.sleep(0.01)  # the engine may have no other core
        subscriber.catch_up()


def where_it_stopped(engine: Engine, subscriber: Subscriber) -> str:
    """A text that shows whether events stopped before the publisher or before the subscriber."""
    frontend = engine._frontend
    events = frontend._kv_events
    assert events is not None
    held = sorted(subscriber.blocks.values(), key=lambda block: len(block[2]))
    return (
        f"the publisher has {events.publisher._number} messages, the subscriber"
        f" {subscriber.last + 1}; the engine core was heard"
        f" {frontend.heartbeat_age_s:.1f} s ago; blocks: {held}"
    )


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_and_the_death_of_its_engine(tiny_folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 64, "threads": 1, "page_size": PAGE}
    prompt = list(range(3, 30))
    with (
        contextlib.ExitStack() as stack,
        Engine(str(tiny_folder), kv_events=ANY, kv_events_replay=ANY, **options) as engine,
    ):
        events = engine._frontend._kv_events
        assert events is not None
        publisher = events.publisher
        subscriber = Subscriber(publisher.address, publisher.replay_address or "")
        stack.callback(subscriber.close)
        told = (27 + 8 - 1) // PAGE
        assert engine.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True)
        until(engine, subscriber, lambda: len(subscriber.blocks) == told)
        longest = max((tokens for _, _, tokens in subscriber.blocks.values()), key=len)
        assert list(longest[:27]) == prompt
        assert len(longest) == told * PAGE
        assert subscriber.cleared == 1
        os.kill(engine._frontend.pids["scheduler"], signal.SIGKILL)
        engine.complete(prompt[:9], max_tokens=1, temperature=0)
        until(engine, subscriber, lambda: len(subscriber.blocks) == 2)
        assert subscriber.cleared == 2
        assert {len(tokens) for _, _, tokens in subscriber.blocks.values()} == {4, 8}
