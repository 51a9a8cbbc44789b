"""Exports and imports of prefixes: KV pages from and to the files of KV snapshots, a piece after each step.

Example with pages of 16 tokens, 360 KB each, and `piece_bytes` = 8 MB, so 22 pages a step:

    export of 1,000 tokens    the tree holds 900: 56 whole pages, locked; written in 3 steps; unlocked
    import of its snapshot    the tree holds 100 of the tokens: 6 whole pages, locked; 50 pages are taken, and
                              are private until all of them are read and checked; then they join the tree

A page that is locked in the tree is never written, and the private pages of an import are read by no request.
So requests continue between the pieces, and find all pages of an import in the tree or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ramify.engine_messages import (
    ExportPrefix,
    GetPrefixes,
    HeldPrefix,
    ImportPrefix,
    Reply,
    Transferred,
)
from ramify.errors import EngineError, InvalidRequest, NotFound, Overloaded, RamifyError, UnsupportedField
from ramify.radix.cache import NaiveCache
from ramify.radix.lock import PrefixLock
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.kv_transfer.files import ExistingFile, NewFile
from ramify.runtime.kv_transfer.snapshot import BadSnapshot, SnapshotReader, SnapshotWriter
from ramify.runtime.scheduler.admission import RESERVED_PAGES
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.requests.limits import TUNED, Limits

log = logging.getLogger("ramify")

TAKER = "an import of cached pages"


@dataclasses.dataclass(slots=True, eq=False)
class _Transfer:
    message: ExportPrefix | ImportPrefix
    lock: PrefixLock
    file: NewFile | ExistingFile
    snapshot: SnapshotWriter | SnapshotReader
    pages: list[int]
    """The pages to be exported, or private pages of an import for the tokens after the lock. The first
    `copied` pages are already written to the file, or read from it."""
    copied: int = 0


@dataclasses.dataclass(eq=False)
class Transfers:
    """Works on one transfer at a time, in the order of the messages.

    identity : returns the KV identity of the engine; if `identity` is None, all transfers are refused
    overwritten : called with pages that an import has overwritten
    """

    requests: Lifecycle
    pool: KvPool
    limits: Limits
    identity: Callable[[], str] | None
    overwritten: Callable[[Sequence[int]], None]
    ranks: int = 1
    """Number of ranks among which the model is divided (`tensor_parallel`)."""
    piece_bytes: int = TUNED.piece_bytes
    """Bytes that are copied after one step, at least a page."""
    queue: deque[ExportPrefix | ImportPrefix] = dataclasses.field(default_factory=deque)
    current: _Transfer | None = None

    @property
    def handlers(self) -> dict[type, Callable[..., None]]:
        """Handlers by the type of the message."""
        return {
            ExportPrefix: self.queue.append,
            ImportPrefix: self.queue.append,
            GetPrefixes: self._tell_prefixes,
        }

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; 0 if every transfer is refused."""
        return 0 if self._refusal() is not None else self.pool.page_bytes

    @property
    def busy(self) -> bool:
        return bool(self.queue) or self.current is not None

    def copy_piece(self) -> None:
        """Copy the next piece of the current transfer. If there is none, begin the oldest queued transfer."""
        if self.current is None and self.queue:
            message = self.queue.popleft()
            with self._failing_alone(message):
                self.current = (
                    self._begin_export(message)
                    if isinstance(message, ExportPrefix)
                    else self._begin_import(message)
                )
        if self.current is not None:
            with self._failing_alone(self.current.message):
                if isinstance(self.current.snapshot, SnapshotWriter):
                    self._write(self.current, self.current.snapshot)
                else:
                    self._read(self.current, self.current.snapshot)

    def give_way(self) -> bool:
        """Abort the transfer in progress, because requests need its pages. Returns False if there is none."""
        if self.current is None:
            return False
        self._fail(self.current.message, Overloaded("Running requests needed the pages."))
        return True

    def _tell_prefixes(self, message: GetPrefixes) -> None:
        found = [
            HeldPrefix(scope=one.scope, ids=one.ids, owners=one.owners)
            for one in self.requests.pages.cache.prefixes(message.most)
        ]
        self.requests.reply(Reply(rid=message.rid, prefixes=tuple(found)))

    # --- exports ----------------------------------------------------------------------------------

    def _begin_export(self, message: ExportPrefix) -> _Transfer:
        identity = self._checked_identity()
        size = self.requests.pages.page_size
        ids = np.array(message.ids, dtype=np.int32)
        skipped = message.skip // size
        whole = self._whole_pages(ids, message.scope)
        if whole <= skipped:
            raise NotFound(f"The prefix tree holds {whole} whole pages of the prefix.")
        with contextlib.ExitStack() as undo:
            lock = self._lock(ids[: whole * size], message.scope)
            undo.callback(self.requests.pages.cache.release, lock)
            file = NewFile(message.path)
            undo.callback(file.close, keep=False)
            writer = SnapshotWriter(
                file,
                identity=identity,
                scope=message.scope,
                ids=ids[: whole * size],
                page_size=size,
                page_bytes=self.pool.page_bytes,
                first_page=skipped,
            )
            undo.pop_all()
        return _Transfer(message, lock, file, writer, lock.pages[skipped:])

    def _write(self, export: _Transfer, writer: SnapshotWriter) -> None:
        piece = export.pages[export.copied :][: self._piece]
        writer.write_pages(self.pool.read_pages(piece).numpy().data)
        export.copied += len(piece)
        if export.copied < len(export.pages):
            return
        writer.finish()
        self._end(export, keep=True)
        self.requests.counters.exported_tokens += export.copied * self.requests.pages.page_size
        self.requests.counters.exported_bytes += self._tell_transferred(export).bytes

    # --- imports ----------------------------------------------------------------------------------

    def _begin_import(self, message: ImportPrefix) -> _Transfer:
        identity = self._checked_identity()
        with contextlib.ExitStack() as undo:
            file = ExistingFile(message.path)
            undo.callback(file.close)
            snapshot = self._checked_snapshot(file, identity)
            size, header = self.requests.pages.page_size, snapshot.header
            held = self._whole_pages(snapshot.ids, header.scope)
            if held < header.first_page:
                first = header.first_page
                raise NotFound(f"The KV snapshot begins with page {first}; the tree holds {held} pages.")
            lock = self._lock(snapshot.ids[: held * size], header.scope)
            undo.callback(self.requests.pages.cache.release, lock)
            pages = self._take(header.tokens // size - held)
            undo.pop_all()
        return _Transfer(message, lock, file, snapshot, pages)

    def _checked_snapshot(self, file: ExistingFile, identity: str) -> SnapshotReader:
        """The KV snapshot in `file`. Raises `BadSnapshot` unless its identity, pages and tokens fit this
        engine."""
        snapshot = SnapshotReader(file)
        header = snapshot.header
        if header.identity != identity:
            raise BadSnapshot("it is of another model, or of an engine with other options")
        if (header.page_size, header.page_bytes) != (self.requests.pages.page_size, self.pool.page_bytes):
            raise BadSnapshot(f"its pages have {header.page_size} tokens in {header.page_bytes} bytes")
        if header.tokens > min(self.limits.context_length, self.limits.kv_tokens):
            raise BadSnapshot(f"it has {header.tokens} tokens")
        if len(snapshot.ids) and not 0 <= snapshot.ids.min() <= snapshot.ids.max() < self.limits.vocab_size:
            raise BadSnapshot("it has token ids outside of the vocabulary")
        return snapshot

    def _take(self, missing: int) -> list[int]:
        """At most `missing` private pages: free pages, then evicted pages that had no lease. Raises
        `Overloaded` if no page can be taken."""
        cache = self.requests.pages.cache
        room = cache.available() - cache.usage.leased_pages - RESERVED_PAGES * len(self.requests.running)
        if missing and room <= 0:
            raise Overloaded("No page is free or evictable.")
        pages = cache.allocate(min(missing, room), TAKER) if missing else []
        assert pages is not None
        return pages

    def _read(self, arriving: _Transfer, snapshot: SnapshotReader) -> None:
        first = arriving.lock.length // self.requests.pages.page_size + arriving.copied
        piece = arriving.pages[arriving.copied :][: self._piece]
        if piece:
            data = torch.frombuffer(snapshot.pages(first, len(piece)), dtype=torch.uint8)
            self.pool.write_pages(piece, data.view(len(piece), -1))
            self.overwritten(piece)
            arriving.copied += len(piece)
        if arriving.copied < len(arriving.pages):
            return
        lock, copied_tokens = arriving.lock, arriving.copied * self.requests.pages.page_size
        if arriving.pages:
            ids = snapshot.ids[: lock.length + copied_tokens]
            self.requests.pages.cache.commit(lock, ids, lock.pages + arriving.pages)
            arriving.pages = []
        self._end(arriving)
        self.requests.counters.imported_tokens += copied_tokens
        self.requests.counters.imported_bytes += self._tell_transferred(arriving).bytes

    # --- both -------------------------------------------------------------------------------------

    @property
    def _piece(self) -> int:
        """Pages that are copied after one step."""
        return max(1, self.piece_bytes // self.pool.page_bytes)

    def _tell_transferred(self, done: _Transfer) -> Transferred:
        found = Transferred(tokens=done.lock.length, bytes=done.copied * self.pool.page_bytes)
        self.requests.reply(Reply(rid=done.message.rid, transferred=found))
        return found

    def _refusal(self) -> str | None:
        """The reason why this engine transfers no pages; None if it transfers pages."""
        if self.identity is None:
            return "The KV pages of this engine cannot be told apart from those of others."
        if self.ranks > 1:
            return f"tensor_parallel is {self.ranks}: pages that are divided among ranks are not transferred."
        if self.requests.pages.states.present:
            return "Pages of models with linear attention layers are not transferred."
        if isinstance(self.requests.pages.cache, NaiveCache):
            return "prefix_cache is 'naive': no pages are shared."
        return None

    def _checked_identity(self) -> str:
        refusal = self._refusal()
        if refusal is not None:
            raise UnsupportedField(refusal)
        assert self.identity is not None
        return self.identity()

    def _whole_pages(self, ids: np.ndarray, scope: str) -> int:
        return self.requests.pages.cache.match(ids, scope).length // self.requests.pages.page_size

    def _lock(self, ids: np.ndarray, scope: str) -> PrefixLock:
        return self.requests.pages.cache.acquire(self.requests.pages.cache.match(ids, scope))

    @contextlib.contextmanager
    def _failing_alone(self, message: ExportPrefix | ImportPrefix) -> Iterator[None]:
        try:
            yield
        except BadSnapshot as error:
            self._fail(message, InvalidRequest(f"The KV snapshot cannot be used: {error}."))
        except (RamifyError, OSError) as error:
            found = error if isinstance(error, RamifyError) else EngineError(str(error))
            self._fail(message, found)
        except Exception as error:
            log.exception("a transfer of KV pages failed")
            self._fail(message, EngineError(str(error)))

    def _fail(self, message: ExportPrefix | ImportPrefix, error: RamifyError) -> None:
        if self.current is not None and self.current.message is message:
            self._end(self.current)
        if isinstance(message, ImportPrefix):
            self.requests.counters.refused_imports += 1
            log.warning("an import of KV pages was refused: %s", error)
        self.requests.refuse(message.rid, error)

    def _end(self, transfer: _Transfer, *, keep: bool = False) -> None:
        """End `transfer`: close its file, free its private pages, release its lock. The file of an export is
        deleted unless `keep` is set."""
        self.current = None
        if isinstance(transfer.file, NewFile):
            transfer.file.close(keep=keep)
        else:
            transfer.file.close()
            self.requests.pages.cache.free(transfer.pages)
        self.requests.pages.cache.release(transfer.lock)
