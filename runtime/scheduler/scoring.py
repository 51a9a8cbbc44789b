"""Choices that are scored behind a prompt: what is computed for them, and what its states predict.

The tokens of all choices are a tree. Its leaves are scored only; all above them is computed, each token
once, in stretches from one fork to the next. The first stretch, which begins with the prompt, is the request
itself: its last state scores the first token of every choice. A stretch behind a fork is a request of its own
inside the scheduler. It finds in the prefix cache what comes before it; all behind one fork are admitted
together. Choices without the prompt are a tree of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ramify.messages import ChoiceScore, Finish, ProgramHint, Submit, TokenLogprobs
from ramify.radix.token_tree import TokenTree
from ramify.runtime.executor.attention import picked
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.next_tokens import LOGPROB_ROWS
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.request import Request
from ramify.sampling_params import SamplingParams


class Entry(NamedTuple):
    """A choice behind the first tokens of the prompt, or behind nothing."""

    ids: tuple[int, ...]
    first: int
    """The first of `ids` that is scored."""
    values: list[float | None]
    """Log-probabilities of those from there on, as they are found. Nothing predicts a first token of all."""

    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs(ids=self.ids[self.first :], logprobs=tuple(self.values))


class Stretch:
    """The tokens of `entries` from place `start` to the next fork, or to where nothing but leaves follows.

    base : tokens before place 0
    shared : up to there the entries have the same tokens
    """

    def __init__(self, entries: Sequence[Entry], base: int, start: int, shared: int) -> None:
        going = [entry for entry in entries if shared < len(entry.ids) - 1]
        end = shared
        while len({entry.ids[end] for entry in going}) == 1:
            end += 1
            going = [entry for entry in going if end < len(entry.ids) - 1]
        self._going, self._base, self._end = going, base, end
        self.tokens = max(entries, key=lambda entry: len(entry.ids)).ids[start:end]
        self.wanted: dict[int, list[tuple[int, Entry]]] = {}
        """By the position of a state: the tokens that it scores, and whose they are."""
        for entry in entries:
            for place in range(max(shared, entry.first), min(end + 1, len(entry.ids))):
                if base + place > 0:
                    self.wanted.setdefault(base + place - 1, []).append((entry.ids[place], entry))
        self.first_state = min(self.wanted, default=base + end)

    def note(self, position: int, values: Sequence[float]) -> None:
        """The log-probabilities of what the state at `position` scores."""
        for (_, entry), value in zip(self.wanted[position], values, strict=True):
            entry.values[position + 1 - self._base - entry.first] = value

    def following(self) -> list[Stretch]:
        """Those behind the fork that it ends in."""
        branches: dict[int, list[Entry]] = {}
        for entry in self._going:
            branches.setdefault(entry.ids[self._end], []).append(entry)
        return [Stretch(branch, self._base, self._end, self._end + 1) for branch in branches.values()]


class Scoring:
    """The choices of one request."""

    def __init__(self, submit: Submit) -> None:
        base = min(choice.shared for choice in submit.choices)
        self._exact = [choice.shared == len(submit.ids) for choice in submit.choices]
        self._prompt = submit.ids[:base]
        self._behind = [
            _entry(submit.ids[base : choice.shared] + choice.ids, choice.shared - base + choice.dropped)
            for choice in submit.choices
        ]
        self._alone: list[Entry] = []
        self._trees = [self._behind]
        if submit.unconditional and submit.ids:
            self._alone = [_entry(entry.ids[entry.first :], 0) for entry in self._behind]
            self._trees.append(self._alone)
        elif submit.unconditional:
            self._alone = self._behind  # there is nothing before them
        self.first = Stretch(self._behind, base, 0, 0)
        self.ids = self._prompt + self.first.tokens
        """Tokens of the first stretch, with those of the prompt."""
        self.tokens = base + sum(map(_computed, self._trees))
        """All that is computed, the prompt's included."""
        self.longest = base + max(len(entry.ids) for entry in self._behind)
        """Tokens of the longest choice with the prompt."""
        self.open: set[Request] = set()
        """Whose stretches are not done."""
        self.resting: list[Request] = []
        """Whose stretches are done, while those behind them are not."""
        self.numbers = itertools.count(1)

    def alone(self) -> list[Stretch]:
        """The first stretches of the choices without the prompt."""
        return [stretch for tree in self._trees[1:] for stretch in _begun(Stretch(tree, 0, 0, 0))]

    def paths(self) -> Iterator[np.ndarray]:
        """All that is computed, as sequences (n,) int32."""
        yield np.array(self.ids, dtype=np.int32)
        for before, entries in zip((self._prompt, ()), self._trees, strict=False):
            for ids in {entry.ids[:-1] for entry in entries}:
                yield np.array(before + ids, dtype=np.int32)

    def scores(self) -> tuple[ChoiceScore, ...]:
        alone: list[TokenLogprobs | None] = [entry.logprobs() for entry in self._alone]
        alone = alone or [None] * len(self._behind)
        return tuple(
            ChoiceScore(tokens=entry.logprobs(), behind=exact, unconditional=bare)
            for entry, exact, bare in zip(self._behind, self._exact, alone, strict=True)
        )


class Computed(NamedTuple):
    """Positions ``[start, stop)`` of a request, whose states begin in row `row` of a step's."""

    request: Request
    start: int
    stop: int
    row: int


class Scorer:
    """Reads scores off a step's states and goes from stretch to stretch.

    `enqueue` lets a request wait for admission, `remove` takes one from the running ones, and `finish` ends
    a request whose choices are scored.
    """

    def __init__(
        self,
        runner: Runner,
        pages: RequestPages,
        enqueue: Callable[[Request], None],
        remove: Callable[[Request], None],
        finish: Callable[[Request, Finish], None],
    ) -> None:
        self._runner = runner
        self._pages = pages
        self._enqueue = enqueue
        self._remove = remove
        self._finish = finish

    def begin(self, head: Request, now: float) -> None:
        """`head` has arrived with choices."""
        scoring = head.scoring
        assert scoring is not None
        scoring.open.add(head)
        for stretch in scoring.alone():
            self._branch(head, (), stretch)
        if head.length:
            self._enqueue(head)
        else:
            self.go_on(head, now)

    def read(self, computed: Sequence[Computed], hidden: torch.Tensor) -> None:
        """Note what the states of a step score. `hidden` (tokens, hidden size)."""
        rows: list[int] = []
        places: list[tuple[Stretch, int]] = []
        for request, start, stop, row in computed:
            stretch = request.stretch
            assert stretch is not None
            wanted = [position for position in range(start, stop) if position in stretch.wanted]
            rows += [row + position - start for position in wanted]
            places += [(stretch, position) for position in wanted]
        for first in range(0, len(rows), LOGPROB_ROWS):
            logits = self._runner.logits(picked(hidden, rows[first : first + LOGPROB_ROWS]))
            some = places[first : first + LOGPROB_ROWS]
            tokens = [[token for token, _ in stretch.wanted[position]] for stretch, position in some]
            for (stretch, position), values in zip(some, log_probabilities(logits, tokens), strict=True):
                stretch.note(position, values)

    def go_on(self, request: Request, now: float) -> None:
        """The stretch of `request` is computed and read: what follows it comes next."""
        head, stretch = request.head, request.stretch
        scoring = head.scoring
        assert scoring is not None
        assert stretch is not None
        following = stretch.following()
        for branch in following:
            self._branch(head, tuple(request.ids.tolist()), branch)
        scoring.open.remove(request)
        if request is head and not scoring.open:
            self._finish(head, Finish(reason="length"))
            return
        if following:
            scoring.resting.append(request)
        self._pages.rest(request, now, awaited=bool(following))
        self._remove(request)
        if not scoring.open:
            self._finish(head, Finish(reason="length"))

    def end(self, head: Request) -> list[Request]:
        """`head` ends, done or not. Returns the requests whose stretches it leaves."""
        scoring = head.scoring
        if scoring is None:
            return []
        for request in scoring.resting:
            self._pages.leases.rested(request)
        return [request for request in scoring.open if request is not head]

    def _branch(self, head: Request, before: tuple[int, ...], stretch: Stretch) -> None:
        """Let `stretch` be computed behind the tokens `before`."""
        scoring, hint = head.scoring, head.hint
        assert scoring is not None
        submit = Submit(
            rid=f"{head.rid}/{next(scoring.numbers)}",
            ids=before + stretch.tokens,
            sampling=SamplingParams(max_tokens=0),
            hint=None if hint is None else ProgramHint(program=hint.program, name=hint.name),
            scope=head.scope,
        )
        request = Request(submit, arrival=head.arrival, max_tokens=0, default_seed=0)
        request.head, request.stretch, request.program = head, stretch, head.program
        request.served_before = head.served_before
        # All this is told of the head.
        request.first_pass, request.cached_len = head.arrival, 0
        scoring.open.add(request)
        self._enqueue(request)


@torch.inference_mode()
def log_probabilities(logits: torch.Tensor, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """For each row of `logits`, (R, vocab), the log-probabilities of its `tokens`."""
    logits = logits.float()
    counts = [len(some) for some in tokens]
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(logits.device)
    wanted = torch.tensor(list(itertools.chain.from_iterable(tokens)), device=logits.device)
    values = iter((logits[rows, wanted] - torch.logsumexp(logits, dim=-1)[rows]).tolist())
    return [list(itertools.islice(values, count)) for count in counts]


def _entry(ids: tuple[int, ...], first: int) -> Entry:
    return Entry(ids, first, [None] * (len(ids) - first))


def _begun(root: Stretch) -> list[Stretch]:
    """A tree's first stretch, or those behind it where it forks at once."""
    return [root] if root.tokens else root.following()


def _computed(entries: Sequence[Entry]) -> int:
    """How many distinct tokens of a tree are computed."""
    tree = TokenTree()
    for entry in entries:
        tree.insert(entry.ids[:-1])
    return tree.tokens
