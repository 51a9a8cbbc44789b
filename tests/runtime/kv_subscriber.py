"""A subscriber to KV events, written from vLLM's format (0.26) without Ramify's code.

Frames: topic, sequence number (8 bytes, big-endian), payload. A request for a replay has an empty frame and
the first wanted number. Each answer has an empty frame before the three; the last answer has no payload.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

WAIT_MS = 20_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


Prefix = tuple[str | None, tuple[Any, ...], tuple[int, ...]]
"""(LoRA adapter, extra keys of the first block, all tokens up to the end of a block)."""


class Subscriber:
    """The knowledge of a router about one server."""

    def __init__(self, address: str, replay: str, topic: str = "") -> None:
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.set_hwm(0)
        self._live.connect(address)
        self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)
        for socket in (self._live, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.last = -1
        """The sequence number of the last batch received; -1 for none."""
        self.blocks: dict[bytes | int, Prefix] = {}
        self.topics: set[str] = set()
        self.cleared = 0
        self.gaps = 0

    def joined(self, publish: Any) -> None:
        """Call `publish` until live messages arrive."""
        while not self._live.poll(20):
            publish()
        self._live.recv_multipart()

    def receive(self, lose: bool = False) -> None:
        """Receive the live batches that have arrived; drop them if `lose`."""
        while self._live.poll(0):
            topic, number, payload = self._live.recv_multipart()
            if not lose:
                self._take(topic, number, payload)

    def catch_up(self) -> None:
        """Request the missed batches, and receive them."""
        self.ask()
        self.hear()

    def ask(self) -> None:
        self._replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))

    def answered(self) -> bool:
        """Whether an answer begins to arrive within 10 ms."""
        return bool(self._replay.poll(10))

    def hear(self) -> None:
        while True:
            assert self._replay.poll(WAIT_MS), "no answer to a request for a replay"
            empty, topic, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return
            self._take(topic, number, payload)

    def _take(self, topic: bytes, number_bytes: bytes, payload: bytes) -> None:
        number = int.from_bytes(number_bytes, "big")
        if number <= self.last:
            return
        if number > self.last + 1:
            self.gaps += 1
            return  # in order or not at all: `catch_up` has it
        self.last = number
        self.topics.add(topic.decode())
        batch = self._decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self.blocks.clear()
                self.cleared += 1

    def _store(self, event: BlockStored) -> None:
        count, size = len(event.block_hashes), event.block_size
        assert len(event.token_ids) == count * size > 0
        assert event.extra_keys is None or len(event.extra_keys) == count
        if event.parent_block_hash is None:
            keys = (event.extra_keys or [None])[0] or ()
            before: Prefix = (event.lora_name, keys, ())
        else:
            before = self.blocks[event.parent_block_hash]
        for i, block in enumerate(event.block_hashes):
            assert block not in self.blocks, "a block is stored once: routers count"
            lora, keys, tokens = before
            before = (lora, keys, tokens + tuple(event.token_ids[i * size : (i + 1) * size]))
            self.blocks[block] = before

    def close(self) -> None:
        self._live.close()
        self._replay.close()
