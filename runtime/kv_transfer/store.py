"""Where the images of a fleet lie on their way: files on one machine, objects of Ray's store on a cluster."""

from __future__ import annotations

from typing import Protocol


class ImageStore(Protocol):
    """`ramify.runtime.kv_transfer.files.ImageFolder`, or `ramify.ray.images.RemoteImages`."""

    def new(self) -> str:
        """A name for one image, which `ExportPrefix` and `ImportPrefix` have as their `path`. Raises
        `OSError`."""

    def has_room(self, size: int) -> bool:
        """Whether an image of `size` bytes may be made. Raises `OSError`."""

    def remove(self, image: str) -> None:
        """The image is not needed any more; there may be none of this name."""

    def close(self) -> None:
        """Remove all images."""
