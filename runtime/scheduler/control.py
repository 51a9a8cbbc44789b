"""Messages to the scheduler that are not about one request: programs, the cache, statistics, snapshots."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ramify.engine_messages import (
    AwaitTools,
    EndProgram,
    FlushCache,
    GetCache,
    GetSnapshot,
    GetStats,
    LoadLora,
    PageRun,
    QueueShare,
    ReleaseHold,
    Reply,
    Snapshot,
    TreeChange,
    TreeNode,
    UnloadLora,
)
from ramify.errors import EngineError, RamifyError
from ramify.messages import SchedulerStats
from ramify.radix.tree import RadixTree
from ramify.radix.tree_log import Page, TreeLog
from ramify.runtime.lora_names import same_model
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.scheduler.holds import contents
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.transfers import Transfers

log = logging.getLogger("ramify")


def shares(requests: Lifecycle, most: int) -> tuple[tuple[QueueShare, ...], int]:
    """The numbers of requests of the `most` programs with the most requests, largest first, and the number of
    other programs."""
    counted: dict[str, collections.Counter[str]] = {}
    for state, members in (
        ("running", requests.running),
        ("waiting", requests.waiting),
        ("compiling", requests.compiling.values()),
    ):
        for request in members:
            program = "" if request.hint is None else request.hint.program
            retracted = state == "waiting" and request.stats.retractions > 0
            counted.setdefault(program, collections.Counter())["retracted" if retracted else state] += 1
    largest = sorted(counted, key=lambda program: -counted[program].total())[:most]
    states = ("running", "waiting", "retracted", "compiling")
    found = [
        QueueShare(program=program, **{state: counted[program][state] for state in states})
        for program in largest
    ]
    return tuple(found), len(counted) - len(found)


class KVEventPublisher:
    """Sends the changes of `tree`, with the tokens of the added pages if `log` keeps tokens. The messages are
    numbered from 1 in each process."""

    def __init__(self, tree: RadixTree, log: TreeLog, send: Callable[[TreeChange], None]) -> None:
        self._tree = tree
        self._log = log
        self._send = send
        self._epoch = secrets.randbits(62)
        self._number = 0

    def publish_changes(self) -> None:
        """Send the changes since the last call, if there are any."""
        added, removed = self._log.take()
        if added or removed:
            self._number += 1
            self._publish(added, removed)

    def publish_whole(self) -> None:
        """Send all pages of the tree, after the changes that have not been sent yet."""
        self.publish_changes()
        self._publish(self._log.whole(self._tree.nodes()), whole=True)

    def _publish(self, added: Sequence[Page], removed: Sequence[int] = (), *, whole: bool = False) -> None:
        self._send(
            TreeChange(
                epoch=self._epoch,
                number=self._number,
                added=tuple(page.digest for page in added),
                removed=tuple(removed),
                runs=_runs(added) if self._log.tokens else (),
                whole=whole,
            )
        )


def _runs(pages: Sequence[Page]) -> tuple[PageRun, ...]:
    """`pages` as runs, in order. A new run begins at each page that does not continue the page before it."""
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


@dataclasses.dataclass(eq=False)
class Control:
    """Answers control calls.

    model : the name or path of the model, as given to the engine
    pinned_share : `EngineConfig.max_pinned_share`
    """

    requests: Lifecycle
    adapters: Adapters
    transfers: Transfers
    model: str
    pinned_share: float

    @property
    def handlers(self) -> dict[type, Callable[..., None]]:
        """Handlers by the type of the message."""
        return {
            AwaitTools: self._await_tools,
            EndProgram: self._end_program,
            FlushCache: functools.partial(self._answer, self._flush),
            GetStats: functools.partial(self._answer, lambda message: {"stats": self.stats()}),
            GetSnapshot: functools.partial(self._answer, self._snapshot),
            GetCache: functools.partial(self._answer, self._cache),
            ReleaseHold: functools.partial(self._answer, self._release),
            LoadLora: functools.partial(self._answer, self._load_lora),
            UnloadLora: functools.partial(self._answer, self._unload_lora),
            **self.transfers.handlers,
        }

    def _answer(self, call: Callable[[Any], dict[str, Any]], message: Any) -> None:
        """Reply with the fields that `call` returns for `message`. If `call` raises, reply with `Failed`."""
        try:
            reply = Reply(rid=message.rid, **call(message))
        except RamifyError as error:
            self.requests.refuse(message.rid, error)
        except Exception as error:
            log.exception("a control call failed")
            self.requests.refuse(message.rid, EngineError(f"{type(message).__name__} failed: {error}"))
        else:
            self.requests.reply(reply)

    def stats(self) -> SchedulerStats:
        pages, states = self.requests.pages.cache.counts(), self.requests.pages.cache.state_counts()
        cold = self.requests.pages.cold
        return SchedulerStats(
            running=len(self.requests.running),
            waiting=len(self.requests.waiting) + (0 if cold is None else cold.held),
            compiling=len(self.requests.compiling),
            evicted_pages=pages.evicted,
            pages_total=pages.total,
            pages_free=pages.free,
            pages_evictable=pages.evictable,
            pages_leased=pages.leased,
            pages_in_use=pages.in_use,
            pages_pinned=pages.pinned,
            pages_touched=pages.touched,
            page_size=self.requests.pages.cache.page_size,
            states_total=states.total,
            states_free=states.free,
            states_held=states.held,
            states_in_use=states.in_use,
            evicted_states=states.evicted,
            **({} if cold is None else cold.stats()),
            **dataclasses.asdict(self.requests.counters),
        )

    def _await_tools(self, message: AwaitTools) -> None:
        program = self.requests.programs.find(message.program)
        if program is not None:
            self.requests.pages.leases.await_tools(program, message.program, message.branch, message.tools)

    def _end_program(self, message: EndProgram) -> None:
        self.requests.programs.end(message.program)
        self.requests.pages.leases.end_program(message.program)

    def _flush(self, message: FlushCache) -> dict[str, Any]:
        if (cold := self.requests.pages.cold) is not None:
            cold.flush()  # first: its reads and writes lock pages
        self.requests.pages.cache.flush()
        return {}

    def _load_lora(self, message: LoadLora) -> dict[str, Any]:
        adapter = self.adapters.load(message.name, message.path)
        if not same_model(adapter.base, self.model):
            about = "the LoRA adapter %s is of %s, and the model is %s"
            log.warning(about, adapter.name, adapter.base, self.model)
        return {"lora": adapter.revision}

    def _unload_lora(self, message: UnloadLora) -> dict[str, Any]:
        self.adapters.unload(message.name)
        return {}

    def _cache(self, message: GetCache) -> dict[str, Any]:
        cache, page_bytes = self.requests.pages.cache, self.transfers.pool.page_bytes * self.transfers.ranks
        found = contents(
            cache, page_bytes, self.pinned_share, message.most, ids=message.ids, owners=message.owners
        )
        return {"cache": found}

    def _release(self, message: ReleaseHold) -> dict[str, Any]:
        return {"released": self.requests.pages.cache.end_leases(message.owner)}

    def _snapshot(self, message: GetSnapshot) -> dict[str, Any]:
        queue, hidden = shares(self.requests, message.programs)
        views = self.requests.pages.cache.snapshot(message.nodes)
        # `TreeNode` has the fields of `NodeView`.
        nodes = tuple(msgspec.convert(view, TreeNode, from_attributes=True) for view in views)
        return {"stats": self.stats(), "snapshot": Snapshot(nodes=nodes, queue=queue, queue_hidden=hidden)}
