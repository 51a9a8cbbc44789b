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
from ramify.runtime.generation import GenerationResult


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished generation."""

    text: str
    ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    enforcement: Enforcement | None = None
    """Differences between the grammar and the constraint; None without a constraint."""
    violations: tuple[Violation, ...] | None = None
    """Schema keywords that the text violates, with ``strict="validate"``; otherwise None."""

    def _repr_html_(self) -> str:
        usage = self.usage
        counts = f"{usage.prompt_tokens:,} prompt tokens, {usage.cached_tokens:,} cached"
        facts = (self.finish.reason, counts, f"{usage.completion_tokens:,} output tokens")
        return fragment([head("Completion", *facts), text([(self.text, True)])])


async def completion_of(request: Generate, chunks: AsyncIterable[TextChunk]) -> Completion:
    """The completion put together from all `chunks` of `request`."""
    result = GenerationResult()
    async for chunk in chunks:
        result.add_chunk(chunk)
    assert result.finish is not None
    logprobs = None
    if request.sampling.logprobs is not None:
        logprobs = concatenated(result.logprobs) or TokenLogprobs()
    return Completion(
        text=result.text,
        ids=tuple(result.ids),
        finish=result.finish,
        usage=result.usage,
        logprobs=logprobs,
        prompt_logprobs=concatenated(result.prompt_logprobs),
        enforcement=result.enforcement,
        violations=result.violations,
    )
