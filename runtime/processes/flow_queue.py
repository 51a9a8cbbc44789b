"""The queue of messages for the tokenizer, by API key and flow: a long list does not delay other clients.

Example: 1,000 prompts of one body are queued when a chat arrives. The flows take turns, so the chat goes
second.

    body    p1 p2 p3 …        p1, chat, p2, p3, …
    chat    chat

API keys take turns in the same way, and the flows of a key share its turns.

A message whose work takes long is put back in the middle of it, as the first of its flow: the other flows
have a turn before it goes on. Messages of one flow keep their order. `Abort`, `EndProgram` and `AwaitTools`
stay behind the requests that they are about. Messages about all requests (`BARRIERS`) stay behind all that
came before them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import msgspec

from ramify.engine_messages import flow_key

BARRIERS = frozenset(("FlushCache", "LoadLora", "UnloadLora"))


_Flow = tuple[str, str]
"""A flow, as `flow_key` names it."""


class _Hint(msgspec.Struct, frozen=True):
    program: str = ""


class _Header(msgspec.Struct, frozen=True):
    """The fields of a message that determine its flow. The other fields are not decoded: as Python integers a
    list of token ids takes ten times the memory."""

    type: str
    rid: str = ""
    flow: str = ""
    key: str = ""
    program: str = ""
    hint: _Hint | None = None


_decoder = msgspec.msgpack.Decoder(_Header)


class FlowQueue:
    """A queue of encoded messages, which leave it in the order in which they are to be handled."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, OrderedDict[_Flow, deque[tuple[str, Any]]]] = OrderedDict()
        """API key → flow → (request id or "", message) of its messages. The first key, and of it the first
        flow, has the next turn. Messages about a program do not name its scope, so programs of the same id in
        two scopes of a key share a flow here."""
        self._place_of: dict[str, tuple[str, _Flow]] = {}
        """Request id → key and flow, of the requests in the queue."""
        self._taken = "", ("", ""), ""
        """Key, flow and request id of the message taken last."""
        self._behind: deque[bytes] = deque()
        """A barrier, and the messages that arrived after it."""

    def __bool__(self) -> bool:
        return bool(self._keys or self._behind)

    def put(self, message: bytes) -> None:
        try:
            header = _decoder.decode(message)
        except msgspec.ValidationError:
            header = _Header(type="")  # refused when it is decoded
        if self._behind or header.type in BARRIERS:
            self._behind.append(message)
        else:
            self._put(header, message)

    def take(self) -> Any:
        """The next message, as it was put; None if the queue is empty."""
        if not self._keys:
            return self._past_barrier()
        key, flows = self._keys.popitem(last=False)
        flow, messages = flows.popitem(last=False)
        rid, message = messages.popleft()
        self._taken = key, flow, rid
        if messages:
            flows[flow] = messages
        if flows:
            self._keys[key] = flows
        if rid:
            del self._place_of[rid]
        return message

    def put_back(self, rest: Any) -> None:
        """Queue the rest of the message taken last, which is no barrier: before the others of its flow, whose
        turn is behind those of all flows of its key, whose turn is behind those of all keys."""
        key, flow, rid = self._taken
        flows = self._keys.setdefault(key, OrderedDict())
        flows.setdefault(flow, deque()).appendleft((rid, rest))
        flows.move_to_end(flow)
        self._keys.move_to_end(key)
        if rid:
            self._place_of[rid] = key, flow

    def _put(self, header: _Header, message: bytes) -> None:
        rid, key = "", header.key
        if header.type == "Generate":
            program = "" if header.hint is None else header.hint.program
            flow = flow_key(program, header.flow, header.rid)
            if header.rid not in self._place_of:
                rid = header.rid
                self._place_of[rid] = key, flow
        else:
            flow = flow_key(header.program, "", header.rid)
            key = next((key for key, flows in self._keys.items() if flow in flows), "")
            key, flow = self._place_of.get(header.rid, (key, flow))
        self._keys.setdefault(key, OrderedDict()).setdefault(flow, deque()).append((rid, message))

    def _past_barrier(self) -> bytes | None:
        """Take the barrier, and queue the messages that arrived after it. Returns None if there is no
        barrier. Called when no message before the barrier is left."""
        if not self._behind:
            return None
        barrier, *rest = self._behind
        self._behind.clear()
        for message in rest:
            self.put(message)
        return barrier
