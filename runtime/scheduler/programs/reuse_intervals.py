"""How long programs stay away between their calls: learned from how long they stayed away before."""

from __future__ import annotations

import dataclasses
import math

PRIORS = {"soon": 0.05, "join": 1.0, "tool": 2.0, "unknown": 20.0}
"""Seconds, before anything has been seen. Who is expected at once is never taken for late."""

MEMORY = 50
"""Of so many waits the last ones count for the mean of all programs."""

OWN = 2.0
"""What is known of all programs weighs as much as so many waits of the program itself."""

MAX_KINDS = 4096
"""Kinds of waits that are remembered: tools have names, and clients choose them."""


@dataclasses.dataclass(slots=True)
class Mean:
    """A geometric mean of seconds: waits are spread over orders of magnitude."""

    count: int = 0
    log: float = 0.0

    def add(self, seconds: float, memory: float = math.inf) -> None:
        self.count = int(min(self.count + 1, memory))
        self.log += (math.log(max(seconds, 1e-3)) - self.log) / self.count


@dataclasses.dataclass(slots=True)
class OwnWaits:
    """The waits of one program."""

    means: dict[str, Mean] = dataclasses.field(default_factory=dict)
    open: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    """By branch: since when it stays away, and for what."""


class Waits:
    """The kind of a wait is a `NextUse`, or "tool" with the tool's name."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = {}

    def begin(self, own: OwnWaits, branch: str, kind: str, now: float) -> float:
        """A branch stays away from now on. Returns for how many seconds that is expected."""
        own.open[branch] = (now, kind)
        return self.expected(own, kind)

    def say(self, own: OwnWaits, branch: str, kind: str) -> float | None:
        """What a branch that stays away waits for. Returns the same; None where it does not stay away."""
        if branch not in own.open:
            return None
        own.open[branch] = (own.open[branch][0], kind)
        return self.expected(own, kind)

    def end(self, own: OwnWaits, branch: str, now: float) -> None:
        """The branch is back."""
        since, kind = own.open.pop(branch, (now, ""))
        if not kind:
            return
        own.means.setdefault(kind, Mean()).add(now - since)
        if kind not in self._means and len(self._means) >= MAX_KINDS:
            del self._means[next(iter(self._means))]
        self._means.setdefault(kind, Mean()).add(now - since, MEMORY)

    def expected(self, own: OwnWaits, kind: str) -> float:
        """Seconds from the beginning of a wait of this kind to its end."""
        everybody, here = self._means.get(kind, Mean()), own.means.get(kind, Mean())
        prior = math.log(PRIORS[kind.partition(" ")[0]])
        common = (prior + everybody.count * everybody.log) / (1 + everybody.count)
        return math.exp((OWN * common + here.count * here.log) / (OWN + here.count))
