"""Draft or launch ahead: which of both the steps do, where speculation and overlap scheduling are on.

A pass that is launched ahead has one token a request. Draft tokens come after the last token is known, so a
request that gets some would find its row void, and the weights would be read once more. So a step either
drafts or takes what was launched ahead, all requests alike, and the faster of both by measurement goes on:

    drafting     32 steps   3.1 tokens a request in 6.0 ms: 0.52 a ms
    launching     8 steps   1.0 tokens a request in 4.1 ms: 0.24 a ms    drafting goes on, 64 steps
    drafting     64 steps   ...
"""

from __future__ import annotations

FIRST = 32
"""Steps of drafting at the start."""
TRIAL = 8
"""Steps in which the other one is tried."""
LONGEST = 1024
"""Steps between two trials at the most: they double while the same one stays the faster."""


class Alternation:
    """Both begin with drafting."""

    def __init__(self) -> None:
        self.drafts = True
        """This step has draft tokens, if any are worth their rows; else it takes what was launched ahead."""
        self.next_drafts = True
        """And the next step. It is decided before this one has launched anything."""
        self._best = True
        self._hold, self._left = FIRST, FIRST
        self._tokens = {True: 0.0, False: 0.0}
        self._seconds = {True: 0.0, False: 0.0}

    def learn(self, tokens: float, seconds: float) -> None:
        """A step of decoding requests alone gave `tokens` tokens a request in `seconds`."""
        self._tokens[self.drafts] += tokens
        self._seconds[self.drafts] += seconds

    def advance(self) -> None:
        """A step has ended."""
        self.drafts = self.next_drafts
        self._left -= 1
        if self._left > 0:
            return
        if self.next_drafts is self._best:
            self._try(not self._best)
        else:
            self._compare()

    def _try(self, drafts: bool) -> None:
        self.next_drafts, self._left = drafts, TRIAL

    def _compare(self) -> None:
        """End the trial, and go on with the faster one."""
        rates = {each: self._rate(each) for each in (True, False)}
        other = not self._best
        if rates[other] > rates[self._best]:
            self._best, self._hold = other, FIRST
        else:
            self._hold = min(2 * self._hold, LONGEST)
        self.next_drafts, self._left = self._best, self._hold
        for each in (True, False):
            self._tokens[each] = self._seconds[each] = 0.0

    def _rate(self, drafts: bool) -> float:
        return self._tokens[drafts] / self._seconds[drafts] if self._seconds[drafts] > 0 else 0.0
