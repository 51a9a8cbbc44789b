"""An estimate of a batch's tokens and time from a sample of its rows: `run_batch(dry_run=True)`.

All rows are read, in the order in which they would run. A random sample of `SAMPLE` rows is run, and the
results are not written. The first row of the sample runs alone, because its request computes the prefix that
all rows share; then the other rows of the sample run together. The estimate is computed from the sample, with
sizes in characters:

    prompt tokens of a row       a + b x the size of its arguments            (least squares)
    computed tokens of a row     c + tokens per character x the part not shared with the row before it
    output tokens of a row       the mean
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ramify.decisions.layouts import BLANK_LINE, written
from ramify.errors import ProgramError
from ramify.lang.batch import runs
from ramify.lang.batch.breaker import Breaker
from ramify.lang.batch.fingerprint import Record
from ramify.lang.batch.results import Plan, RowReader
from ramify.lang.batch.window import Row, text_of
from ramify.lang.trace.calls import Call
from ramify.messages import Usage

if TYPE_CHECKING:
    from ramify.lang.state.state import ProgramState

SAMPLE = 8
"""Number of rows that are run."""
SHOWN_PROMPTS, PROMPT_CHARS = 3, 1200
"""Number of rows whose first prompt is shown, and the number of characters to which the prompt is cut."""


@dataclass(frozen=True)
class BatchEstimate:
    """Expected tokens and time of the rows that have no result yet."""

    rows: int
    """Number of rows to run."""
    skipped: int
    """Number of rows that already have results."""
    sampled: int
    """Number of rows that were run for the estimate. Their results are not written."""
    failed: int
    """Number of rows of the sample that failed."""
    usage: Usage
    """Expected tokens of all rows: prompt, cached and completion tokens."""
    duration_s: float
    """Expected time in seconds if as many rows run at a time as in the sample. An upper bound if more rows
    run at a time."""
    concurrency: int
    prompts: list[tuple[int, str]] = field(repr=False)
    """(row number, first prompt) of the first `SHOWN_PROMPTS` rows of the sample. Behind the prompt of a
    decide are its questions."""
    first_error: str | None = None

    def __str__(self) -> str:
        usage = self.usage
        before = f", {self.skipped} were done before" if self.skipped else ""
        computed = usage.prompt_tokens - usage.cached_tokens
        share = usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
        if not self.rows and self.skipped:
            return f"--- no row is left to run{before}"
        lines = [f"--- row {row}\n{_shorten(prompt)}" for row, prompt in self.prompts]
        lines += [
            f"--- {self.rows} rows to run{before}; estimated from {self.sampled} rows that were run, "
            "and not written",
            f"prompt tokens    {usage.prompt_tokens:>12,} without sharing",
            f"                 {computed:>12,} with sharing ({share:.0%} cached)",
            f"output tokens    {usage.completion_tokens:>12,}",
            f"time             {self.duration_s:>11,.0f} s or less, {self.concurrency} rows at a time",
        ]
        if self.failed:
            lines.append(f"{self.failed} of these rows failed; first error: {self.first_error}")
        return "\n".join(lines)


def estimate_in_threads(
    one: Callable[[runs.Register, Any], ProgramState], rows: Iterable[Any], plan: Plan, record: Record
) -> BatchEstimate:
    """Run the rows of a sample with ``one(register, values)``. Raises `ProgramError` if all rows of the
    sample fail without an answered request, or if the breaker gives up."""
    survey = _Survey(plan, rows, record)
    for part in survey.parts:
        breaker, began = Breaker(iter(part), plan.give_up_after), time.perf_counter()
        for row, state in runs.finished_in_threads(one, breaker, plan.concurrency):
            survey.add(row, state)
        survey.end_part(breaker, time.perf_counter() - began)
    return survey.estimate()


async def estimate_in_tasks(
    one: Callable[[runs.Register, Any], Awaitable[ProgramState]],
    rows: Iterable[Any],
    plan: Plan,
    record: Record,
) -> BatchEstimate:
    """`estimate_in_threads` as a coroutine: the rows run as tasks of this event loop."""
    survey = _Survey(plan, rows, record)
    for part in survey.parts:
        breaker, began = Breaker(iter(part), plan.give_up_after), time.perf_counter()
        async for row, state in runs.finished_in_tasks(one, breaker, plan.concurrency):
            survey.add(row, state)
        survey.end_part(breaker, time.perf_counter() - began)
    return survey.estimate()


class _Survey:
    def __init__(self, plan: Plan, rows: Iterable[Any], record: Record) -> None:
        self._concurrency = plan.concurrency
        reader = RowReader(plan, rows, record, read_only=True)
        self._summary = reader.summary
        self._columns = reader.window.order
        self.count = self._size = self._own = self._first_own = 0
        """`count`: number of rows. `_size`: number of characters of all rows. `_own`: number of these
        characters that are not in the prefix that a row shares with the row before it. `_first_own`: the part
        of `_own` that belongs to the first row."""
        draw, sample = random.Random(0), list[tuple[int, Row]]()
        before = ""
        for row in reader.window:
            text = self._text(row)
            own = len(text) - _shared(before, text)
            self._first_own = self._first_own or own
            self._size, self._own, before = self._size + len(text), self._own + own, text
            if len(sample) < SAMPLE:  # reservoir sampling
                sample.append((self.count, row))
            elif (at := draw.randrange(self.count + 1)) < SAMPLE:
                sample[at] = self.count, row
            self.count += 1
        self._sample = [row for _, row in sorted(sample, key=lambda pair: pair[0])]
        self.parts = [part for part in (self._sample[:1], self._sample[1:]) if part]
        self._states: dict[int, ProgramState] = {}
        self._took: list[float] = []

    def _text(self, row: Row) -> str:
        """The row's arguments as one text, in the order of `_columns`."""
        values = row.values
        if isinstance(values, Mapping):
            return "\0".join(text_of(values.get(name, "")) for name in self._columns)
        return "\0".join(map(text_of, values)) if isinstance(values, list | tuple) else text_of(values)

    def add(self, row: Row, state: ProgramState) -> None:
        self._states[row.index] = state

    def end_part(self, breaker: Breaker[Row], seconds: float) -> None:
        self._took.append(seconds)
        if breaker.gave_up:
            raise breaker.unrun()

    def estimate(self) -> BatchEstimate:
        sample = [(self._text(row), self._states[row.index]) for row in self._sample]
        errors = [error for _, state in sample if (error := state.error()) is not None]
        if (
            sample
            and len(errors) == len(sample)
            and not any(state.usage.prompt_tokens for _, state in sample)
        ):
            raise ProgramError(f"All {len(sample)} rows of the sample failed: {errors[0]}") from errors[0]
        return BatchEstimate(
            rows=self.count,
            skipped=self._summary.skipped,
            sampled=len(sample),
            failed=len(errors),
            usage=self._usage(sample) if sample else Usage(),
            duration_s=self._duration_s(),
            concurrency=self._concurrency,
            prompts=[
                (row.index, call.prompt + _questions(call))
                for row in self._sample[:SHOWN_PROMPTS]
                if (call := _first_request(self._states[row.index])) is not None
            ],
            first_error=str(errors[0]) if errors else None,
        )

    def _duration_s(self) -> float:
        if len(self._took) < 2:
            return sum(self._took)
        first, others = self._took
        return first + others * (self.count - 1) / (len(self._sample) - 1)

    def _usage(self, sample: list[tuple[str, ProgramState]]) -> Usage:
        number = len(sample)
        sizes = [len(text) for text, _ in sample]
        prompts = [state.usage.prompt_tokens for _, state in sample]
        computed = [state.usage.prompt_tokens - state.usage.cached_tokens for _, state in sample]
        outputs = [state.usage.completion_tokens for _, state in sample]
        base, rate = _line(sizes, prompts)
        total = base * self.count + rate * self._size
        needed = float(computed[0])
        if number > 1:
            texts = [text for text, _ in sample]
            own = [len(text) - _shared(before, text) for before, text in itertools.pairwise(texts)]
            density = _density(state for _, state in sample)
            fixed = (sum(computed[1:]) - density * sum(own)) / (number - 1)
            needed += fixed * (self.count - 1) + density * (self._own - self._first_own)
        return Usage(
            prompt_tokens=round(total),
            cached_tokens=round(max(0.0, total - max(needed, 0.0))),
            completion_tokens=round(sum(outputs) / number * self.count),
        )


def _line(xs: list[int], ys: list[int]) -> tuple[float, float]:
    """Least squares: a and b of y = a + b x, with b at least 0."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((one - x) ** 2 for one in xs)
    rate = 0.0
    if spread:
        rate = max(0.0, sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread)
    return y - rate * x, rate


def _density(states: Iterable[ProgramState]) -> float:
    """Tokens per character in the first prompts of `states`; 0 if there are no prompts."""
    first = [call for state in states if (call := _first_request(state)) is not None]
    characters = sum(len(call.prompt) for call in first)
    tokens = [
        call.own_usage.prompt_tokens if call.tokens_of_prompt is None else call.tokens_of_prompt
        for call in first
    ]
    return sum(tokens) / characters if characters else 0.0


def _shared(one: str, other: str) -> int:
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _first_request(state: ProgramState) -> Call | None:
    return next((call for call in state.trace.walk() if call.sent), None)


def _questions(call: Call) -> str:
    """Text of the questions of the request `call`, in the layout in which they were asked; empty for a
    request that is not of a decide."""
    if not call.asked:
        return ""
    step = call if call.questions or call.parent is None else call.parent
    layouts = [one.layout for _, one in step.decisions] or [""] * len(step.questions)
    texts = [written(*pair) or pair[0].instructions for pair in zip(step.questions, layouts, strict=True)]
    return "".join(f"{BLANK_LINE}{text}" for text in texts)


def _shorten(text: str) -> str:
    if len(text) <= PROMPT_CHARS:
        return text
    half = PROMPT_CHARS // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half} characters) …\n{text[-half:]}"
