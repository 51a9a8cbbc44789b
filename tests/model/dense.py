"""A plain reference for `Attend`: contiguous keys and values of one request, masked attention in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.kernels.reference.norm import rms_norm
from ramify.runtime.model.layers import HeadNorms
from ramify.runtime.model.loading.load import Model
from ramify.runtime.model.rope import rotate_
from ramify.runtime.model.shape.config import ModelConfig


class DenseAttend:
    """Keeps every layer's keys and values; each call appends to them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Tensor,
        *,
        window: int = 0,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if norms is not None:
            q, k = (rms_norm(x, weight, norms.eps) for x, weight in ((q, norms.q), (k, norms.k)))
        q, k = rotate_(q, rotation), rotate_(k, rotation)
        empty = k.new_empty(0, *k.shape[1:])
        keys = self.keys[layer] = torch.cat((self.keys.get(layer, empty), k))
        values = self.values[layer] = torch.cat((self.values.get(layer, empty), v))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q.float(), keys.repeat_interleave(group, 1).float())
        scores *= self.config.score_scale
        if cap := self.config.attention_soft_cap:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(len(keys) - len(q), len(keys))[:, None] - torch.arange(len(keys))
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(group, 1).float()).to(q.dtype)


def logits(model: Model, ids: Tensor, *, step: int = 0) -> Tensor:
    """Logits of every position, (T, vocab), computed `step` tokens at a time (0: all at once)."""
    attend, rows = DenseAttend(model.config), []
    for start in range(0, len(ids), step or len(ids)):
        part = ids[start : start + (step or len(ids))]
        hidden = model(part, torch.arange(start, start + len(part)), attend)
        rows.append(model.logits(hidden))
    return torch.cat(rows)
