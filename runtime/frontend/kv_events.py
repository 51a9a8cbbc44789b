"""KV events in vLLM's format: what the prefix trees hold, for routers that choose between servers.

A block is a page. Its hash is the 64-bit digest of all tokens up to the block's end (`ramify.radix.digest`),
and is equal in every process. Routers use the hash as a name, and compute their own hashes from `token_ids`.
Example with pages of 4, after a prompt of ten tokens and a second prompt that shares its first five:

    BlockStored   block_hashes [h1, h2]   parent None   token_ids [0, …, 7]
    BlockStored   block_hashes [h3]       parent h1     token_ids [4, 91, 92, 93]

With several replicas a block counts as stored while any replica holds it. To a router the server is one
worker, of rank 0, as the server itself chooses among its replicas. Format: vLLM's
`vllm/distributed/kv_events.py`, as of 0.26.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from ramify.engine_messages import PageRun, TreeChange
from ramify.errors import EngineError
from ramify.runtime.config import EngineConfig
from ramify.runtime.frontend.loras import LoadedLora
from ramify.runtime.processes.ipc import Publisher

MEDIUM = "GPU"
"""The storage tier of all blocks, whatever the device. Routers would take "CPU" for an offloaded block."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Newly stored blocks, each of which follows the one before it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the block before the first one; None if the first block begins the sequence."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """One entry for each block: (cache scope,) for a block that begins a sequence, None for others.
    `extra_keys` is None if no entry would have a scope."""
    cache_salt: str | None = None
    """The cache scope, for routers that do not read `extra_keys`. This field is not one of vLLM's."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All blocks have been removed."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    ts: float
    """Time in seconds since 1970."""
    events: list[Event]
    data_parallel_rank: int | None = None


class HeldBlocks:
    """The blocks that any replica holds. `names` returns the loaded LoRA adapters by name."""

    def __init__(self, names: Callable[[], Mapping[str, LoadedLora]]) -> None:
        self._names = names
        self._replicas: dict[str, set[int]] = {}
        self._holders: Counter[int] = Counter()

    def events_of(self, replica: str, change: TreeChange | None) -> list[Event]:
        """The events for subscribers that follow from a replica's `change`; None: the replica's tree is gone.
        Subscribers see all replicas as one."""
        held = self._replicas.setdefault(replica, set())
        if change is None:
            del self._replicas[replica]
            return self._removed(held)
        if not change.whole:
            gone = held.intersection(change.removed)
            held -= gone
            events = self._removed(gone)
        else:
            gone = held.difference(change.added)
            held -= gone
            events = self._removed(gone)
        for run in change.runs:
            events += self._stored(run, held)
        return events

    def _removed(self, digests: Iterable[int]) -> list[Event]:
        gone = []
        for digest in digests:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                gone.append(digest)
        if not gone:
            return []
        return [BlockRemoved(block_hashes=gone, medium=MEDIUM)] if self._holders else [AllBlocksCleared()]

    def _stored(self, run: PageRun, held: set[int]) -> Iterator[Event]:
        """Events for those pages of a run that no replica held before."""
        start = None
        for place, digest in enumerate(run.digests):
            if digest not in held:
                held.add(digest)
                self._holders[digest] += 1
                if self._holders[digest] == 1:
                    start = place if start is None else start
                    continue
            if start is not None:
                yield self._event(run, start, place)
                start = None
        if start is not None:
            yield self._event(run, start, len(run.digests))

    def _event(self, run: PageRun, start: int, end: int) -> BlockStored:
        revision, _, salt = run.scope.partition(":")
        # An unloaded adapter is named by its revision, so that its blocks never pass for the model's own.
        lora = next((name for name, one in self._names().items() if one.revision == revision), revision)
        tokens = memoryview(run.tokens).cast("i")
        page_size = len(tokens) // len(run.digests)
        before = run.before if start == 0 else run.digests[start - 1]
        salted = salt and before is None
        return BlockStored(
            block_hashes=list(run.digests[start:end]),
            parent_block_hash=before,
            token_ids=tokens[start * page_size : end * page_size].tolist(),
            block_size=page_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=lora or None,
            extra_keys=[(salt,), *[None] * (end - start - 1)] if salted else None,
            cache_salt=salt or None,
        )


class KVEvents:
    """The publisher of KV events, for a `config` with `kv_events`. Raises `EngineError` if an address cannot
    be bound."""

    def __init__(self, config: EngineConfig, names: Callable[[], Mapping[str, LoadedLora]]) -> None:
        assert config.kv_events is not None
        try:
            self.publisher = Publisher(config.kv_events, config.kv_events_replay)
        except OSError as error:
            raise EngineError(f"kv_events: {error.strerror}", remedy="Give another port.") from None
        self._topic = config.kv_events_topic
        self._blocks = HeldBlocks(names)
        self._encoder = msgspec.msgpack.Encoder()

    def start_publishing(self, model: str) -> None:
        """Publish from now on; `model` is the model's name in requests. Must be called on the event loop."""
        topic = f"kv@{socket.gethostname()}@{model}" if self._topic is None else self._topic
        self.publisher.topic = topic
        # Number 0 tells subscribers that the blocks of an earlier process are gone.
        self._publish([AllBlocksCleared()])
        self.publisher.attach(asyncio.get_running_loop())

    def publish_change(self, replica: str, change: TreeChange | None) -> None:
        """Publish the events that follow from a replica's `change`; None: the replica's tree is gone."""
        if events := self._blocks.events_of(replica, change):
            self._publish(events)

    def _publish(self, events: list[Event]) -> None:
        self.publisher.publish(self._encoder.encode(KVEventBatch(time.time(), events, 0)))

    def close(self) -> None:
        self.publisher.close()
