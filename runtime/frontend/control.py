"""Control calls of the server and of `Engine`: counters, tokenisation, the cache, programs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ramify.engine_messages import (
    AwaitTools,
    Detokenize,
    EndProgram,
    FlushCache,
    GetSnapshot,
    GetStats,
    Reply,
    Snapshot,
    Texts,
    TokenIds,
    Tokenize,
)
from ramify.messages import Generate, SchedulerStats
from ramify.runtime.frontend.prompts import check_prompt
from ramify.runtime.frontend.replies import ControlCall


class ControlClient:
    """Control calls to the replicas.

    ask : sends a call, and returns its answer
    tell : sends a message that has no answer
    new_rid : returns a new id for a call
    max_prompt_tokens : returns the length of the longest prompt, in tokens
    """

    def __init__(
        self,
        ask: Callable[[ControlCall], Awaitable[Reply | Texts]],
        tell: Callable[[AwaitTools | EndProgram], None],
        new_rid: Callable[[], str],
        max_prompt_tokens: Callable[[], int],
    ) -> None:
        self._ask = ask
        self._tell = tell
        self._new_rid = new_rid
        self._max_prompt_tokens = max_prompt_tokens

    async def stats(self) -> SchedulerStats:
        """Counters of the scheduler; with several replicas their sums."""
        reply = await self._ask(GetStats(rid=self._new_rid()))
        assert isinstance(reply, Reply)
        assert reply.stats is not None
        return reply.stats

    async def snapshot(self, nodes: int, programs: int) -> tuple[SchedulerStats, Snapshot]:
        """The scheduler's counters, and a snapshot of at most `nodes` nodes of its radix tree and `programs`
        queued programs."""
        reply = await self._ask(GetSnapshot(rid=self._new_rid(), nodes=nodes, programs=programs))
        assert isinstance(reply, Reply)
        assert reply.stats is not None
        assert reply.snapshot is not None
        return reply.stats, reply.snapshot

    async def flush_cache(self) -> None:
        """Drop every cached page that no running request uses."""
        await self._ask(FlushCache(rid=self._new_rid()))

    async def tokenize(self, prompts: Sequence[Generate], *, special: bool) -> tuple[TokenIds, ...]:
        """Token ids of each prompt, with special tokens or without. Raises `InvalidRequest`."""
        for prompt in prompts:
            check_prompt(prompt, self._max_prompt_tokens())
        reply = await self._ask(Tokenize(rid=self._new_rid(), prompts=tuple(prompts), special=special))
        assert isinstance(reply, Texts)
        return reply.prompts

    async def detokenize(
        self, ids: Sequence[tuple[int, ...]], *, skip_special_tokens: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Two texts of each list in `ids`: the first with all tokens, the second without special tokens if
        `skip_special_tokens` is set."""
        reply = await self._ask(
            Detokenize(rid=self._new_rid(), ids=tuple(ids), skip_special_tokens=skip_special_tokens)
        )
        assert isinstance(reply, Texts)
        return reply.whole, reply.text

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        """See `AwaitTools`."""
        self._tell(AwaitTools(program=program, branch=branch, tools=tools))

    async def end_program(self, program: str) -> None:
        """See `EndProgram`."""
        self._tell(EndProgram(program=program))
