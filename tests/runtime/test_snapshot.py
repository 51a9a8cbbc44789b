"""The scheduler's snapshot for people: its queue and its prefix tree."""

from __future__ import annotations

from typing import Any

from ramify.engine_messages import GetSnapshot, QueueShare, Snapshot
from ramify.messages import ProgramHint
from tests.runtime.local import LocalScheduler


def look(local: LocalScheduler, nodes: int = 100, programs: int = 10) -> Snapshot:
    local.scheduler.receive(GetSnapshot(rid="look", nodes=nodes, programs=programs))
    reply = local.replies.pop()
    assert reply.stats is not None
    assert reply.snapshot is not None
    assert reply.stats == local.scheduler.stats()
    return reply.snapshot


def share(program: str, **counts: int) -> QueueShare:
    return QueueShare(
        program=program, **{"running": 0, "waiting": 0, "retracted": 0, "compiling": 0} | counts
    )


def test_the_queue_by_program(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, max_running=2, policy="fcfs")
    for number in range(3):
        local.submit([number, 1, 2], hint=ProgramHint(program="one"), max_tokens=4, ignore_eos=True)
    local.submit([9, 9], max_tokens=4, ignore_eos=True)
    assert look(local).queue == (share("one", waiting=3), share("", waiting=1))
    local.step()
    held = look(local)
    assert held.queue == (share("one", running=2, waiting=1), share("", waiting=1))
    assert look(local, programs=1).queue_hidden == 1
    local.run()
    assert look(local).queue == ()


def test_retracted_requests_are_told_apart(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model, page_size=4, num_pages=16)
    for number in range(4):
        local.submit([number] * 8, hint=ProgramHint(program="one"), max_tokens=16, ignore_eos=True)
    seen = 0
    while local.scheduler.busy:
        local.step()
        for found in look(local).queue:
            seen = max(seen, found.retracted)
            stats = local.scheduler.stats()
            assert (found.running, found.waiting + found.retracted) == (stats.running, stats.waiting)
    assert seen > 0


def test_the_tree(tiny_model: Any) -> None:
    local = LocalScheduler(tiny_model)
    local.complete([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], max_tokens=0)
    rid = local.submit([1, 2, 3, 4, 5, 8, 9], max_tokens=9, ignore_eos=True)
    local.step()
    nodes = look(local).nodes
    assert [(node.start, node.tokens, node.state) for node in nodes if node.tokens][:2] == [
        (0, 3, "in_use"),
        (3, 2, "in_use"),
    ]
    assert (3, 2, "evictable") in [(node.start, node.tokens, node.state) for node in nodes]
    assert len(look(local, nodes=2).nodes) == 2
    local.run()
    assert local.results[rid].finish is not None
    assert {node.state for node in look(local).nodes} == {"evictable"}
