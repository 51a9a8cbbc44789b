"""LoRA adapters (arXiv 2106.09685) for kernels: the weights of an adapter, and the rows of a step.

rows      0  1  2  3  4          adapter slots   2 -1  0  2  2
order     2  0  3  4             rows with an adapter, those of one adapter together
segments  slot 0: order[0:1];  slot 2: order[1:4]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.kernels.machine.records import record
from ramify.kernels.machine.transfers import to_device

MOST_SLOTS = 256
"""The most adapters that may be loaded at the same time."""
MOST_PARTS = 4
"""The most projections that are stacked in one matrix: 4 in the delta-net layers of Qwen3.5."""
SEGMENT_ROWS = 16
"""Most rows of a segment: the rows of one tile."""
MULTIPLE = 16
"""Inputs, and outputs of a part, are padded with zeros to a multiple of this."""

RECORD = record(
    "a", "scales", "ranks", "parts", "bf16",
    *(f"{field}{part}" for part in range(MOST_PARTS) for field in ("b", "rank", "start", "columns")),
)  # fmt: skip
"""The arguments of compiled kernels for the weights of one adapter in one matrix: addresses and counts."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoraPart:
    """One projection: columns ``[start, start + columns)`` of the result.

    b : (blocks, rank, `MULTIPLE`), Bᵀ in blocks of columns, padded with zeros
    """

    start: int
    columns: int
    b: Tensor

    @property
    def rank(self) -> int:
        return self.b.shape[1]

    def b_of_columns(self) -> Tensor:
        """Bᵀ without padding, (rank, columns)."""
        return self.b.transpose(0, 1).flatten(1)[:, : self.columns]


@dataclasses.dataclass(frozen=True, eq=False)
class LoraWeight:
    """The weights of one adapter for one matrix, in which several projections may be stacked.

    a : (ranks, inputs) contiguous, the rows of A of all parts, in the dtype of x; inputs padded to `MULTIPLE`
    scales : (ranks,) float32
    parts : in the order of their rows in `a`
    """

    a: Tensor
    scales: Tensor
    parts: tuple[LoraPart, ...]

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[int, Tensor, Tensor, float]]) -> LoraWeight:
        """The weight of parts, each (start, A (rank, inputs), B (columns, rank), scale)."""
        found = []
        for start, _, b, _ in parts:
            columns = b.shape[0]
            blocks = F.pad(b.t(), (0, -columns % MULTIPLE)).unflatten(1, (-1, MULTIPLE)).transpose(0, 1)
            found.append(LoraPart(start, columns, blocks.contiguous()))
        a = torch.cat([a for _, a, _, _ in parts])
        scales = [torch.full((len(a),), scale, device=a.device) for _, a, _, scale in parts]
        return cls(F.pad(a, (0, -a.shape[1] % MULTIPLE)).contiguous(), torch.cat(scales), tuple(found))

    @functools.cached_property
    def layout(self) -> tuple[int, Any]:
        """The address of a `RECORD`, and the record."""
        found = np.zeros(1, RECORD)
        one = found[0]
        one["a"], one["scales"] = self.a.data_ptr(), self.scales.data_ptr()
        one["ranks"], one["parts"], one["bf16"] = len(self.a), len(self.parts), self.a.dtype == torch.bfloat16
        for place, part in enumerate(self.parts):
            one[f"b{place}"], one[f"rank{place}"] = part.b.data_ptr(), part.rank
            one[f"start{place}"], one[f"columns{place}"] = part.start, part.columns
        return found.ctypes.data, found


class LoraTable:
    """The adapters' weights for one matrix, by slot."""

    def __init__(self) -> None:
        self.weights: dict[int, LoraWeight] = {}
        self.addresses = np.zeros(MOST_SLOTS, np.int64)
        """The address of each slot's `RECORD`; 0 for a slot without weights."""
        self._records: Tensor | None = None

    def __setitem__(self, slot: int, weight: LoraWeight) -> None:
        self.weights[slot] = weight
        self.addresses[slot] = weight.layout[0]
        self._records = None

    def __delitem__(self, slot: int) -> None:
        self.addresses[slot] = 0
        self._records = None
        del self.weights[slot]

    def records(self, device: torch.device) -> Tensor:
        """(slots, fields) int64: the records on a device, zeros for a slot without weights."""
        if self._records is None or self._records.device != device:
            records = np.zeros(MOST_SLOTS, RECORD)
            for slot, weight in self.weights.items():
                records[slot] = weight.layout[1][0]
            self._records = to_device(records.view(np.int64).reshape(MOST_SLOTS, -1), device)
        return self._records

    def __bool__(self) -> bool:
        return bool(self.weights)


class LoraRows:
    """The rows of one step by adapter.

    slots : (T,) the adapter slot of each row; below 0 for a row without an adapter

    Attributes
    ----------
    order : (n,) int64, the rows with an adapter, those of one adapter together
    segments : (segments, 3) int64: slot, first and stop; rows order[first:stop], at most `SEGMENT_ROWS`, have
        this slot
    """

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        order = np.argsort(slots, kind="stable")
        self.order = np.ascontiguousarray(order[np.searchsorted(slots[order], 0) :], np.int64)
        found, firsts = np.unique(slots[self.order], return_index=True)
        stops = np.append(firsts[1:], len(self.order))[: len(found)]
        segments = [
            (slot, first, min(first + SEGMENT_ROWS, stop))
            for slot, start, stop in zip(found, firsts, stops, strict=True)
            for first in range(start, stop, SEGMENT_ROWS)
        ]
        self.segments = np.array(segments, np.int64).reshape(-1, 3)
        self.present = [int(slot) for slot in found]
        """The slots of the step, each once."""
        self._on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`order` and `segments` as tensors on a device."""
        if device not in self._on_device:
            self._on_device[device] = to_device(self.order, device), to_device(self.segments, device)
        return self._on_device[device]


@dataclasses.dataclass(frozen=True, eq=False)
class Extra:
    """Terms to be added to a product before its gate.

    terms : (T, outputs) float32, rows contiguous
    rows : the rows of the step; a row without an adapter gets no terms, so its bits stay the same
    """

    terms: Tensor
    rows: LoraRows

    def addresses(self) -> np.ndarray:
        """(T,) int64: the address of each row's terms; 0 for a row without an adapter."""
        size = self.terms.stride(0) * self.terms.element_size()
        places = self.terms.data_ptr() + size * np.arange(len(self.rows.slots), dtype=np.int64)
        return np.where(self.rows.slots >= 0, places, 0)
