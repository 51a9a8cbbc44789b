"""Reuse intervals: the time from a call of a program to its next, predicted from earlier ones.

Example: intervals of the kind "tool search" took 2 s in all programs, and 8 s each of two times in this one.
The program's mean weighs 2 and the common one `COMMON_WEIGHT` = 2, so the next is expected to take sqrt(2 *
8) = 4 s.
"""

from __future__ import annotations

import dataclasses
import math

PRIORS = {"soon": 0.05, "join": 1.0, "tool": 2.0, "unknown": 20.0}
"""Seconds by kind, before any interval has been seen. They weigh as much as one interval of all programs."""

MEMORY = 50
"""The mean over all programs follows about this number of the last intervals."""

COMMON_WEIGHT = 2.0
"""The mean over all programs weighs as much as this number of intervals of the program itself."""

MAX_KINDS = 4096
"""Kinds that are remembered: tools have names, and clients choose them."""


@dataclasses.dataclass(slots=True)
class Mean:
    """A geometric mean of seconds: intervals are spread over orders of magnitude."""

    count: int = 0
    log: float = 0.0

    def add(self, seconds: float, memory: float = math.inf) -> None:
        self.count = int(min(self.count + 1, memory))
        self.log += (math.log(max(seconds, 1e-3)) - self.log) / self.count


@dataclasses.dataclass(slots=True)
class ProgramIntervals:
    """The intervals of one program."""

    means: dict[str, Mean] = dataclasses.field(default_factory=dict)
    """By kind."""
    open: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    """By branch that has no request: since when, and the kind of its interval."""


class ReuseIntervals:
    """Learns intervals. Their kind is a `NextUse`, or "tool" with the tool's name."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def begin(self, own: ProgramIntervals, branch: str, kind: str, now: float) -> float:
        """A request of `branch` has ended. Returns the seconds until its next one is expected."""
        own.open[branch] = (now, kind)
        return self.expected(own, kind)

    def set_kind(self, own: ProgramIntervals, branch: str, kind: str) -> float | None:
        """Set the kind of an open interval. Returns as `begin`; None where `branch` has no open interval."""
        if branch not in own.open:
            return None
        own.open[branch] = (own.open[branch][0], kind)
        return self.expected(own, kind)

    def end(self, own: ProgramIntervals, branch: str, now: float) -> None:
        """The next request of `branch` has arrived."""
        since, kind = own.open.pop(branch, (now, ""))
        if not kind:
            return
        _mean(own.means, kind).add(now - since)
        _mean(self._means, kind).add(now - since, MEMORY)

    def expected(self, own: ProgramIntervals, kind: str) -> float:
        """Seconds that an interval of this kind is expected to take from its beginning."""
        everybody, here = self._means.get(kind, Mean()), own.means.get(kind, Mean())
        prior = math.log(PRIORS[kind.partition(" ")[0]])
        common = (prior + everybody.count * everybody.log) / (1 + everybody.count)
        return math.exp((COMMON_WEIGHT * common + here.count * here.log) / (COMMON_WEIGHT + here.count))


def _mean(means: dict[str, Mean], kind: str) -> Mean:
    """The mean of a kind in `means`, which is added in place of the oldest kind where there are too many."""
    if kind not in means and len(means) >= MAX_KINDS:
        del means[next(iter(means))]
    return means.setdefault(kind, Mean())
