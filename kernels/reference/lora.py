"""LoRA adapters of several requests in one product, in torch."""

from __future__ import annotations

from torch import Tensor

from ramify.kernels.reference.norm import rms_norm
from ramify.kernels.weights.lora import LoraRows, LoraTable


def lora(
    x: Tensor,
    table: LoraTable,
    rows: LoraRows,
    *,
    out: Tensor,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """out[t] += scale · (x[t] Aᵀ) Bᵀ with the adapter of row t; rows without an adapter are not changed.

    The product is float32 inside, and the sum is rounded once. The bits of a row depend on that row and its
    adapter alone if the backend is deterministic.

    Parameters
    ----------
    x : (T, inputs) float32 or bfloat16; rows contiguous
    table : the weights by slot, in the dtype of x; a slot without weights adds nothing
    rows : the slot of each row
    out : (T, outputs) float32 or the dtype of x; rows contiguous
    norm : (inputs,) weight in the dtype of x, and eps; optional
        Apply `rms_norm` to x first, rounded to the dtype of x.
    """
    order, _ = rows.on(x.device)
    for slot, first, stop in rows.segments.tolist():
        weight = table.weights.get(slot)
        if weight is None:
            continue
        these = order[first:stop]
        picked = x[these] if norm is None else rms_norm(x[these].contiguous(), *norm)
        hidden = picked.float() @ weight.a[:, : x.shape[1]].float().t() * weight.scales
        start = 0
        for part in weight.parts:
            rank, place = part.rank, slice(part.start, part.start + part.columns)
            added = hidden[:, start : start + rank] @ part.b_of_columns().float()
            out[these, place] = (out[these, place].float() + added).to(out.dtype)
            start += rank
    return out
