"""The counters of several replicas, merged into those of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.cache_contents import CacheContents
from ramify.engine_messages import QueueShare, Reply, Snapshot, TreeNode
from ramify.messages import SchedulerStats
from ramify.runtime.fleet.replica import State


class FleetStats(SchedulerStats, frozen=True, kw_only=True):
    """Sums of the counters over the replicas that answered. A replica's counters start at 0 again when it is
    restarted."""

    replicas: dict[str, SchedulerStats | None]
    """Replica → its counters; None for a replica that did not answer."""
    states: dict[str, State]
    """Replica → its state."""


def merged(replies: Mapping[str, Reply], states: Mapping[str, State]) -> Reply:
    """Merge the replies of several replicas. `states` includes the replicas without a reply."""
    first = next(iter(replies.values()))
    if first.cache is not None:
        found = {name: reply.cache for name, reply in replies.items() if reply.cache is not None}
        return msgspec.structs.replace(first, cache=_side_by_side(found))
    if first.stats is None:
        return msgspec.structs.replace(first, released=sum(reply.released for reply in replies.values()))
    stats = {name: replies[name].stats if name in replies else None for name in states}
    snapshots = [reply.snapshot for reply in replies.values() if reply.snapshot is not None]
    return msgspec.structs.replace(
        first, stats=_sum(stats, states), snapshot=_joined(snapshots) if snapshots else None
    )


def _side_by_side(caches: Mapping[str, CacheContents]) -> CacheContents:
    """Merge the contents of caches by replica: pages summed, and the lists with the name of the replica."""
    first = next(iter(caches.values()))
    of_page = ("page_size", "page_bytes")
    lists: dict[str, list[Any]] = {
        field: [
            msgspec.structs.replace(one, replica=name)
            for name, cache in caches.items()
            for one in getattr(cache, field)
        ]
        for field in ("holds", "unheld")
    }
    sums = {
        field: sum(getattr(cache, field) for cache in caches.values())
        for field in CacheContents.__struct_fields__
        if field not in lists and field not in of_page
    }
    merged = {field: tuple(found) for field, found in lists.items()}
    return msgspec.structs.replace(first, **sums, **merged)


def _sum(stats: dict[str, SchedulerStats | None], states: Mapping[str, State]) -> FleetStats:
    present = [one for one in stats.values() if one is not None]
    sums: dict[str, Any] = {
        field: sum(getattr(one, field) for one in present) for field in SchedulerStats.__struct_fields__
    }
    sums |= {field: getattr(present[0], field) for field in ("page_size", "cold_token_s", "cold_byte_s")}
    return FleetStats(**sums, replicas=stats, states=dict(states))


def _joined(snapshots: list[Snapshot]) -> Snapshot:
    """Merge the snapshots: trees side by side, and the queue shares of each program summed."""
    nodes: list[TreeNode] = []
    queue: dict[str, QueueShare] = {}
    for snapshot in snapshots:
        shift = len(nodes)
        nodes += [
            node if node.parent < 0 else msgspec.structs.replace(node, parent=node.parent + shift)
            for node in snapshot.nodes
        ]
        for share in snapshot.queue:
            before = queue.get(share.program)
            sums = {
                field: getattr(share, field) + (0 if before is None else getattr(before, field))
                for field in ("running", "waiting", "retracted", "compiling")
            }
            queue[share.program] = QueueShare(program=share.program, **sums)
    most = sorted(queue.values(), key=lambda share: -share.running - share.waiting - share.compiling)
    return Snapshot(
        nodes=tuple(nodes), queue=tuple(most), queue_hidden=sum(one.queue_hidden for one in snapshots)
    )
