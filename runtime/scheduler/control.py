"""Messages to the scheduler that are about no request: programs, the cache, what its state is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ramify.messages import (
    AwaitTools,
    EndProgram,
    Failed,
    FlushCache,
    GetSnapshot,
    GetStats,
    Reply,
    SchedulerStats,
    Snapshot,
)
from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.counters import Ledger
from ramify.runtime.scheduler.programs.leases import ProgramLeases
from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.snapshot import shares, tree_nodes


class Control:
    """Answers to `reply`. `running`, `waiting` and `compiling` are the scheduler's own."""

    def __init__(
        self,
        cache: PrefixCache,
        leases: ProgramLeases,
        programs: Programs,
        ledger: Ledger,
        reply: Callable[[Reply | Failed], None],
        *,
        running: Sequence[Request],
        waiting: Sequence[Request],
        compiling: Mapping[str, Request],
    ) -> None:
        self._cache, self._leases, self._programs, self._ledger = cache, leases, programs, ledger
        self._reply = reply
        self._running, self._waiting, self._compiling = running, waiting, compiling
        self.handlers: dict[type, Callable[..., None]] = {
            AwaitTools: self._await_tools,
            EndProgram: self._end_program,
            FlushCache: self._flush,
            GetStats: lambda message: reply(Reply(rid=message.rid, stats=self.stats())),
            GetSnapshot: self._snapshot,
        }
        """By the type of the message."""

    def stats(self) -> SchedulerStats:
        ledger, pages = self._ledger, self._cache.counts()
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            compiling=len(self._compiling),
            steps=ledger.steps,
            prompt_tokens=ledger.prompt_tokens,
            cached_tokens=ledger.cached_tokens,
            computed_tokens=ledger.computed_tokens,
            output_tokens=ledger.output_tokens,
            forced_tokens=ledger.forced_tokens,
            guessed_tokens=ledger.guessed_tokens,
            accepted_tokens=ledger.accepted_tokens,
            retractions=ledger.retractions,
            evicted_pages=pages.evicted,
            pages_total=pages.total,
            pages_free=pages.free,
            pages_evictable=pages.evictable,
            pages_leased=pages.leased,
            pages_in_use=pages.in_use,
            page_size=self._cache.page_size,
            step_s=ledger.step_s,
            model_s=ledger.model_s,
        )

    def _await_tools(self, message: AwaitTools) -> None:
        program = self._programs.find(message.program)
        if program is not None:
            self._leases.await_tools(program, message.program, message.branch, message.tools)

    def _end_program(self, message: EndProgram) -> None:
        self._programs.end(message.program)
        self._leases.end_program(message.program)

    def _flush(self, message: FlushCache) -> None:
        self._cache.flush()
        self._reply(Reply(rid=message.rid, flushed=True))

    def _snapshot(self, message: GetSnapshot) -> None:
        queue, hidden = shares(self._running, self._waiting, self._compiling.values(), message.programs)
        nodes = tree_nodes(self._cache.snapshot(message.nodes))
        held = Snapshot(nodes=nodes, queue=queue, queue_hidden=hidden)
        self._reply(Reply(rid=message.rid, stats=self.stats(), snapshot=held))
