"""Limits on what a program, or a block of it, may spend: time, tokens, and requests to the model.

    with rm.limit(max_total_tokens=500):     holds for the steps that are appended in the block,
        s += rm.gen("draft")                 and for those of branches that are forked in it

A `Limit` counts what its steps have spent. Each request carries its limits to the runtime (`LimitHint`),
because only the runtime knows the cost of the requests that are in flight at the same time.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec

from ramify.bounds import Bounds
from ramify.errors import BudgetExceeded
from ramify.lang.prompt.thinking import MARKS, most_tokens
from ramify.messages import Finish, LimitHint, Thinking, Usage
from ramify.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.backends.base import Backend

RAISE = "Raise it."
LEAVE = "Raise it; or go on outside of it, after s.recover()."


NAMES = Bounds.__struct_fields__


class Limit:
    """A limit, and the amounts spent by the steps under it. The limit's time begins when this object is made,
    or with `later` when the first step begins."""

    def __init__(self, bounds: Bounds, where: str, *, later: bool = False, remedy: str = RAISE) -> None:
        self.bounds = bounds
        self.where = where
        self._remedy = remedy
        self.id = uuid.uuid4().hex
        self.refuse: Callable[[], NoReturn] | None = None
        """The function that raises an error when `calls`, `tokens` or `seconds` is read while a program is
        traced. None outside of tracing."""
        self._calls = self._tokens = 0
        self._tokens_on: Counter[Backend] = Counter()
        self._began = None if later else time.monotonic()

    @property
    def calls(self) -> int:
        """Number of requests sent."""
        return self._calls if self.refuse is None else self.refuse()

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of the requests that have ended."""
        return self._tokens if self.refuse is None else self.refuse()

    @property
    def seconds(self) -> float:
        """Seconds since the limit's time began."""
        return self._elapsed() if self.refuse is None else self.refuse()

    def _elapsed(self) -> float:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        return now - self._began

    @property
    def seconds_left(self) -> float | None:
        timeout = self.bounds.timeout
        return None if timeout is None else timeout - self._elapsed()

    @property
    def tokens_left(self) -> int | None:
        most = self.bounds.max_total_tokens
        return None if most is None else most - self._tokens

    @property
    def calls_left(self) -> int | None:
        most = self.bounds.max_calls
        return None if most is None else most - self._calls

    def spend(self, usage: Usage, backend: Backend) -> None:
        tokens = usage.prompt_tokens + usage.completion_tokens
        self._tokens += tokens
        self._tokens_on[backend] += tokens

    def hint(self, backend: Backend) -> LimitHint:
        """The limit as a hint for `backend`. The hint's max_total_tokens is reduced only by the tokens spent
        on other backends, because each backend itself counts the tokens of the requests that it serves."""
        most = self.bounds.max_total_tokens
        return LimitHint(
            id=self.id,
            max_total_tokens=None if most is None else most - self._tokens + self._tokens_on[backend],
            seconds_left=self.seconds_left,
        )

    def time_is_over(self) -> BudgetExceeded:
        timeout = self.bounds.timeout or 0.0
        seconds = max(timeout, self._elapsed())  # an event loop's timer may be early by its resolution
        message = f"timeout={timeout:g} of {self.where} is over: {seconds:.2f} s have passed."
        return self._exceeded("timeout", seconds, message)

    def tokens_are_spent(self, known: int = 0) -> BudgetExceeded:
        """The error for a limit whose tokens are spent. `known` is the number of tokens that the runtime has
        counted for the limit's requests."""
        most, spent = self.bounds.max_total_tokens, max(self._tokens, known)
        rest = ", and this step does not fit into the rest" if spent < (most or 0) else ""
        told = f"{spent} tokens are spent in {self._calls} calls{rest}."
        return self._exceeded("max_total_tokens", spent, f"max_total_tokens={most} of {self.where}: {told}")

    def calls_are_spent(self) -> BudgetExceeded:
        message = f"max_calls={self.bounds.max_calls} of {self.where}: {self._calls} calls are spent."
        return self._exceeded("max_calls", self._calls, message)

    def _exceeded(self, field: str, spent: float, message: str) -> BudgetExceeded:
        bound = getattr(self.bounds, field)
        return BudgetExceeded(message, field=field, bound=bound, spent=spent, remedy=self._remedy)


Limits = tuple[Limit, ...]
"""Limits that hold at the same time, outermost first."""

LIMITS: ContextVar[Limits] = ContextVar("ramify_limits", default=())
"""The limits of the ``with`` blocks around the running code."""


@contextlib.contextmanager
def limiting(bounds: Bounds, where: str) -> Iterator[Limit]:
    """A ``with`` block whose steps have a new limit with these `bounds` in addition."""
    limit = Limit(bounds, where, remedy=LEAVE)
    with under((limit,)):
        yield limit


@contextlib.contextmanager
def under(limits: Limits) -> Iterator[None]:
    """A ``with`` block whose steps have these limits in addition."""
    token = LIMITS.set((*LIMITS.get(), *limits))
    try:
        yield
    finally:
        LIMITS.reset(token)


def combined(outer: Limits, inner: Limits) -> Limits:
    """The limits of `outer` and `inner`, each once."""
    return tuple(dict.fromkeys((*outer, *inner))) if outer and inner else outer or inner


def tightest(limits: Limits) -> Bounds:
    """The bounds that remain under all limits together: for each kind, the smallest remaining amount, or None
    if no limit bounds it."""

    def least(values: Iterable[float | None]) -> float | None:
        return min((value for value in values if value is not None), default=None)

    tokens = least(one.tokens_left for one in limits)
    calls = least(one.calls_left for one in limits)
    seconds = least(one.seconds_left for one in limits)
    return Bounds(
        timeout=None if seconds is None else max(seconds, 1e-3),
        max_total_tokens=None if tokens is None else max(int(tokens), 1),
        max_calls=None if calls is None else max(int(calls), 1),
    )


class Deadline(NamedTuple):
    """The limit whose time ends first, and the seconds until its end."""

    seconds_left: float
    limit: Limit


def deadline(limits: Limits) -> Deadline | None:
    """The earliest deadline of `limits`; None if no limit has a timeout. If two limits have the same
    deadline, the inner one is returned. Raises `BudgetExceeded` if a deadline is past."""
    found: Deadline | None = None
    for limit in reversed(limits):
        left = limit.seconds_left
        if left is not None and left <= 0:
            raise limit.time_is_over()
        if left is not None and (found is None or left < found.seconds_left):
            found = Deadline(left, limit)
    return found


class Allowance(NamedTuple):
    """The limits of a request, and the request's options after the limits have cut them."""

    limits: Limits
    sampling: SamplingParams
    thinking: Thinking | None
    cut: bool
    """Whether the limits have reduced the step's max_tokens."""


def allow_call(limits: Limits, sampling: SamplingParams, thinking: Thinking | None = None) -> Allowance:
    """Count a request for each limit, and cut the request's max_tokens to the tokens that the limits leave.
    The max_tokens of thoughts are cut before those of the answer.

    Raises `BudgetExceeded` for the innermost limit that does not allow the request. No limit counts a request
    that is not allowed.
    """
    wanted, replace = sampling.max_tokens, msgspec.structs.replace
    if limits:
        thoughts = most_tokens(thinking)
        given = None if wanted is None else wanted + thoughts
        sampling = _counted(limits, replace(sampling, max_tokens=given))
        if thinking is not None and thoughts and (left := sampling.max_tokens) is not None:
            answer = left if wanted is None else min(wanted, left)
            sampling = replace(sampling, max_tokens=answer)
            thinking = replace(thinking, max_tokens=max(0, left - answer - MARKS))
    return Allowance(limits, sampling, thinking, sampling.max_tokens != wanted)


def _counted(limits: Limits, sampling: SamplingParams) -> SamplingParams:
    deadline(limits)
    for limit in reversed(limits):
        if limit.calls_left is not None and limit.calls_left <= 0:
            raise limit.calls_are_spent()
        left = limit.tokens_left
        if left is not None and left < max(sampling.min_tokens, 1):
            raise limit.tokens_are_spent()
    for limit in limits:
        limit._calls += 1
        left = limit.tokens_left
        if left is not None and (sampling.max_tokens is None or sampling.max_tokens > left):
            sampling = msgspec.structs.replace(sampling, max_tokens=left)
    return sampling


def check_answer(limits: Limits, finish: Finish | None, *, cut: bool) -> None:
    """Raise `BudgetExceeded` if an answer has exceeded a limit; if it has exceeded several, for the
    innermost. The usage of the answer must have been counted.

    `cut`: whether the answer was cut off at the max_tokens that `allow_call` has set. If so, the error is
    that of the limit with the fewest tokens left.
    """
    reached = None if finish is None else finish.limit
    if reached is not None and reached.timed_out:
        timed = [one for one in limits if one.bounds.timeout is not None]
        raise _named(timed, reached.id).time_is_over()
    counted = [one for one in limits if one.bounds.max_total_tokens is not None]
    for limit in reversed(counted):
        if limit.tokens_left is not None and limit.tokens_left < 0:
            raise limit.tokens_are_spent()
    if reached is not None:
        raise _named(counted, reached.id).tokens_are_spent(reached.tokens)
    if cut:
        raise min(counted, key=lambda one: one.tokens_left or 0).tokens_are_spent()


def _named(limits: Sequence[Limit], id: str) -> Limit:
    """The limit with this `id`. An unknown id belongs to a limit that a server has set itself; the innermost
    limit is returned for it."""
    return next((one for one in limits if one.id == id), limits[-1])
