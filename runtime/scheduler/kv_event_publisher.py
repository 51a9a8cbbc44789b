"""KV event publisher: sends the frontend each page that enters or leaves the prefix tree.

The frontend places requests by these events, and publishes them for other routers (`KVEvents`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from ramify.engine_messages import PageRun, TreeChange
from ramify.radix.cache import PrefixCache
from ramify.radix.observe.tree_log import Page


class KVEventPublisher:
    """Sends the changes of `cache`, which has a log, numbered from 1 within the life of this process.

    With `tokens`, which the log must keep too, the added pages' tokens are sent as well.
    """

    def __init__(
        self, cache: PrefixCache, send: Callable[[TreeChange], None], *, tokens: bool = False
    ) -> None:
        self._cache = cache
        self._send = send
        self._tokens = tokens
        self._epoch = secrets.randbits(62)
        self._number = 0

    def publish_changes(self) -> None:
        """Send what has changed since the last call, if anything has."""
        pages: list[Page] = []
        if self._tokens:
            pages, removed = self._cache.take_changed_pages()
            added = [page.digest for page in pages]
        else:
            added, removed = self._cache.take_changes()
        if added or removed:
            self._number += 1
            change = TreeChange(
                epoch=self._epoch,
                number=self._number,
                added=tuple(added),
                removed=tuple(removed),
                runs=_runs(pages),
            )
            self._send(change)

    def publish_whole(self) -> None:
        """Send all that the tree holds now."""
        self.publish_changes()
        pages = self._cache.pages_in_tree() if self._tokens else []
        added = tuple(page.digest for page in pages) if self._tokens else tuple(self._cache.page_ends())
        whole = TreeChange(epoch=self._epoch, number=self._number, added=added, runs=_runs(pages), whole=True)
        self._send(whole)


def _runs(pages: Sequence[Page]) -> tuple[PageRun, ...]:
    """`pages` in order, cut where one does not follow the page before it."""
    runs: list[list[Page]] = []
    for page in pages:
        if runs and runs[-1][-1].digest == page.before and runs[-1][-1].scope == page.scope:
            runs[-1].append(page)
        else:
            runs.append([page])
    return tuple(
        PageRun(
            scope=run[0].scope,
            before=run[0].before,
            digests=tuple(page.digest for page in run),
            tokens=b"".join(page.tokens for page in run),
        )
        for run in runs
    )
