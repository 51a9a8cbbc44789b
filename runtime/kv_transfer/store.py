"""Interface of the store for a fleet's KV snapshots: files on one machine, Ray objects on a cluster."""

from __future__ import annotations

from typing import Protocol


class SnapshotStore(Protocol):
    """A store for KV snapshots: `ramify.runtime.kv_transfer.files.SnapshotFolder`, or
    `ramify.ray.snapshots.RemoteSnapshots`."""

    def new(self) -> str:
        """A name for a new KV snapshot: the `path` for `ExportPrefix` and `ImportPrefix`. Raises
        `OSError`."""

    def has_room(self, size: int) -> bool:
        """Whether there is room for a KV snapshot of `size` bytes. Raises `OSError`."""

    def remove(self, snapshot: str) -> None:
        """Remove a KV snapshot, if there is one of this name."""

    def close(self) -> None:
        """Remove all KV snapshots."""
