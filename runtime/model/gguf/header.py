"""The header of a GGUF file: metadata and the place of each tensor (specification: ggml, docs/gguf.md).

Reading it takes milliseconds. `gguf.GGUFReader` makes an array object for each entry of the vocabulary, and
takes 2 s for 49k tokens. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ramify.errors import InvalidRequest, NotFound
from ramify.runtime.model.checkpoint import splits_of

MAX_ARRAY = 4096
"""Longer arrays (the vocabulary) are skipped. Per-layer settings are far shorter."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    """Row-major, as in torch."""
    type: int
    """A `gguf.GGMLQuantizationType`."""
    offset: int
    """Bytes from the start of the file."""
    path: Path


@dataclass(frozen=True)
class GGUFHeader:
    paths: tuple[Path, ...]
    """The files of the model: several if the model was split."""
    metadata: dict[str, Any]
    """The file's fields, except arrays of strings and arrays longer than `MAX_ARRAY`."""
    tensors: dict[str, TensorInfo]
    digest: str
    """SHA-256 of the bytes of the first file's header, the vocabulary included."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}


def read_header(path: Path) -> GGUFHeader:
    """The header of the model in `path`. If `path` is one of a model's splits, the header joins all of them.

    Raises `InvalidRequest` unless each file is a little-endian GGUF file of version 2 or 3, and `NotFound` if
    a split is missing.
    """
    paths = [place.absolute() for place in splits_of(path)]
    for place in paths:
        if not place.is_file():
            raise NotFound(
                f"{path.name} is one of {len(paths)} files of a model; {place.name} is missing beside it.",
                field="model",
                remedy="Fetch it too.",
            )
    headers = [_read(place) for place in paths]
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    count = headers[0].metadata.get("split.count", 1)
    if count != len(paths):
        raise InvalidRequest(
            f"{path.name} is one of {count} files of a model, and is not named so.",
            field="model",
            remedy=f"Give the files their names again: NAME-00001-of-{count:05}.gguf, …",
        )
    metadata = dict(headers[0].metadata)  # the caller's own: headers are kept
    return replace(headers[0], paths=tuple(paths), metadata=metadata, tensors=tensors)


def undequantisable(header: GGUFHeader) -> dict[str, str]:
    """Tensor's name → its type, for the last tensor of each type that `gguf` cannot dequantise."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    found = {}
    for kind, name in {info.type: name for name, info in header.tensors.items()}.items():
        try:
            type_ = GGMLQuantizationType(kind)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
        except (ValueError, KeyError, NotImplementedError):
            known = kind in GGMLQuantizationType.__members__.values()
            found[name] = GGMLQuantizationType(kind).name if known else str(kind)
    return found


def raw_fields(path: Path) -> dict[str, bytes]:
    """Every metadata field of one GGUF file: key → the bytes of the key, the type and the value."""
    found = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        cursor.at = 16  # magic, version and number of tensors
        for _ in range(cursor.take("Q")):
            start = cursor.at
            key = cursor.text()
            cursor.value(cursor.take("I"))
            found[key] = data[start : cursor.at]
    return found


def size_of_header(begin: bytes) -> int | None:
    """The number of bytes in the header of the file that begins with `begin`; None if `begin` ends inside the
    header.

    Raises `InvalidRequest` if the file is no GGUF file.
    """
    cursor = _Cursor(begin)
    try:
        cursor.header(Path(), 1 << 63)
        return cursor.at
    except (struct.error, ValueError, KeyError) as error:
        if cursor.at > 8 and not isinstance(error, KeyError):
            return None
        raise InvalidRequest(f"This is no readable GGUF file: {error}.", field="model") from None


def _read(path: Path) -> GGUFHeader:
    status = path.stat()
    return _read_once(
        path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


@functools.lru_cache(maxsize=8)
def _read_once(path: Path, *_version: int) -> GGUFHeader:
    """The header, cached: a start reads it several times, and a vocabulary of 49,000 tokens takes 0.1 s."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header(path, len(data))
    except KeyError as error:
        problem = f"it has a value of the unknown type {error}"
    except (struct.error, ValueError, OverflowError) as error:
        problem = str(error)
    raise InvalidRequest(
        f"{path} is not a readable GGUF file: {problem}.", field="model", remedy="Fetch it again."
    )


class _Cursor:
    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        size = self.take("Q")
        if size > len(self.data) - self.at:
            raise ValueError("it ends inside its header")
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """The value at the cursor; None for an array that is skipped."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_SCALARS[kind])
        item, count = self.take("I"), self.take("Q")
        if item in _SCALARS and count > MAX_ARRAY:
            self.at += count * struct.calcsize("<" + _SCALARS[item])
            return None
        if item != _STRING:
            return [self.value(item) for _ in range(count)]
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self.data, self.at)
            self.at += 8 + size
        return None

    def header(self, path: Path, size: int) -> GGUFHeader:
        """The header of the file `path` of `size` bytes."""
        if self.data[:4] != b"GGUF":
            raise ValueError("its first four bytes are not GGUF")
        self.at = 4
        version = self.take("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 or 3 is needed, little-endian")
        tensor_count, field_count = self.take("Q"), self.take("Q")
        metadata = {}
        for _ in range(field_count):
            key = self.text()
            value = self.value(self.take("I"))
            if value is not None:
                metadata[key] = value
        entries = []
        for _ in range(tensor_count):
            name, dimensions = self.text(), self.take("I")
            shape = tuple(self.take("Q") for _ in range(dimensions))[::-1]  # stored fastest-moving first
            entries.append((name, shape, self.take("I"), self.take("Q")))
        digest = hashlib.sha256(memoryview(self.data)[: self.at]).hexdigest()
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        tensors = {
            name: TensorInfo(shape, kind, start + offset, path) for name, shape, kind, offset in entries
        }
        if any(info.offset >= size for info in tensors.values()):
            raise ValueError("it ends before its tensors do")
        return GGUFHeader((path,), metadata, tensors, digest)
