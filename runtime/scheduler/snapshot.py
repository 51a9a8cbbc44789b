"""Snapshots for people: the programs in the queue, and the nodes of the prefix tree."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import msgspec

from ramify.engine_messages import QueueShare, TreeNode
from ramify.radix.observe.snapshot import NodeView
from ramify.runtime.scheduler.lifecycle import Lifecycle


def shares(requests: Lifecycle, most: int) -> tuple[tuple[QueueShare, ...], int]:
    """The requests counted by program, largest first, at most `most` programs; and the number of others."""
    counted: dict[str, collections.Counter[str]] = {}
    for state, members in (
        ("running", requests.running),
        ("waiting", requests.waiting),
        ("compiling", requests.compiling.values()),
    ):
        for request in members:
            program = "" if request.hint is None else request.hint.program
            retracted = state == "waiting" and request.stats.retractions > 0
            counted.setdefault(program, collections.Counter())["retracted" if retracted else state] += 1
    largest = sorted(counted, key=lambda program: -counted[program].total())[:most]
    found = [
        QueueShare(
            program=program,
            running=counted[program]["running"],
            waiting=counted[program]["waiting"],
            retracted=counted[program]["retracted"],
            compiling=counted[program]["compiling"],
        )
        for program in largest
    ]
    return tuple(found), len(counted) - len(found)


def tree_nodes(views: Sequence[NodeView]) -> tuple[TreeNode, ...]:
    """The nodes as they travel: `TreeNode` has the fields of `NodeView`."""
    return tuple(msgspec.convert(view, TreeNode, from_attributes=True) for view in views)
