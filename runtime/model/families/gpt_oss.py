"""gpt-oss (arXiv 2508.10925): attention sinks, a window in every other layer, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.experts import Entry
from ramify.runtime.model.families.llama import LlamaLayer


class GptOss(Model):
    layer_type = LlamaLayer

    def entries(self, stored: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
        """The entries of the tensor `stored`, by their names in `slots`.

        A checkpoint folder stores the experts of a layer as one tensor, in which rows of gate and up
        alternate. In mxfp4 this tensor is `Rows` of shape (experts * outputs, inputs), otherwise a tensor
        (experts, inputs, outputs).
        """
        stored = stored.replace(".sinks.weight", ".sinks")  # as GGUF files have it
        stem, _, last = stored.partition(".experts.")
        experts = self.config.experts
        if not last.startswith(("gate_up_proj", "down_proj")) or experts is None:
            yield from super().entries(stored, entry)
            return
        matrix, _, kind = last.partition("_proj")
        names = ("gate", "up") if matrix == "gate_up" else (matrix,)
        end = "bias" if kind == "_bias" else "weight"
        for index in range(experts.count):
            for place, name in enumerate(names):
                if isinstance(entry, Rows):
                    outputs = len(entry) // experts.count
                    rows = range(index * outputs + place, (index + 1) * outputs, len(names))
                    part: Entry = entry.index_select(torch.tensor(rows))
                else:
                    both = entry[index] if end == "bias" else entry[index].t()
                    part = both[place :: len(names)]
                yield f"{stem}.experts.{index}.{name}_proj.{end}", part
