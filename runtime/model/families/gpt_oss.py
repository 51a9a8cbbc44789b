"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every other layer, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ramify.kernels.packed import Rows
from ramify.runtime.model.decoder import Layer, Model
from ramify.runtime.model.experts import Entry
from ramify.runtime.model.families.llama import LlamaLayer


class GptOss(Model):
    def layer(self, index: int, dtype: torch.dtype) -> Layer:
        return LlamaLayer(self.config, index, dtype)

    def entries(self, stored: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """A checkpoint has all experts of a layer in one tensor, with the rows of gate and up in turn.

        Those of mxfp4 are rows, (experts * outputs, inputs). Others are (experts, inputs, outputs).
        """
        stem, found, last = stored.partition(".experts.")
        experts = self.config.experts
        if not found or experts is None:
            yield from super().entries(stored, entry)
            return
        matrix, _, kind = last.partition("_proj")
        names = ("gate", "up") if matrix == "gate_up" else (matrix,)
        for index in range(experts.count):
            if isinstance(entry, Rows):
                count = len(entry.numbers) // experts.count
                both: Entry = entry.index_select(torch.arange(index * count, (index + 1) * count))
            else:
                both = entry[index] if kind == "_bias" else entry[index].t()
            for place, name in enumerate(names):
                part: Entry = _every(both, len(names), place)
                end = "bias" if kind == "_bias" else "weight"
                yield f"{stem}.experts.{index}.{name}_proj.{end}", part


def _every(rows: Entry, step: int, first: int) -> Entry:
    """Every `step`th row, from `first` on."""
    if isinstance(rows, Tensor):
        return rows[first::step]
    return rows.index_select(torch.arange(first, len(rows.numbers), step))
