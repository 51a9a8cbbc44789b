"""Store of a fleet's KV snapshots on their way: files on one machine, objects of Ray's store on a cluster."""

from __future__ import annotations

from typing import Protocol


class SnapshotStore(Protocol):
    """`ramify.runtime.kv_transfer.files.SnapshotFolder`, or `ramify.ray.snapshots.RemoteSnapshots`."""

    def new(self) -> str:
        """A name for one KV snapshot, which `ExportPrefix` and `ImportPrefix` have as their `path`. Raises
        `OSError`."""

    def has_room(self, size: int) -> bool:
        """Whether a KV snapshot of `size` bytes may be made. Raises `OSError`."""

    def remove(self, snapshot: str) -> None:
        """The KV snapshot is not needed any more; there may be none of this name."""

    def close(self) -> None:
        """Remove all KV snapshots."""
