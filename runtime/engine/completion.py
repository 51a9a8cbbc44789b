"""The answer of one generation, put together from its chunks."""

from __future__ import annotations

from collections.abc import AsyncIterable

import msgspec

from ramify.html.fragment import fragment, head, text
from ramify.messages import (
    Enforcement,
    Finish,
    Generate,
    TextChunk,
    TokenLogprobs,
    Usage,
    Violation,
    concatenated,
)


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished generation."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    enforcement: Enforcement | None = None
    """Differences between the grammar and the constraint, where there is one."""
    violations: tuple[Violation, ...] | None = None
    """Keywords that the text violates, with ``strict="validate"``."""

    def _repr_html_(self) -> str:
        usage = self.usage
        counts = f"{usage.prompt_tokens:,} prompt tokens, {usage.cached_tokens:,} cached"
        facts = (self.finish.reason, counts, f"{usage.completion_tokens:,} output tokens")
        return fragment([head("Completion", *facts), text([(self.text, True)])])


async def completion_of(request: Generate, chunks: AsyncIterable[TextChunk]) -> Completion:
    """The completion that all `chunks` of `request` make."""
    pieces: list[str] = []
    ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs = enforcement = None
    async for chunk in chunks:
        pieces.append(chunk.text)
        ids += chunk.ids
        if chunk.logprobs is not None:
            logprobs.append(chunk.logprobs)
        prompt_logprobs = chunk.prompt_logprobs or prompt_logprobs
        enforcement = chunk.enforcement or enforcement
        last = chunk
    assert last.finish is not None
    return Completion(
        text="".join(pieces),
        ids=tuple(ids),
        finish=last.finish,
        usage=last.usage or Usage(),
        logprobs=None if request.sampling.logprobs is None else concatenated(logprobs) or TokenLogprobs(),
        prompt_logprobs=prompt_logprobs,
        enforcement=enforcement,
        violations=last.violations,
    )
