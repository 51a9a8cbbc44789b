"""Copies a checkpoint's tensors into a model, and checks that none is missing or left over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ramify.errors import InvalidRequest
from ramify.kernels.machine.threads import on_threads
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.checkpoint import open_shard, weight_files
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import Rotary, Slot
from ramify.runtime.model.shape.shard import parts_of_rank

RotaryLayout = Literal["halves", "pairs"]
"""The places of the two numbers of a rotary pair in a checkpoint: half a head apart, or neighbours."""


@torch.inference_mode()
def fill(
    model: Model, tensors: Iterable[tuple[str, Tensor | Rows]], *, layout: RotaryLayout, keep: bool = True
) -> None:
    """Copy `tensors` (Hugging Face names) into `model`, converting to its dtype.

    With `keep`, the model keeps quantised rows by which it can multiply; other rows are dequantised.

    Raises `InvalidRequest`, with the name, for a tensor that is missing, unknown or of another shape.
    """
    slots = dict(model.slots())
    needed, filled = len(slots), set[str]()
    stored_head: Tensor | None = None
    named: Iterator[tuple[str, Tensor | Rows]] = (
        part for stored, each in tensors for part in model.entries(stored, each)
    )
    if model.config.shard.count > 1:
        named = parts_of_rank(named, model.config, keep=keep)
    for name, entry in named:
        tensor = entry.numbers if isinstance(entry, Rows) else entry
        if name == "lm_head.weight" and model.config.tie_embeddings:
            stored_head = entry.values() if isinstance(entry, Rows) else entry
            continue
        # Popped, not kept: a slot holds the memory of a matrix, which is packed once its slots are filled.
        slot = slots.pop(name, None)
        if name in filled:
            raise _bad(f"holds {name} twice")
        if slot is None:
            # GPTQ's library writes a bias of zeros for a projection that has none.
            if name.endswith(".bias") and model.config.quantised is not None and not tensor.any():
                continue
            raise _bad(f"has a tensor that a {model.config.family} model does not: {name}")
        if tensor.shape != slot.target.shape:
            name = model.stored_name(name)
            raise _bad(f"gives {name} shape {tuple(tensor.shape)}; {tuple(slot.target.shape)} is needed")
        if isinstance(entry, Rows):
            _keep(slot, entry, layout, keep=keep)
        elif not tensor.is_floating_point() or tensor.element_size() < 2:
            name = model.stored_name(name)
            raise _bad(f"holds {name} as {tensor.dtype}; float32, float16 or bfloat16 is needed")
        else:
            copy_rows(slot, tensor, layout)
        filled.add(name)
        if slot.filled is not None:
            slot.filled()
    if slots:
        names = ", ".join(sorted(map(model.stored_name, slots))[:3])
        raise _bad(f"lacks {len(slots)} of its {needed} tensors: {names}{', …' * (len(slots) > 3)}")
    if stored_head is not None and not torch.equal(stored_head.to(model.embedding), model.embedding):
        raise _bad("ties its head to its embedding, yet stores another head in lm_head.weight")


def copy_rows(slot: Slot, tensor: Tensor, layout: RotaryLayout) -> None:
    """Copy `tensor` to the slot's target, with rows in the target's order and rotary pairs side by side."""
    if slot.order is not None:
        tensor = tensor[slot.order]
    slot.target.copy_(tensor)
    if slot.rotary is not None and layout == "halves":
        pair_rows(slot.target, tensor, slot.rotary)
    if slot.offset:
        slot.target.add_(slot.offset)


def pair_rows(target: Tensor, tensor: Tensor, rotary: Rotary) -> None:
    """Copy the rows of `tensor` that rotate into `target`. The two rows of a pair are half a head apart in
    `tensor`, and neighbours in `target`."""
    pairs, halves = _rotated_rows(target, rotary), _rotated_rows(tensor, rotary)
    pairs.unflatten(1, (-1, 2)).copy_(halves.unflatten(1, (2, -1)).transpose(1, 2))


def _rotated_rows(rows: Tensor, rotary: Rotary) -> Tensor:
    """The rows of each head that rotate: (heads, rotated, …)."""
    return rows[: rotary.heads * rotary.size].unflatten(0, (rotary.heads, -1))[:, : rotary.rotated]


VALUES_AT_ONCE = 1 << 19
"""Weights that a thread dequantises at a time."""


def _keep(slot: Slot, rows: Rows, layout: RotaryLayout, *, keep: bool) -> None:
    if slot.order is not None:
        rows = rows.index_select(slot.order)
    if slot.rotary is not None and layout == "halves":
        order = torch.arange(len(rows))
        rotated = _rotated_rows(order, slot.rotary)
        rotated.copy_(rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1))
        rows = rows.index_select(order)
    if keep and slot.keep is not None and slot.keep(rows):
        return
    step = max(1, VALUES_AT_ONCE // rows.numbers.shape[1])

    def copy(start: int) -> None:
        part = slice(start, start + step)
        slot.target[part].copy_(rows.decoded(part).values())

    on_threads(copy, range(0, len(rows), step))


def tensors_in_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each tensor in the safetensors files of `folder`, memory-mapped one at a time."""
    for path in weight_files(folder):
        with open_shard(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                yield name, shard.get_tensor(name)


def _bad(reason: str) -> InvalidRequest:
    return InvalidRequest(f"This checkpoint {reason}.", field="model")
