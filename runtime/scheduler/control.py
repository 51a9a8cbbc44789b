"""Messages to the scheduler that are not about one request: programs, the cache, statistics, snapshots."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from ramify.engine_messages import (
    AwaitTools,
    EndProgram,
    Failed,
    FlushCache,
    GetSnapshot,
    GetStats,
    LoadLora,
    Reply,
    Snapshot,
    UnloadLora,
)
from ramify.errors import EngineError, RamifyError
from ramify.messages import SchedulerStats
from ramify.runtime.lora_names import same_model
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.scheduler.counters import Counters
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.snapshot import shares, tree_nodes

log = logging.getLogger("ramify")


@dataclasses.dataclass(eq=False)
class Control:
    """Answers to `reply`."""

    pages: RequestPages
    programs: Programs
    requests: Lifecycle
    counters: Counters
    adapters: Adapters
    model: str
    """Its name or path, as the engine was given it."""
    reply: Callable[[Reply | Failed], None]

    @property
    def handlers(self) -> dict[type, Callable[..., None]]:
        """By the type of the message."""
        return {
            AwaitTools: self._await_tools,
            EndProgram: self._end_program,
            FlushCache: self._flush,
            GetStats: lambda message: self.reply(Reply(rid=message.rid, stats=self.stats())),
            GetSnapshot: self._snapshot,
            LoadLora: self._load_lora,
            UnloadLora: self._unload_lora,
        }

    def stats(self) -> SchedulerStats:
        pages, states = self.pages.cache.counts(), self.pages.cache.state_counts()
        return SchedulerStats(
            running=len(self.requests.running),
            waiting=len(self.requests.waiting),
            compiling=len(self.requests.compiling),
            evicted_pages=pages.evicted,
            pages_total=pages.total,
            pages_free=pages.free,
            pages_evictable=pages.evictable,
            pages_leased=pages.leased,
            pages_in_use=pages.in_use,
            page_size=self.pages.cache.page_size,
            states_total=states.total,
            states_free=states.free,
            states_held=states.held,
            states_in_use=states.in_use,
            evicted_states=states.evicted,
            **dataclasses.asdict(self.counters),
        )

    def _await_tools(self, message: AwaitTools) -> None:
        program = self.programs.find(message.program)
        if program is not None:
            self.pages.leases.await_tools(program, message.program, message.branch, message.tools)

    def _end_program(self, message: EndProgram) -> None:
        self.programs.end(message.program)
        self.pages.leases.end_program(message.program)

    def _flush(self, message: FlushCache) -> None:
        self.pages.cache.flush()
        self.reply(Reply(rid=message.rid))

    def _load_lora(self, message: LoadLora) -> None:
        try:
            adapter = self.adapters.load(message.name, message.path)
        except RamifyError as error:
            self.reply(Failed(rid=message.rid, error=error.to_info()))
        except Exception as error:
            log.exception("loading the adapter %s failed", message.name)
            failure = EngineError(f"Loading the LoRA adapter {message.name!r} failed: {error}")
            self.reply(Failed(rid=message.rid, error=failure.to_info()))
        else:
            if not same_model(adapter.base, self.model):
                log.warning(
                    "the LoRA adapter %s is of %s, and the model is %s",
                    adapter.name,
                    adapter.base,
                    self.model,
                )
            self.reply(Reply(rid=message.rid, lora=adapter.revision))

    def _unload_lora(self, message: UnloadLora) -> None:
        try:
            self.adapters.unload(message.name)
        except RamifyError as error:
            self.reply(Failed(rid=message.rid, error=error.to_info()))
        else:
            self.reply(Reply(rid=message.rid))

    def _snapshot(self, message: GetSnapshot) -> None:
        queue, hidden = shares(self.requests, message.programs)
        nodes = tree_nodes(self.pages.cache.snapshot(message.nodes))
        snapshot = Snapshot(nodes=nodes, queue=queue, queue_hidden=hidden)
        self.reply(Reply(rid=message.rid, stats=self.stats(), snapshot=snapshot))
