"""Decoding steps as CUDA graphs, captured at a ladder of batch sizes; batches in between are padded."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ramify.runtime.executor.attention import PlannedAttention, StepAttention, to_device
from ramify.runtime.executor.batch import ForwardBatch
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.state_pool import StatePool, StepStates
from ramify.runtime.model.config import ModelShape

if TYPE_CHECKING:
    from ramify.kernels.triton.plan.attention_graph import StaticPlan

Compute = Callable[[Tensor, Tensor, Tensor, StepAttention, StepStates | None], Tensor]
"""(ids, positions, slots, attention, states) → hidden states."""


def ladder(largest: int) -> list[int]:
    """Batch sizes up to `largest`: powers of two and the means of neighbours, so at most a third is
    padding."""
    sizes = {1, largest}
    power = 2
    while power < largest:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """Decodes of up to ``max(sizes)`` requests. On a device without CUDA graphs the same steps run eagerly.

    A step of B requests takes the smallest size of at least B. The padding rows compute token 0 at position
    0, write its keys and values into the pool's spare page and its state into the spare slot, and attend to
    nothing.

    Parameters
    ----------
    sizes : ascending
    max_pages : columns of the page table
    states : for models whose shape has some
    """

    def __init__(
        self,
        sizes: Sequence[int],
        max_pages: int,
        model: ModelShape,
        pool: KvPool,
        attention: PlannedAttention,
        compute: Compute,
        states: StatePool | None = None,
    ) -> None:
        self.sizes = list(sizes)
        device = pool.k.device
        self._states: StepStates | None = None
        if states is not None:
            slots = torch.full((self.sizes[-1],), states.padding_slot, device=device)
            starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
            self._states = StepStates(slots, starts, torch.ones_like(starts)[1:])
            self._padding_slot = states.padding_slot
        self._pool = pool
        self._attention = attention
        self._compute = compute
        self._tokens = [torch.zeros(3, size, dtype=torch.int64, device=device) for size in self.sizes]
        self._table = torch.zeros(self.sizes[-1], max_pages, dtype=torch.int32, device=device)
        # Rows that attend to nothing are not written: zeros, so that they hold numbers and no NaN.
        heads, head_dim = model.num_heads, model.head_dim
        self._attended = torch.zeros(self.sizes[-1], heads, head_dim, dtype=pool.k.dtype, device=device)
        pool_tokens = pool.num_pages * pool.page_size
        self._rooms: list[dict[int, StaticPlan]] = [
            {window: planner.room(size, pool_tokens) for window, planner in attention.planners.items()}
            for size in self.sizes
        ]
        self._graphs: list[torch.cuda.CUDAGraph | None] = [None] * len(self.sizes)
        self._hidden: list[Tensor | None] = [None] * len(self.sizes)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first: the others reuse its memory."""
        if self._pool.k.device.type != "cuda":
            return
        memory = torch.cuda.graph_pool_handle()
        for index in reversed(range(len(self.sizes))):
            self._tokens[index][2].fill_(self._pool.padding_page * self._pool.page_size)
            self._step(index)  # compiles kernels, which must not happen during a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._hidden[index] = self._step(index)
            self._graphs[index] = graph

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """The hidden states of a batch of decodes; None where the batch or its plan is too large."""
        count, width = batch.page_table.shape
        index = bisect.bisect_left(self.sizes, count)
        if index == len(self.sizes):
            return None
        plans = self._attention.plans(batch, torch.device("cpu"))
        if not all(room.load(plans[window]) for window, room in self._rooms[index].items()):
            return None
        tokens, device = self._tokens[index], self._table.device
        tokens.copy_(to_device(self._padded(batch.tokens, self.sizes[index]), device))
        if batch.next_ids is not None:
            tokens[0, :count].copy_(batch.next_ids)
        self._table[:count, :width].copy_(to_device(batch.page_table, device))
        if self._states is not None:
            assert batch.states is not None
            slots, _, lens = self._states
            slots[:count].copy_(to_device(batch.states, device))
            slots[count:].fill_(self._padding_slot)
            lens[:count].copy_(to_device(batch.kv_lens, device))
        graph = self._graphs[index]
        if graph is None:
            return self._step(index)[:count]
        graph.replay()
        hidden = self._hidden[index]
        assert hidden is not None
        return hidden[:count]

    def _padded(self, tokens: Tensor, size: int) -> Tensor:
        padded = torch.zeros(3, size, dtype=torch.int64)
        padded[2] = self._pool.padding_page * self._pool.page_size
        padded[:, : tokens.shape[1]] = tokens
        return padded

    def _step(self, index: int) -> Tensor:
        tokens = self._tokens[index]
        plans = {window: room.plan for window, room in self._rooms[index].items()}
        size = self.sizes[index]
        attention = self._attention.planned(plans, self._table[:size], self._attended[:size])
        states = None
        if self._states is not None:
            slots, starts, lens = self._states
            states = StepStates(slots[:size], starts[: size + 1], lens[:size])
        return self._compute(tokens[0], tokens[1], tokens[2], attention, states)
