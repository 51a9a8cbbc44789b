"""How many prompt tokens a step takes, so that decoding requests get their next token in time.

Example with a target of 50 ms: a step of 8 decoding requests takes 14 ms, and a prompt token took 0.45 ms in
recent steps. So (50 - 14) / 0.45 = 80 prompt tokens are computed beside them, and in a step without decoding
requests all `chunk_tokens`.

Short chunks take longer for a token than long ones. What is measured is the time in steps of the sizes that
were chosen, so the size settles where the steps end in time.
"""

from __future__ import annotations

from ramify.runtime.scheduler.speculation.acceptance import StepCost

LEAST = 16
"""Prompt tokens of a step at least, whatever the target: prompts go on."""
FADE = 0.9
"""The weight of a step in the time of a prompt token, against the step after it."""
MULTIPLE = 2
"""A chunk is at most this multiple of the longest that was measured beside decoding requests."""


class ChunkSize:
    """The prompt tokens of a step.

    most : in any step
    target : seconds that a step with decoding requests should take; None for no target
    cost : of steps of decoding requests alone
    """

    def __init__(self, most: int, target: float | None, cost: StepCost) -> None:
        self.target = target
        self._most, self._cost = most, cost
        self._tokens = self._seconds = 0.0
        self._longest = 0
        self._launched: int | None = None

    def ahead(self, decoding: int) -> int:
        """As `of`, for a pass that is launched before the next step, which then has the same number: with
        another one the chunks of the pass would be computed in vain."""
        self._launched = self._of(decoding)
        return self._launched

    def of(self, decoding: int) -> int:
        """Prompt tokens beside `decoding` rows of decoding requests."""
        launched, self._launched = self._launched, None
        return self._of(decoding) if launched is None else launched

    def _of(self, decoding: int) -> int:
        if self.target is None or not decoding:
            return self._most
        least = min(LEAST, self._most)
        if not self._tokens:
            return least
        longest = min(self._most, MULTIPLE * self._longest)
        room = (self.target - self._cost.of(decoding)) * self._tokens / self._seconds
        return max(least, min(int(room), longest))

    def learn(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step of `decoding` rows and `prompt_tokens` took `seconds`."""
        if self.target is None or not prompt_tokens or not decoding:
            return
        # Steps of decoding requests alone may be unmeasured as yet, or slower than this one.
        spent = max(seconds - self._cost.of(decoding), seconds / 4)
        self._tokens = self._tokens * FADE + prompt_tokens
        self._seconds = self._seconds * FADE + spent
        self._longest = max(prompt_tokens, self._longest)
