"""Control calls of the server and of `Engine`, and the futures of their answers."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ramify.cache_contents import CacheContents
from ramify.engine_messages import (
    AwaitTools,
    Detokenize,
    EndProgram,
    FlushCache,
    GetCache,
    GetSnapshot,
    GetStats,
    LoadLora,
    ReleaseHold,
    Reply,
    Snapshot,
    Texts,
    TokenIds,
    Tokenize,
    ToTokenizer,
    UnloadLora,
)
from ramify.errors import RamifyError
from ramify.messages import Generate, SchedulerStats
from ramify.runtime.faults import unsendable
from ramify.runtime.frontend.prompts import check_prompt

MOST_HOLDS = 100
"""Most holds of a replica that `ControlClient.cache` tells."""

ControlCall = (
    GetStats
    | GetSnapshot
    | GetCache
    | ReleaseHold
    | FlushCache
    | LoadLora
    | UnloadLora
    | Tokenize
    | Detokenize
)
"""Messages that the engine core answers by `Reply` or `Texts`."""


class Replies:
    """The control calls that have not been answered. `send` sends a message to the replicas."""

    def __init__(self, send: Callable[[ToTokenizer], None]) -> None:
        self._send = send
        self.waiting: dict[str, asyncio.Future[Reply | Texts]] = {}
        """Id of a control call → future of its answer."""

    def post(self, message: ControlCall) -> asyncio.Future[Reply | Texts]:
        """Send a control call at once. Returns the future of its answer."""
        future: asyncio.Future[Reply | Texts] = asyncio.get_running_loop().create_future()
        self.waiting[message.rid] = future
        future.add_done_callback(lambda _: self.waiting.pop(message.rid, None))
        try:
            self._send(message)
        except Exception as error:
            future.set_exception(unsendable(error))
        return future

    def take(self, answer: Reply | Texts) -> None:
        future = self.waiting.get(answer.rid)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, rid: str, error: RamifyError) -> None:
        future = self.waiting.get(rid)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: RamifyError) -> None:
        for future in list(self.waiting.values()):
            if not future.done():
                future.set_exception(copy.copy(error))


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

    async def cache(self, most: int = MOST_HOLDS, *, texts: bool = False, owners: str = "") -> CacheContents:
        """The contents of the prefix cache: at most `most` holds of each replica, and as many prefixes that
        nobody holds; with `texts`, the last tokens of each as text; with `owners`, only the holds of owners
        that begin so."""
        reply = await self._ask(GetCache(rid=self._new_rid(), most=most, ids=texts, owners=owners))
        assert isinstance(reply, Reply)
        assert reply.cache is not None
        found = reply.cache
        if not texts:
            return found
        shown = [*(one.ids for one in found.holds), *(one.ids for one in found.unheld)]
        whole, _ = await self.detokenize(shown, skip_special_tokens=False)
        told = iter(whole)
        lists = {
            "holds": tuple(msgspec.structs.replace(one, ids=(), text=next(told)) for one in found.holds),
            "unheld": tuple(msgspec.structs.replace(one, ids=(), text=next(told)) for one in found.unheld),
        }
        return msgspec.structs.replace(found, **lists)

    async def release(self, owner: str) -> int:
        """Release what `owner` holds: a pin, a program or a session. Returns the number of prefixes."""
        reply = await self._ask(ReleaseHold(rid=self._new_rid(), owner=owner))
        assert isinstance(reply, Reply)
        return reply.released

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
