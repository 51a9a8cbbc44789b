"""Guesses at the tokens to come, which the next step verifies beside what it computes anyway.

Speculative decoding without a draft model (Leviathan et al., arXiv 2211.17192; here a guess is kept where the
request's own draw, under its grammar and with its own random number, is that very token, so outputs stay what
they are without guesses). Three sources are looked through: the prefix tree, where an equal prompt went on
before; the request's own tokens; and recent outputs of its cache scope.

A row more costs little while reading the weights takes most of a step, and much in a full batch. So a guess
is made where the chance that it is right outweighs the time that its row takes from all requests of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.speculation.acceptance import Odds, StepCost
from ramify.runtime.scheduler.speculation.prompt_lookup import CONTEXT, LONGEST, RecentOutputs, copied, find

MOST = 15
"""Guesses of a request in one step."""
MOST_IN_STEP = 32
"""Of all requests: what they add to the time between tokens stays within some 10 ms."""
LEAST_GAIN = 1.5
"""How much more than its cost a guess must promise; near 1 there is little to gain."""
FIRST_ODDS = {"tree": (0.6, 0.9), "own": (0.1, 0.8), "outputs": (0.05, 0.7)}
"""Of each source at a match of one token and of `LONGEST`, until guesses have been verified."""


class Guess(NamedTuple):
    """The tokens from `position` on may be `tokens`, as `source` has it, after `length` tokens that match."""

    source: str
    length: int
    position: int
    tokens: list[int]


class Drafter:
    """Proposes guesses to decoding requests, and learns from how they came out."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._outputs = RecentOutputs()
        self._odds = Odds(FIRST_ODDS)
        self.cost = StepCost()

    def propose(self, requests: Sequence[Request], rows: int) -> None:
        """Give each of `requests`, which the next step samples for, the guesses that are worth their rows.

        rows : what the step computes without guesses
        """
        expected = float(len(requests))
        share = self.cost.of_a_row(rows) * LEAST_GAIN
        longest_pause = len(requests) - 1
        room = MOST_IN_STEP
        for request in requests:
            speculation = request.speculation
            if speculation.pause > 0:
                speculation.pause -= 1
                continue
            self._learn(request)
            most = min(MOST, room, request.budget_left - 1 - request.draft_len)
            if most <= 0 or self._odds.best < share * expected:
                continue
            speculation.guess = guess = self._guess(request, most)
            worth: list[int] = []
            for token, chance in () if guess is None else self._chances(request, guess):
                if chance < share * expected:
                    break
                worth.append(token)
                expected += chance
                rows += 1
                share = self.cost.of_a_row(rows) * LEAST_GAIN
            if worth:
                request.guess(worth)
                room -= len(worth)
                speculation.next_pause = 1
            else:
                speculation.pause = min(speculation.next_pause, longest_pause)
                speculation.next_pause *= 2

    def ended(self, request: Request) -> None:
        """Learn from the last guess, and remember the output."""
        self._learn(request)
        if request.output_len:
            self._outputs.add(request.scope, request.ids[max(0, request.prompt_len - CONTEXT) :])

    def _guess(self, request: Request, most: int) -> Guess | None:
        """The likeliest of what the sources say."""
        ids = request.known_and_draft
        end = ids[-LONGEST:]
        found: list[Guess] = []
        following = self._cache.following(ids, request.scope, most)
        if following:
            # Equal prompts go on alike or not: the more of the output that did, the likelier.
            length = max(1, len(ids) - request.prompt_len)
            found.append(Guess("tree", length, len(ids), following))
        own = find(ids, end)
        if own is not None:
            found.append(Guess("own", own.length, len(ids), copied(ids, own.place, most)))
        other = self._outputs.find(request.scope, end)
        if other is not None:
            following = self._outputs.following(request.scope, other.place, most)
            found.append(Guess("outputs", other.length, len(ids), following))
        return max(found, key=lambda guess: self._odds.of(guess.source, guess.length), default=None)

    def _chances(self, request: Request, guess: Guess) -> Iterator[tuple[int, float]]:
        """Each guessed token, and the chance that it and those before it are right."""
        chance = 1.0
        for i, token in enumerate(guess.tokens):
            chance *= request.speculation.track.odds(self._odds.of(guess.source, guess.length + i))
            yield token, chance

    def _learn(self, request: Request) -> None:
        """Whether the last guess was right, whether or not it was worth verifying."""
        speculation = request.speculation
        guess, speculation.guess = speculation.guess, None
        if guess is None:
            return
        came = request.ids[guess.position : guess.position + len(guess.tokens)].tolist()
        for i, (token, guessed) in enumerate(zip(came, guess.tokens, strict=False)):
            kept = token == guessed
            self._odds.learn(guess.source, guess.length + i, kept=kept)
            speculation.track.learn(kept=kept)
            if not kept:
                return
