"""The order in which the tokenizer handles messages."""

from __future__ import annotations

import msgspec

from ramify.engine_messages import Abort, EndProgram, FlushCache, GetStats
from ramify.messages import Generate, Message, ProgramHint
from ramify.runtime.processes.flow_queue import FlowQueue


def order(*messages: Message) -> list[str]:
    queue = FlowQueue()
    for message in messages:
        queue.put(msgspec.msgpack.encode(message))
    found: list[str] = []
    while queue:
        taken = msgspec.msgpack.decode(queue.take() or b"")
        found.append(f"{taken['type']} {taken.get('rid') or taken.get('program')}")
    assert queue.take() is None
    return found


def asked(rid: str, flow: str = "", program: str = "", key: str = "") -> Generate:
    hint = ProgramHint(program=program) if program else None
    return Generate(rid=rid, prompt=("hi", (1, 2)), flow=flow, hint=hint, key=key)


def test_flows_take_turns() -> None:
    body = [asked(f"b{i}", flow="b") for i in range(4)]
    calls = [asked(f"p{i}", program="p") for i in (1, 2)]
    assert order(*body, asked("chat"), GetStats(rid="~1"), *calls) == [
        "Generate b0",
        "Generate chat",
        "GetStats ~1",
        "Generate p1",
        "Generate b1",
        "Generate p2",
        "Generate b2",
        "Generate b3",
    ]


def test_keys_take_turns_whatever_their_flows() -> None:
    flood = [asked(f"f{i}", key="flood") for i in range(3)]
    calls = [asked(f"p{i}", program="p", key="other") for i in (1, 2)]
    assert order(*flood, *calls, EndProgram(program="p")) == [
        "Generate f0",
        "Generate p1",
        "Generate f1",
        "Generate p2",
        "Generate f2",
        "EndProgram p",
    ]


def test_a_body_and_a_program_of_one_name_take_turns() -> None:
    body = [asked(f"b{i}", flow="one") for i in range(2)]
    assert order(*body, asked("p", program="one")) == ["Generate b0", "Generate p", "Generate b1"]


def test_what_is_about_a_request_goes_behind_it() -> None:
    found = order(
        asked("b0", flow="b"),
        asked("b1", flow="b"),
        Abort(rid="b1"),
        asked("p1", program="p"),
        asked("p2", program="p"),
        EndProgram(program="p"),
        Abort(rid="gone"),
    )
    assert found.index("Generate b1") < found.index("Abort b1")
    assert found.index("Generate p2") < found.index("EndProgram p")
    assert "Abort gone" in found


def test_what_is_about_all_goes_behind_all_that_came_before() -> None:
    body = [asked(f"b{i}", flow="b") for i in range(3)]
    found = order(*body, FlushCache(rid="f"), asked("chat"), FlushCache(rid="g"))
    assert found == [*(f"Generate b{i}" for i in range(3)), "FlushCache f", "Generate chat", "FlushCache g"]


def test_the_rest_of_a_message_is_the_first_of_its_flow_after_the_others() -> None:
    queue = FlowQueue()
    for message in (asked("long", flow="a"), asked("next", flow="a"), asked("chat"), Abort(rid="other")):
        queue.put(msgspec.msgpack.encode(message))
    assert msgspec.msgpack.decode(queue.take())["rid"] == "long"
    rest = object()
    queue.put_back(rest)
    queue.put(msgspec.msgpack.encode(Abort(rid="long")))
    queue.put(msgspec.msgpack.encode(FlushCache(rid="~1")))
    found = [queue.take() for _ in range(6)]
    names = [one if one is rest else msgspec.msgpack.decode(one)["rid"] for one in found]
    assert names == ["chat", "other", rest, "next", "long", "~1"]
    assert not queue


def test_the_rest_of_the_only_message_is_next() -> None:
    queue = FlowQueue()
    queue.put(msgspec.msgpack.encode(asked("long")))
    queue.take()
    queue.put_back("rest")
    assert queue
    assert queue.take() == "rest"
    assert not queue
