"""A toy hybrid model: an attention layer, and a recurrent layer with a strong effect on the output.

The recurrence goes token by token in plain torch, so that chunks and batches do not change its values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack
from ramify.runtime.executor.device import resolve_ops
from ramify.runtime.executor.kv_pool import KvPool, StatePool
from ramify.runtime.model.causal_lm import Attend, CausalLM
from ramify.runtime.model.shape.config import ModelShape, StateShape
from tests.runtime.local import WatchedRunner
from tests.runtime.tiny import END_ID, VOCAB

HIDDEN, HEADS, DIM = 32, 2, 16


class ToyHybrid(CausalLM):
    def __init__(self) -> None:
        super().__init__(
            ModelShape(
                family="toy",
                vocab_size=VOCAB,
                num_layers=1,
                num_heads=HEADS,
                num_kv_heads=1,
                head_dim=DIM,
                context_length=2048,
                windows=(0,),
                eos_token_ids=(END_ID,),
                states=StateShape(layers=1, channels=HIDDEN, width=2, heads=1, key_dim=8, value_dim=HIDDEN),
            )
        )
        made = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

        self.embedding, self.head = weight(VOCAB, HIDDEN) * 8, weight(VOCAB, HIDDEN) * 4
        self.qkv = weight((HEADS + 2) * DIM, HIDDEN)
        self.out = weight(HIDDEN, HEADS * DIM)
        self.key, self.query = weight(8, HIDDEN), weight(8, HIDDEN)
        self.runner: ToyRunner | None = None

    def use_kernels(self, ops: Any) -> None:
        pass

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, hidden: Tensor | None = None) -> Tensor:
        x = self.embedding[ids]
        q, k, v = (x @ self.qkv.T).split([HEADS * DIM, DIM, DIM], dim=-1)
        rotation = torch.polar(torch.ones(len(ids), DIM // 2), positions[:, None] / torch.arange(1.0, 9.0))
        heads = (q.reshape(-1, HEADS, DIM), k.reshape(-1, 1, DIM), v.reshape(-1, 1, DIM))
        x = x + attend(0, *heads, rotation).reshape(len(ids), -1) @ self.out.T
        x = x / x.norm(dim=-1, keepdim=True)
        return x + self.recurrent(x, positions)

    def recurrent(self, x: Tensor, positions: Tensor) -> Tensor:
        assert self.runner is not None
        batch, pool = self.runner.batch, self.runner.states
        assert batch.states is not None
        assert pool is not None
        slots = batch.states.tolist()
        assert len(set(slots)) == len(slots)
        keys, queries, out = x @ self.key.T, x @ self.query.T, torch.empty_like(x)
        starts = batch.query_starts.tolist()
        for slot, start, stop in zip(slots, starts, starts[1:], strict=False):
            before, state = pool.conv[0, slot, :, 0], pool.recurrent[0, slot, 0]
            if positions[start] == 0:
                before, state = torch.zeros_like(before), torch.zeros_like(state)
            for token in range(start, stop):
                state = 0.97 * state + torch.outer(keys[token], x[token] + 0.5 * before)
                out[token], before = queries[token] @ state, x[token]
            pool.conv[0, slot, :, 0], pool.recurrent[0, slot, 0] = before, state
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


class ToyRunner(WatchedRunner):
    """A runner that gives the toy model access to the current batch."""

    batch: ForwardBatch

    def forward(self, batch: ForwardBatch) -> Tensor:
        assert isinstance(self.model, ToyHybrid)
        self.model.runner, self.batch = self, batch
        return super().forward(batch)


def oracle(toy: ToyHybrid) -> Any:
    """A function like a transformers model: one pass for each sequence, with its own pages and slot."""
    _, kernels = resolve_ops(EngineConfig(), torch.device("cpu"))
    pool = KvPool(toy.config, num_pages=16, page_size=16, dtype=torch.float32)
    assert toy.config.states is not None
    runner = ToyRunner(toy, pool, kernels, states=StatePool(toy.config.states, num_slots=1))

    def compute(input_ids: Tensor) -> SimpleNamespace:
        ids = input_ids[0].numpy().astype(np.int32)
        hidden = runner.forward(pack([Extension(ids, 0, len(ids), range(16), 0)], 16))
        return SimpleNamespace(logits=runner.logits(hidden)[None])

    return compute
