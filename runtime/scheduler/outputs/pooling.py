"""The hidden states of a prompt on their way to one embedding."""

from __future__ import annotations

import torch

from ramify.messages import Pooling


class PooledStates:
    """Takes the states of the prompt chunk by chunk, in order.

    Sums are in float64, in the order of the positions, so that the sizes of the chunks do not show.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._mean = pooling == "mean"
        self._count = 0
        """States that were taken."""
        self._pooled: torch.Tensor | None = None
        """(hidden size,) float64: the sum of all states, or the last one."""

    @property
    def reusable(self) -> int:
        """The most tokens whose states are not needed any more, so that their KV may come from the tree."""
        return self._count if self._mean else 1 << 62

    def add(self, states: torch.Tensor, start: int) -> None:
        """Take `states`, (n, hidden size), of the positions from `start` on. States taken before a retraction
        do not count again."""
        new = states[max(0, self._count - start) :]
        if not len(new):
            return
        self._count = start + len(states)
        if not self._mean:
            self._pooled = new[-1].double()
        else:
            rows = new.double()
            if self._pooled is not None:
                rows = torch.cat([self._pooled[None], rows])
            self._pooled = rows.cumsum(0)[-1]  # row after row, where `sum` would add blocks of rows

    def embedding(self) -> bytes:
        """(hidden size,) float32, little-endian."""
        assert self._pooled is not None
        pooled = self._pooled / self._count if self._mean else self._pooled
        return pooled.cpu().numpy().astype("<f4").tobytes()
