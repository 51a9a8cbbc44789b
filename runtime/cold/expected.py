"""The next uses of programs' prefixes, which are read before they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from ramify.runtime.cold.writer import Prefix

MOST_EXPECTED = 1024
"""Most branches of programs that are remembered; the oldest are forgotten."""


@dataclasses.dataclass(slots=True, eq=False)
class NextUse:
    """The next use of a branch's prefix."""

    prefix: Prefix
    lease_s: float
    needed: float
    """The clock when the branch's next request is expected."""
    tried: bool = False


class NextUses:
    """The next use of each part of each owner, as in `PrefixCache.lease`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._uses: dict[tuple[str, str], NextUse] = {}

    def expect(self, owner: str, part: str, prefix: Prefix, lease_s: float, needed_in: float) -> None:
        """Read `prefix` in time for `part` of `owner`, which needs it in `needed_in` seconds, if it is
        evicted meanwhile. It is then leased for `lease_s` seconds."""
        self._uses.pop((owner, part), None)
        prefix = Prefix(prefix.ids.copy(), prefix.scope)
        self._uses[owner, part] = NextUse(prefix, lease_s, self._clock() + needed_in)
        if len(self._uses) > MOST_EXPECTED:
            del self._uses[next(iter(self._uses))]

    def expect_again(self, owner: str, part: str, needed_in: float) -> None:
        """Change the time for `part` of `owner`, if it is known."""
        if (found := self._uses.get((owner, part))) is not None:
            found.needed, found.tried = self._clock() + needed_in, False

    def expect_no_more(self, owner: str, part: str | None = None) -> None:
        """Forget the prefix for `part` of `owner`; for all parts if `part` is None."""
        parts = [part] if part is not None else [key[1] for key in self._uses if key[0] == owner]
        for each in parts:
            self._uses.pop((owner, each), None)

    def of(self, branch: tuple[str, str]) -> NextUse | None:
        """The next use of (owner, part)."""
        return self._uses.get(branch)

    def untried(self) -> Iterator[tuple[tuple[str, str], NextUse]]:
        """((owner, part), next use) of those for which no read was begun."""
        return ((branch, use) for branch, use in self._uses.items() if not use.tried)
