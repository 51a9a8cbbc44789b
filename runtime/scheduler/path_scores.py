"""Scores of questions: the log-probabilities of paths, computed from the hidden states of a wave."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ramify.errors import EngineError
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.registry import LogSum
from ramify.messages import Finish
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.requests.decisions import Branch, Part
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.sampling import LOGPROB_ROWS

log = logging.getLogger("ramify")


class ComputedWave(NamedTuple):
    """A computed wave of branches. The hidden states of its tokens are in the rows of the step from `row`
    on."""

    request: Request
    parts: Sequence[Part]
    row: int


@dataclasses.dataclass(eq=False)
class PathScorer:
    """Computes the terms of paths (`PathTree`), and finishes requests whose questions are all scored."""

    runner: Runner
    requests: Lifecycle

    def read(self, waves: Sequence[ComputedWave], hidden: torch.Tensor) -> None:
        """Record the terms that `waves` score. `hidden`, (tokens, hidden size), are the step's states."""
        try:
            self._score(waves, hidden)
        except Exception as error:
            log.exception("scoring failed")
            for request, *_ in waves:
                self.requests.fail(request, EngineError(f"Scoring failed: {error}"))
            return
        for request, parts, _ in waves:
            with self.requests.failing_alone(request):
                self.requests.pages.branches.computed(request, parts)
                assert request.decisions is not None
                if not request.decisions.forms:
                    self.requests.finish(request, Finish(reason="length"))

    def _score(self, waves: Sequence[ComputedWave], hidden: torch.Tensor) -> None:
        terms = StepTerms()
        for request, parts, row in waves:
            assert request.decisions is not None
            for branch, start, stop, _ in parts:
                terms.add(branch, start, stop, row, request.decisions.ends)
                row += stop - start
        terms.record(self.runner, hidden)


class WantedMass(NamedTuple):
    """A mass that a step computes: that of the tokens `inside`, or of all but the tokens `outside`.

    row : the row of the hidden state
    values : the terms of its form, of which term `term` is computed
    """

    row: int
    inside: tuple[int, ...]
    outside: tuple[int, ...]
    values: np.ndarray
    term: int


class StepTerms:
    """The terms that the hidden states of one step give."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._wanted: list[np.ndarray] = []
        self._targets: list[tuple[np.ndarray, np.ndarray]] = []
        """For each array of rows and of wanted tokens, the terms of the form, and their indices."""
        self._masses: list[WantedMass] = []

    def add(self, branch: Branch, start: int, stop: int, row: int, ends: tuple[int, ...]) -> None:
        """Add the terms that positions ``[start, stop)`` of `branch` give. Their hidden states are in
        the rows from `row` on."""
        span, values = branch.span, branch.form.values
        assert values is not None
        begin = branch.stop - len(span.tokens)  # the position of the span's first token
        low, high = np.searchsorted(span.at, (start - begin, stop - begin)).tolist()
        if low < high:
            self._rows.append(span.at[low:high] + (row + begin - start))
            self._wanted.append(span.wanted[low:high])
            self._targets.append((values, span.terms[low:high]))
        for at, term, left in span.masses:
            if start <= begin + at < stop:
                inside = () if left else ends
                self._masses.append(WantedMass(row + begin + at - start, inside, left, values, term))

    @torch.inference_mode()
    def record(self, runner: Runner, hidden: torch.Tensor) -> None:
        """Compute the terms, and record them. `hidden`, (tokens, hidden size), are the step's states."""
        if not self._rows and not self._masses:
            return
        masses = sorted(self._masses, key=lambda mass: mass.row)
        rows = np.concatenate([*self._rows, np.array([mass.row for mass in masses], np.int64)])
        needed, place = np.unique(rows, return_inverse=True)
        count = len(rows) - len(masses)
        wanted, of_mass = np.concatenate([*self._wanted, NONE]), place[count:]
        found: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for first in range(0, len(needed), LOGPROB_ROWS):
            last = first + LOGPROB_ROWS
            logits = runner.logits(index_select(hidden, needed[first:last].tolist())).float()
            total = runner.ops.log_sum(logits)
            low, high = np.searchsorted(place[:count], (first, last)).tolist()
            pairs = np.stack([place[low:high] - first, wanted[low:high]])
            at, tokens = to_device(torch.from_numpy(pairs), logits.device)
            found.append(logits[at, tokens] - total[at])
            low, high = np.searchsorted(of_mass, (first, last)).tolist()
            if low < high:
                at = to_device(torch.from_numpy(of_mass[low:high] - first), logits.device)
                sums.append(mass_sums(logits, at, masses[low:high], runner.ops.log_sum) - total[at])
        values = torch.cat(found + sums).double().cpu().numpy()  # the one wait for the device
        done = 0
        for form_values, terms in self._targets:
            form_values[terms] = values[done : done + len(terms)]
            done += len(terms)
        for mass, value in zip(masses, values[count:].tolist(), strict=True):
            mass.values[mass.term] = value


NONE = np.empty(0, np.int64)


def mass_sums(
    logits: torch.Tensor, at: torch.Tensor, masses: Sequence[WantedMass], log_sum: LogSum
) -> torch.Tensor:
    """The logarithm of the sum over the tokens of each of `masses`, (M,), not normalised.

    logits : (R, vocab) float32
    at : (M,) int64, the row of each mass
    """
    kept = logits[at]
    inside = [(place, token) for place, mass in enumerate(masses) for token in mass.inside]
    outside = [(place, token) for place, mass in enumerate(masses) for token in mass.outside]
    if inside:
        places, tokens = to_device(torch.tensor(inside).T, logits.device)
        values = kept[places, tokens]
        kept[places] = -torch.inf
        kept[places, tokens] = values
    if outside:
        places, tokens = to_device(torch.tensor(outside).T, logits.device)
        kept[places, tokens] = -torch.inf
    return log_sum(kept)
