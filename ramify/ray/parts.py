"""The checkpoint of a batch that runs on several actors: a folder with a results file for each actor.

    FOLDER/batch.jsonl                   the header alone: what is run
    FOLDER/9f21c0de55aa4e10.jsonl        a header, and a line for each row that this actor has finished

The files have the form of `ramify.lang.batch.checkpoint`. The digest in a line is the row's 128-bit id. An
actor reads all files once, when it starts, and writes only its own.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import uuid
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import InvalidRequest
from ramify.lang.batch.checkpoint import (
    HEADER,
    LINE,
    VERSION,
    Identity,
    Origin,
    ResultsFile,
    keyed,
    read_header,
)
from ramify.lang.batch.fingerprint import Record, difference
from ramify.lang.batch.json_text import canonical, encode

BATCH = "batch.jsonl"


class _Line(msgspec.Struct):
    """The fields of a line that decide whether its row runs again."""

    header: str
    digest: str
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class Parts:
    """A checkpoint folder. Every machine of the cluster must see it under `path`.

    `record` is the record of this batch (`ramify.lang.batch.fingerprint`); `rerun` contains words of
    `ramify.lang.batch.checkpoint.RERUN`.
    """

    path: str
    record: Record
    key: str | None = None
    rerun: frozenset[str] = frozenset()

    @property
    def _recorded(self) -> Record:
        return keyed(self.record, self.key)

    def begin(self) -> None:
        """Make the folder; if it exists, check that it belongs to this batch.

        Raises `InvalidRequest` if the folder has results of another program or of other options, and `rerun`
        does not say what is to happen.
        """
        if "://" in self.path:
            raise InvalidRequest(
                f"checkpoint is {self.path!r}; it must be a folder.",
                field="checkpoint",
                remedy="Name a folder that all machines share, or use Ray's own checkpoint "
                "(ray.data.DataContext.checkpoint_config).",
            )
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)
        origin = Origin(self.path, "folder", "checkpoint", "their arguments")
        for file in self._files():
            with file.open("rb") as opened:
                for text in opened:
                    if text.startswith(HEADER):
                        found = origin.difference(read_header(text), self._recorded, file)
                        if found is not None and not self.rerun & {"changed", "missing"}:
                            raise origin.refusal(found)
        if not (folder / BATCH).exists():
            new = folder / f"{uuid.uuid4().hex}.new"
            new.write_bytes(encode({"ramify_results": VERSION, "header": "batch", **self._recorded}) + b"\n")
            os.replace(new, folder / BATCH)

    def open(self) -> Finished:
        """Open the checkpoint in an actor."""
        if not (Path(self.path) / BATCH).exists():
            raise InvalidRequest(
                f"This machine does not see the checkpoint folder {self.path}.",
                field="checkpoint",
                remedy="Name a folder that all machines of the cluster share.",
            )
        return Finished(self)

    def _files(self) -> list[Path]:
        return sorted(Path(self.path).glob("*.jsonl"))

    def lines(self) -> Iterator[tuple[Path, int, str]]:
        """Yield (file, offset in bytes, row id) for each line whose row need not run again."""
        for file in self._files():
            current: dict[str, bool] = {}
            offset = 0
            with file.open("rb") as opened:
                for text in opened:
                    if text.startswith(HEADER):
                        header = read_header(text)
                        current[str(header.get("header"))] = difference(header, self._recorded) is None
                    elif text.startswith(LINE) and text.endswith(b"\n"):  # else torn: the actor has died
                        line = msgspec.json.decode(text, type=_Line)
                        if self._stands(line, current.get(line.header, False)):
                            yield file, offset, line.digest
                    offset += len(text)

    def _stands(self, line: _Line, current: bool) -> bool:
        if not current and "changed" in self.rerun:
            return False
        return line.error is None or not (line.error.get("transient") or "failed" in self.rerun)


class Finished:
    """The finished rows of a checkpoint, and the file to which this actor writes the rows that it finishes.

    A finished row takes 24 bytes of memory.
    """

    def __init__(self, parts: Parts) -> None:
        import numpy as np

        self._parts = parts
        self._file: ResultsFile | None = None
        self._count = itertools.count()
        self._paths: list[Path] = []
        ids, files, offsets = array("Q"), array("Q"), array("Q")
        for path, offset, row_id in parts.lines():
            if not self._paths or self._paths[-1] != path:
                self._paths.append(path)
            ids.append(int(row_id[:16], 16))
            files.append(len(self._paths) - 1)
            offsets.append(offset)
        order = np.argsort(np.frombuffer(ids, np.uint64), kind="stable") if ids else np.zeros(0, np.int64)
        self._ids, self._files, self._offsets = (
            np.frombuffer(one, np.uint64)[order] if ids else np.zeros(0, np.uint64)
            for one in (ids, files, offsets)
        )

    def find(self, row_id: str) -> dict[str, Any] | None:
        """The line of a finished row; None if the row has to run."""
        import numpy as np

        wanted = np.uint64(int(row_id[:16], 16))
        first = int(np.searchsorted(self._ids, wanted))
        last = int(np.searchsorted(self._ids, wanted, side="right"))
        for at in range(last - 1, first - 1, -1):  # `_ids` has 64 bits of an id, the line 128
            with self._paths[int(self._files[at])].open("rb") as file:
                file.seek(int(self._offsets[at]))
                line: dict[str, Any] = msgspec.json.decode(file.readline())
            if line["digest"] == row_id:
                return line
        return None

    def append(self, row_id: str, key: Any, line: Mapping[str, Any]) -> None:
        """Write the line of a row that this actor has finished."""
        if self._file is None:
            name = f"{uuid.uuid4().hex[:16]}.jsonl"
            self._file = ResultsFile(Path(self._parts.path) / name, self._parts.record, self._parts.key)
        fields: dict[str, Any] = {"digest": row_id}
        if self._parts.key is not None:
            fields["key"] = msgspec.Raw(encode(key))
        self._file.append(next(self._count), Identity(int(row_id[:16], 16), fields), line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def row_id(values: Mapping[str, Any], key: Any = None) -> str:
    """The 128-bit BLAKE2b hash of a row's key and values, as 32 hexadecimal digits.

    Equal rows have equal ids.

    Raises TypeError for a value that is neither JSON nor convertible to bytes that are the same in every
    process.
    """
    try:
        data = msgspec.json.encode([key, values], enc_hook=_stable, order="deterministic")
    except _NoId:
        raise
    except (TypeError, ValueError, RecursionError):  # no JSON: the row runs, and fails by itself if it has to
        data = canonical([key, values])
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _NoId(TypeError):
    """A value cannot be converted to bytes that are the same in every process."""


def _stable(value: Any) -> Any:
    """Substitute for an array in a row's id: the array's type, shape and bytes.

    Raises `_NoId` for a value of any other type.
    """
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return [str(value.dtype), list(value.shape), value.tobytes()]
    raise _NoId(f"A row with a value of type {type(value).__qualname__} has no id.")
