"""A model on the hub without its weights: small files, and the headers of the large ones.

Each file has its full size, with a hole in place of the weights, so that any reader takes it for the whole
file. They are kept in Ramify's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from ramify import cache
from ramify.runtime.model.gguf.header import size_of_header
from ramify.runtime.model.hub.repository import Listing, read_range

BLOCK = 4 << 20
"""Bytes that are fetched at a time. The header of a GGUF file with 150k tokens has about 6 MB."""


def headers_of(listing: Listing, paths: Sequence[str]) -> Path:
    """The folder with the files `paths` of a repository, without their weights."""
    identity = "\0".join([listing.commit, *paths])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    name = listing.name.repository.replace("/", "--")

    def build(folder: Path) -> None:
        for path in paths:
            _write(listing, path, folder / path)

    return cache.ensure(cache.home() / "headers" / f"{name}-{key}", build)


def _write(listing: Listing, path: str, target: Path) -> None:
    size = listing.files[path].size
    content = read_range(listing.name, path, 0, min(size, BLOCK)) if size else b""
    if path.endswith(".gguf"):
        while (end := size_of_header(content)) is None and len(content) < size:
            content += read_range(listing.name, path, len(content), min(size, len(content) + BLOCK))
    elif path.endswith(".safetensors"):
        end = 8 + int.from_bytes(content[:8], "little")
        if len(content) < end:
            content += read_range(listing.name, path, len(content), end)
    else:
        end = size
        if len(content) < size:
            content += read_range(listing.name, path, len(content), size)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.write(content[:end])
        file.truncate(size)
