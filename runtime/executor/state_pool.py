"""The slots that hold the states of linear attention layers, beside the KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.runtime.model.shape.config import StateShape


class StepStates(NamedTuple):
    """The states of a step's sequences, on the pool's device.

    slots : (S,) int64; query_starts : (S + 1,) int32; kv_lens : (S,) int32, as in `ForwardBatch`
    """

    slots: Tensor
    query_starts: Tensor
    kv_lens: Tensor


class StatePool:
    """The states in all slots, float32: `conv` (layers, num_slots + 1, channels, width - 1) and
    `recurrent` (layers, num_slots + 1, heads, key_dim, value_dim).

    No request is given the last slot (`padding_slot`): padded steps write the state of their padding there.
    """

    def __init__(self, shape: StateShape, *, num_slots: int, device: torch.device | str = "cpu") -> None:
        # Not zeroed: a slot that no request has used takes no physical memory, and a sequence begins from
        # zeros whatever its slot holds.
        rows = shape.layers, num_slots + 1
        self.conv = torch.empty((*rows, *shape.conv), dtype=torch.float32, device=device)
        self.recurrent = torch.empty((*rows, *shape.recurrent), dtype=torch.float32, device=device)
        self.num_slots = num_slots

    @property
    def padding_slot(self) -> int:
        return self.num_slots

    @torch.inference_mode()
    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy slots in place, all at once: ``(source, destination)`` pairs, no destination twice.

        A slot may be a source and a destination: all sources are read before any slot is written.
        """
        if not copies:
            return
        sources, destinations = (
            torch.tensor(slots, dtype=torch.int64, device=self.conv.device)
            for slots in zip(*copies, strict=True)
        )
        for states in (self.conv, self.recurrent):
            if len(copies) == 1:  # without memory for a copy between
                states[:, copies[0][1]] = states[:, copies[0][0]]
            else:
                states.index_copy_(1, destinations, states.index_select(1, sources))
