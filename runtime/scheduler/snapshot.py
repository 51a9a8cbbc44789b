"""What a person may see of the scheduler: who is in the queue, and what the tree holds."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from ramify.messages import QueueShare, TreeNode
from ramify.radix.snapshot import NodeView
from ramify.runtime.scheduler.request import Request


def shares(
    running: Iterable[Request], waiting: Iterable[Request], compiling: Iterable[Request], most: int
) -> tuple[tuple[QueueShare, ...], int]:
    """The requests by program, at most `most` of them, and how many programs there are beside."""
    counted: dict[str, collections.Counter[str]] = {}

    def count(requests: Iterable[Request], state: str) -> None:
        for request in requests:
            program = "" if request.hint is None else request.hint.program
            back = state == "waiting" and request.retractions > 0
            counted.setdefault(program, collections.Counter())["retracted" if back else state] += 1

    count(running, "running")
    count(waiting, "waiting")
    count(compiling, "compiling")
    largest = sorted(counted, key=lambda program: -counted[program].total())[:most]
    found = [
        QueueShare(
            program=program,
            running=states["running"],
            waiting=states["waiting"],
            retracted=states["retracted"],
            compiling=states["compiling"],
        )
        for program in largest
        for states in (counted[program],)
    ]
    return tuple(found), len(counted) - len(found)


def tree_nodes(views: Sequence[NodeView]) -> tuple[TreeNode, ...]:
    """The nodes as they travel."""
    return tuple(
        TreeNode(
            parent=view.parent,
            start=view.start,
            tokens=view.tokens,
            pages=view.pages,
            state=view.state,
            locks=view.locks,
            owners=view.owners,
            hidden=view.hidden,
        )
        for view in views
    )
