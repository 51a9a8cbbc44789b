"""Real engines for programs: a tiny random model in float32, and a record of its requests and outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ramify.engine_messages import Submit
from ramify.lang.backends.base import Backend
from ramify.messages import Generate, TextChunk, Usage
from ramify.model_info import ModelInfo
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.sampling_params import SamplingParams
from tests.runtime.tiny import write_model, write_tokenizer

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 4096, "threads": 1}
"""Options of an engine with enough pages that nothing is evicted."""


def write_long(folder: Path) -> Path:
    """A tiny model whose tokens are bytes, with a context that holds the prompts of real programs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, context_length=16384)
    write_tokenizer(folder)
    return folder


@dataclass
class Asked:
    """One request with its output."""

    request: Generate
    ids: tuple[int, ...] = ()
    usage: Usage = field(default_factory=Usage)


class Recording:
    """A backend that passes requests on and records their beginnings and ends in order."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.events: list[tuple[bool, Asked]] = []
        """(it has ended, the request)"""

    async def info(self) -> ModelInfo:
        return await self._backend.info()

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        asked = Asked(request)
        self.events.append((False, asked))
        async with aclosing(cast("Any", self._backend.generate(request))) as chunks:
            async for chunk in chunks:
                asked.ids += chunk.ids
                asked.usage = chunk.usage or asked.usage
                if chunk.finish is not None:
                    self.events.append((True, asked))
                yield chunk

    async def end_program(self, program: str) -> None:
        await self._backend.end_program(program)

    async def aclose(self) -> None:
        """Does nothing: the test that opened the backend closes it."""

    @property
    def asked(self) -> list[Asked]:
        return [asked for ended, asked in self.events if ended]


@dataclass(frozen=True)
class Work:
    """Prompt tokens of a set of requests."""

    sent: int
    computed: int
    """The number of prompt tokens that the backend computed."""
    distinct: int
    """Tokens in the tree of all prompts, without those that a request had generated before."""
    for_logits: int
    """Known tokens that are computed again for their logits, which are not cached.

    Counted in the order of arrival. A scheduler that runs such a request before those that it shares a prefix
    with computes fewer of them again.
    """
    forced: int
    """Output tokens that a grammar forced. Forced tokens at the end of an output are never computed."""
    requests: int
    programs: int
    reported: int
    """The sum of the backend's `distinct_tokens`, which it counts for each program by itself."""

    def check(self) -> None:
        """Assert that nothing was computed twice, and that all that had to be computed was."""
        assert self.distinct <= self.computed <= self.distinct + self.for_logits + self.forced, self
        if self.programs == 1:
            assert self.reported <= self.computed, self
        # Several programs share what is in the cache.
        assert self.computed <= self.reported + self.for_logits, self


def work_of(events: Sequence[tuple[bool, Asked]], tokenise: Callable[[Generate], Submit]) -> Work:
    """The tokens that `events` had to compute, counted on a tree of single tokens, and those that they did.

    A prompt is known from the moment it is sent, as a request waits for another one that computes a shared
    prefix. An output without its last token, which is never computed, is known from its end on.
    """
    tree: dict[int, Any] = {}
    sent = computed = distinct = for_logits = forced = requests = reported = 0
    for ended, asked in events:
        request = tokenise(asked.request)
        if ended:
            if not request.choices:
                _insert(tree, [*request.ids, *asked.ids[:-1]])
            continue
        requests += 1
        own: dict[int, Any] = {}
        for path, reusable in _paths(request):
            before, known = _insert(own, path), _insert(tree, path)
            sent += len(path) - before
            distinct += len(path) - known
            for_logits += max(known - max(reusable, before), 0)
    for ended, asked in events:
        if ended:
            computed += asked.usage.prompt_tokens - asked.usage.cached_tokens
            forced += asked.usage.forced_tokens
            reported += asked.usage.distinct_tokens
    programs = {asked.request.hint.program for _, asked in events if asked.request.hint is not None}
    return Work(sent, computed, distinct, for_logits, forced, requests, len(programs), reported)


def _paths(request: Submit) -> list[tuple[Sequence[int], int]]:
    """The sequences that a request computes, each with the number of its tokens that the cache can supply.

    Tokens whose logits are requested cannot come from the cache. The last token of a choice is scored without
    being computed.
    """
    if not request.choices:
        return [(request.ids, _reusable(request.sampling, len(request.ids)))]
    first = min(choice.shared + choice.dropped for choice in request.choices)
    found = [(request.ids[: one.shared] + one.ids[:-1], max(first - 1, 0)) for one in request.choices]
    if request.unconditional:
        found += [(choice.ids[choice.dropped : -1], 0) for choice in request.choices]
    return found


def _reusable(sampling: SamplingParams, length: int) -> int:
    """Most tokens of a prompt that the cache can supply: not those whose logits are requested."""
    if sampling.prompt_logprobs_start is not None:
        return max(sampling.prompt_logprobs_start - 1, 0)
    return length if sampling.max_tokens == 0 else length - 1


def _insert(tree: dict[int, Any], ids: Sequence[int]) -> int:
    """Insert `ids`; returns the number of ids that were there before."""
    known = 0
    for token in ids:
        if token in tree:
            known += 1
        tree = tree.setdefault(token, {})
    return known


def tokeniser(folder: Path) -> Callable[[Generate], Submit]:
    """The engine's own tokenization of requests."""
    return PromptTokenizer(load_tokenizer(folder)).submit
