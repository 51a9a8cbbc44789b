"""Scripted backends that fail or wait at a given chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from msgspec.structs import replace

from ramify.lang.backends.scripted import ScriptedBackend
from ramify.lang.common.event import Event
from ramify.messages import Generate, TextChunk


class Breaking(ScriptedBackend):
    """Raises `error` after `after` chunks of every generation whose prompt contains `where`, or with `once`
    only of the first generation."""

    def __init__(self, answers, error: Exception, after: int, where: str = "", *, once: bool = False) -> None:
        super().__init__(answers)
        self.error, self.after, self.where, self.once = error, after, where, once

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        breaks = self.where in self.prompt_text(request)
        count = 0
        async for chunk in super().generate(request):
            again = self.once and len(self.requests) > 1
            if breaks and count == self.after and not again:
                raise self.error
            yield chunk
            count += 1


class Holding(ScriptedBackend):
    """Waits after the first chunk of each generation until `release` is set.

    `started` is set at the first such wait; `aborted` counts the generations that were closed while waiting.
    """

    def __init__(self, answers) -> None:
        super().__init__(answers)
        self.started, self.release = Event(), Event()
        self.aborted = self.holding = self.most = 0

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        held = False
        async for chunk in super().generate(request):
            yield chunk
            if held:
                continue
            held = True
            self.holding += 1
            self.most = max(self.most, self.holding)
            self.started.set()
            try:
                await self.release.wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.aborted += 1
                raise
            finally:
                self.holding -= 1


PHASES = {"grammar_s": 2.0, "queue_s": 0.5, "prefill_s": 0.25, "decode_s": 1.25}
"""`Call.phases` of the requests that `Timed` answers."""


class Timed(ScriptedBackend):
    """Reports the times `PHASES`, as an engine does."""

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        async for chunk in super().generate(request):
            if chunk.usage is not None:
                times = {"grammar_s": 2.0, "queue_s": 0.5, "first_token_s": 2.75, "total_s": 4.0}
                chunk = replace(chunk, usage=replace(chunk.usage, **times))
            yield chunk
