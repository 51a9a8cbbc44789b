"""Real engines for programs: a tiny random model in float32, and what it was asked and answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ramify.lang.backends.base import Backend
from ramify.messages import Generate, ModelInfo, TextChunk, Usage
from ramify.ring_messages import Submit
from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer
from ramify.runtime.processes.tokenizer import PromptTokenizer
from ramify.sampling_params import SamplingParams
from tests.runtime.tiny import write_model, write_tokenizer

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 4096, "threads": 1}
"""Pages enough that nothing is evicted."""


def write_long(folder: Path) -> Path:
    """A tiny model whose tokens are bytes, with a context that holds the prompts of real programs."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, context_length=16384)
    write_tokenizer(folder)
    return folder


@dataclass
class Asked:
    """One request: what was sent, and what came back."""

    request: Generate
    ids: tuple[int, ...] = ()
    usage: Usage = field(default_factory=Usage)


class Recording:
    """A backend that passes everything on and notes, in order, when a request is sent and when it ends."""

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
        """The backend is closed by whoever opened it."""

    @property
    def asked(self) -> list[Asked]:
        return [asked for ended, asked in self.events if ended]


@dataclass(frozen=True)
class Work:
    """Prompt tokens of a set of requests."""

    sent: int
    computed: int
    """What the backend says that it computed."""
    distinct: int
    """Nodes of the tree of all prompts that no request had generated itself."""
    for_logits: int
    """Tokens computed although they were known: the logits behind them were needed, and are not kept."""
    forced: int
    """Output tokens that a grammar forced. Those at the end of an output are never computed with it."""
    requests: int
    programs: int
    told: int
    """What the backend says that is distinct, each program by itself."""

    def check(self) -> None:
        """Nothing was computed twice, and nothing was saved that had to be computed."""
        least = self.distinct + self.for_logits
        assert least <= self.computed <= least + self.forced, self
        if self.programs == 1:
            assert self.computed == self.told + self.for_logits, self
        else:  # they share what is in the cache
            assert self.computed <= self.told + self.for_logits, self


def work_of(events: Sequence[tuple[bool, Asked]], tokenise: Callable[[Generate], Submit]) -> Work:
    """What `events` should have cost, by a tree of single tokens, beside what it did cost.

    A prompt is known from the moment it is sent, as requests wait for others that compute what they share;
    an output from its end on, but for its last token, which is never computed.
    """
    tree: dict[int, Any] = {}
    sent = computed = distinct = for_logits = forced = requests = told = 0
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
            told += asked.usage.distinct_tokens
    programs = {asked.request.hint.program for _, asked in events if asked.request.hint is not None}
    return Work(sent, computed, distinct, for_logits, forced, requests, len(programs), told)


def _paths(request: Submit) -> list[tuple[Sequence[int], int]]:
    """What a request computes, as sequences, and how much of each may be taken from the cache: not the tokens
    whose logits are asked for. The last token of a choice is scored, and not computed."""
    if not request.choices:
        return [(request.ids, _reusable(request.sampling, len(request.ids)))]
    first = min(choice.shared + choice.dropped for choice in request.choices)
    found = [(request.ids[: one.shared] + one.ids[:-1], max(first - 1, 0)) for one in request.choices]
    if request.unconditional:
        found += [(choice.ids[choice.dropped : -1], 0) for choice in request.choices]
    return found


def _reusable(sampling: SamplingParams, length: int) -> int:
    """How many tokens of a prompt can be taken from the cache: not those whose logits are asked for."""
    if sampling.prompt_logprobs_start is not None:
        return max(sampling.prompt_logprobs_start - 1, 0)
    return length if sampling.max_tokens == 0 else length - 1


def _insert(tree: dict[int, Any], ids: Sequence[int]) -> int:
    """Insert `ids`; how many of them were known."""
    known = 0
    for token in ids:
        if token in tree:
            known += 1
        tree = tree.setdefault(token, {})
    return known


def tokeniser(folder: Path) -> Callable[[Generate], Submit]:
    """How the engine turns a request into tokens."""
    return PromptTokenizer(load_tokenizer(folder)).submit
