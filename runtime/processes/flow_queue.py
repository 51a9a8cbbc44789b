"""Messages that wait for the tokenizer, by flow: a long list of prompts does not hold up those of others.

Example: 1,000 prompts of one body wait when a chat comes. The flows take turns, so the chat goes second.

    body    p1 p2 p3 …        p1, chat, p2, p3, …
    chat    chat

Messages of one flow keep their order. `Abort`, `EndProgram` and `AwaitTools` go behind the requests that they
are about, and messages about all requests (`BARRIERS`) behind all that came before.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from ramify.engine_messages import flow_key

BARRIERS = frozenset(("FlushCache", "LoadLora", "UnloadLora"))


class _Hint(msgspec.Struct, frozen=True):
    program: str = ""


class _Header(msgspec.Struct, frozen=True):
    """The fields of any message that tell its flow. The others are not decoded: a list of token ids takes ten
    times the memory as Python's integers."""

    type: str
    rid: str = ""
    flow: str = ""
    program: str = ""
    hint: _Hint | None = None


_decoder = msgspec.msgpack.Decoder(_Header)


class FlowQueue:
    """Encoded messages in, and out in the order in which they are to be handled."""

    def __init__(self) -> None:
        self._flows: OrderedDict[tuple[str, str], deque[tuple[str, bytes]]] = OrderedDict()
        """Ids and messages by flow; the first flow is the next one. Messages about a program do not tell its
        scope, so programs of the same id in two scopes share a place here."""
        self._flow_of: dict[str, tuple[str, str]] = {}
        """Flows of the requests that wait, by their id."""
        self._behind: deque[bytes] = deque()
        """A barrier, and what has come since."""

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

    def take(self) -> bytes | None:
        """The next message; None where none waits."""
        if not self._flows:
            return self._past_barrier()
        flow, messages = self._flows.popitem(last=False)
        rid, message = messages.popleft()
        if messages:
            self._flows[flow] = messages
        if rid:
            del self._flow_of[rid]
        return message

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
        """The barrier that nothing waits before; what has come behind it takes its place."""
        if not self._behind:
            return None
        barrier, *rest = self._behind
        self._behind.clear()
        for message in rest:
            self.put(message)
        return barrier
