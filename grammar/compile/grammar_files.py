"""Compiled grammars on disk, so that a restarted server need not compile its constraints again."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

import ramify.cache as cache
import ramify.constraint as constraint
import ramify.grammar as grammar
from ramify.engine_messages import GrammarReady
from ramify.grammar.compile.keywords import versions as installed_versions
from ramify.grammar.vocabulary import Vocabulary

log = logging.getLogger("ramify")

MAX_BYTES = 256 << 20
MAX_FILE_BYTES = 16 << 20


class GrammarFiles:
    """Files of compiled grammars. The name of each is a digest of the constraint, the vocabulary, the
    compiler's source code, the backend, and the `versions` of all backends (by default the installed ones).

    Files are written atomically. Beyond `max_bytes` the least recently used ones are removed. Files that
    cannot be read and folders that cannot be written are ignored.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        folder: Path | None = None,
        max_bytes: int = MAX_BYTES,
        *,
        backend: str = "auto",
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = cache.home() / "grammars" if folder is None else folder
        self._max_bytes = max_bytes
        versions = versions or installed_versions()
        self._fingerprint = hashlib.sha256(
            vocabulary.to_bytes() + _source_code() + repr((backend, versions)).encode()
        ).digest()

    def get(self, key: str) -> GrammarReady | None:
        """The grammar of the constraint with this key; None if it is not on disk."""
        path = self._path(key)
        try:
            found = msgspec.msgpack.decode(path.read_bytes(), type=GrammarReady)
            os.utime(path)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.key == key else None

    def put(self, ready: GrammarReady) -> None:
        """Keep a grammar under the key of its constraint."""
        ready = msgspec.structs.replace(ready, key=ready.constraint_key)
        if len(ready.payload) > MAX_FILE_BYTES:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(ready.payload))
            descriptor, partial = tempfile.mkstemp(dir=self._folder, prefix=".partial-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.msgpack.encode(ready))
            os.replace(partial, self._path(ready.key))
        except OSError as error:
            log.info("a compiled grammar is not kept on disk: %s", error)

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(self._fingerprint + key.encode()).hexdigest()

    def _make_room(self, nbytes: int) -> None:
        entries = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(OSError):  # another process may have removed it
                found = entry.stat()
                entries.append((found.st_mtime, found.st_size, entry.path))
        total = sum(size for _, size, _ in entries) + nbytes
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(OSError):
                os.remove(path)
            total -= size


def _source_code() -> bytes:
    """A digest of the compiler's source code, since another version may compile the same constraint
    differently."""
    digest = hashlib.sha256()
    folder = Path(grammar.__file__).parent
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json"), Path(constraint.__file__)]):
        digest.update(path.read_bytes())
    return digest.digest()
