"""The queue of messages for the tokenizer, by flow: a long list of prompts does not delay other clients.

Example: 1,000 prompts of one body are queued when a chat arrives. The flows take turns, so the chat goes
second.

    body    p1 p2 p3 …        p1, chat, p2, p3, …
    chat    chat

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


class _Hint(msgspec.Struct, frozen=True):
    program: str = ""


class _Header(msgspec.Struct, frozen=True):
    """The fields of a message that determine its flow. The other fields are not decoded: as Python integers a
    list of token ids takes ten times the memory."""

    type: str
    rid: str = ""
    flow: str = ""
    program: str = ""
    hint: _Hint | None = None


_decoder = msgspec.msgpack.Decoder(_Header)


class FlowQueue:
    """A queue of encoded messages, which leave it in the order in which they are to be handled."""

    def __init__(self) -> None:
        self._flows: OrderedDict[tuple[str, str], deque[tuple[str, Any]]] = OrderedDict()
        """Flow → (request id or "", message) of its messages. The first flow has the next turn. Messages
        about a program do not name its scope, so programs of the same id in two scopes share a flow here."""
        self._flow_of: dict[str, tuple[str, str]] = {}
        """Request id → flow, of the requests in the queue."""
        self._taken = ("", ""), ""
        """Flow and request id of the message taken last."""
        self._behind: deque[bytes] = deque()
        """A barrier, and the messages that arrived after it."""

    def __bool__(self) -> bool:
        return bool(self._flows or self._behind)

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
        if not self._flows:
            return self._past_barrier()
        flow, messages = self._flows.popitem(last=False)
        rid, message = messages.popleft()
        self._taken = flow, rid
        if messages:
            self._flows[flow] = messages
        if rid:
            del self._flow_of[rid]
        return message

    def put_back(self, rest: Any) -> None:
        """Queue the rest of the message taken last, which is no barrier: before the others of its flow, whose
        turn is behind those of all flows."""
        flow, rid = self._taken
        self._flows.setdefault(flow, deque()).appendleft((rid, rest))
        self._flows.move_to_end(flow)
        if rid:
            self._flow_of[rid] = flow

    def _put(self, header: _Header, message: bytes) -> None:
        rid = ""
        if header.type == "Generate":
            program = "" if header.hint is None else header.hint.program
            flow = flow_key(program, header.flow, header.rid)
            if header.rid not in self._flow_of:
                rid = header.rid
                self._flow_of[rid] = flow
        else:
            flow = flow_key(header.program, "", header.rid)
            flow = self._flow_of.get(header.rid, flow)
        self._flows.setdefault(flow, deque()).append((rid, message))

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
