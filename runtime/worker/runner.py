"""Runs the model: one forward pass over a packed batch, then the logits of the rows that need them."""

from __future__ import annotations

import torch

from ramify.kernels.registry import Ops
from ramify.runtime.model.decoder import Model
from ramify.runtime.worker.batch import ForwardBatch
from ramify.runtime.worker.kv_pool import KvPool


class Runner:
    """Owns the model and its KV pages."""

    def __init__(self, model: Model, pool: KvPool, ops: Ops) -> None:
        self.model = model
        self.pool = pool
        self._ops = ops
        self._scale = model.config.head_dim**-0.5
        # Views of the pool, made once: indexing it costs 2 us, twice a layer in every step.
        self._k_layers, self._v_layers = list(pool.k), list(pool.v)
        model.use_norm(ops.rms_norm)
        self.apply_mask = ops.apply_mask
        if ops.linear is not None:
            model.use_linear(ops.linear)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Copy pages, store the new tokens' KV, and return the hidden states: (T, hidden)."""
        ops, pool, scale = self._ops, self.pool, self._scale
        k_layers, v_layers = self._k_layers, self._v_layers
        if batch.copies:
            sources, destinations = zip(*batch.copies, strict=True)
            ops.copy_pages(pool.k, pool.v, list(sources), list(destinations))

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            rotation: torch.Tensor,
            *,
            window: int = 0,
        ) -> torch.Tensor:
            k_pages, v_pages = k_layers[layer], v_layers[layer]
            ops.rope_store_kv(q, k, v, rotation, k_pages, v_pages, batch.slots)
            attended: torch.Tensor = ops.paged_attention(
                q,
                k_pages,
                v_pages,
                batch.page_table,
                batch.query_starts,
                batch.kv_lens,
                scale=scale,
                window=window,
            )
            return attended

        hidden: torch.Tensor = self.model(batch.ids, batch.positions, attend)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(R, hidden) → (R, vocab) float32."""
        return self.model.logits(hidden)
