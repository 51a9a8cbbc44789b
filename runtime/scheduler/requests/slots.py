"""Running requests as arrays: what a step reads of all of them at once, by slot.

A request has a slot while it has pages. Its other numbers, which change from token to token or steer the
scheduler (`Request.length`, `Request.computed_len`, …), are in the request itself.

    slot      0       1       2          a step of requests in the slots 2 and 0
    pages     7 9 -   - - -   4 5 6      pages[[2, 0]]       the page table of the pass
    options   0.0     free    0.8        options[:, [2, 0]]  the sampling options of the draw
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ramify.runtime.scheduler.requests.request import Request

MASK64 = 2**64 - 1


class RunningSlots:
    """Arrays with a place for each of S slots. S and W grow as needed.

    pages : (S, W) int32, the page table of each slot, zeros behind its pages
    options : (4, S) float64: temperature, top_k (0: off), top_p, min_p
    seeds : (S,) uint64
    loras : (S,) int64, as `Request.lora`
    edited : (S,) bool, whether biases, penalties or `min_tokens` may change the slot's logits
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self.pages = np.zeros((0, 16), np.int32)
        self.options = np.zeros((4, 0))
        self.seeds = np.zeros(0, np.uint64)
        self.loras = np.zeros(0, np.int64)
        self.edited = np.zeros(0, bool)

    def take(self, request: Request) -> int:
        """A free slot, which holds the options of `request` and no pages."""
        if not self._free:
            self._grow()
        slot, params = self._free.pop(), request.sampling
        self.options[:, slot] = params.temperature, max(params.top_k, 0), params.top_p, params.min_p
        self.seeds[slot] = request.seed & MASK64
        self.loras[slot] = request.lora
        self.edited[slot] = bool(params.penalises or params.min_tokens or params.logit_bias)
        return slot

    def free(self, slot: int, pages: int) -> None:
        """Free `slot`, which has `pages` pages."""
        self.pages[slot, :pages] = 0
        self._free.append(slot)

    def add_pages(self, slot: int, place: int, pages: Sequence[int]) -> None:
        """Write `pages` into the page table of `slot` from `place` on."""
        end = place + len(pages)
        if end > self.pages.shape[1]:
            wider = np.zeros((len(self.pages), max(end, 2 * self.pages.shape[1])), np.int32)
            wider[:, : self.pages.shape[1]] = self.pages
            self.pages = wider
        self.pages[slot, place:end] = pages

    def _grow(self) -> None:
        held = len(self.seeds)
        more = max(16, held)
        self._free += range(held + more - 1, held - 1, -1)
        self.pages = np.concatenate([self.pages, np.zeros((more, self.pages.shape[1]), np.int32)])
        self.options = np.concatenate([self.options, np.zeros((4, more))], axis=1)
        self.seeds = np.concatenate([self.seeds, np.zeros(more, np.uint64)])
        self.loras = np.concatenate([self.loras, np.zeros(more, np.int64)])
        self.edited = np.concatenate([self.edited, np.zeros(more, bool)])


def slots_of(requests: Sequence[Request]) -> np.ndarray:
    """(R,) int64, the slots of `requests`, which have pages."""
    return np.array([request.pages.slot for request in requests], np.int64)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Random numbers in [0, 1), (R,) float64, for the output tokens at `positions`, (R,) int64, of sequences
    with `seeds`, (R,) uint64. While a prompt is healed, positions are negative.

    A number depends on its seed and position alone. So it does not matter whether earlier tokens were
    sampled, forced, or computed again after a retraction. SplitMix64, one stream for each seed.
    """
    x = seeds * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = ((x ^ x >> np.uint64(31)) >> np.uint64(11)) * 2.0**-53
    return found
