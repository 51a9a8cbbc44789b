"""Decoding steps as CUDA graphs, captured at a ladder of batch sizes; batches in between are padded.

At each size there is a graph for each level of attention's flat plans (`attention_graph`), so that a step
launches at most about twice the programs that have work. Graphs of cascade plans, whose forms are many, are
captured when a form has come up `OFTEN` times; the steps before run eagerly.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ramify.runtime.executor.attention import PlannedAttention, StepAttention, to_device
from ramify.runtime.executor.batch import ForwardBatch
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.executor.state_pool import StatePool, StepStates
from ramify.runtime.model.config import ModelShape

if TYPE_CHECKING:
    from ramify.kernels.triton.plan.attention_graph import Form, StaticPlan
    from ramify.kernels.triton.plan.attention_plan import Plan

OFTEN = 8
"""Steps of a form of cascade plans before it is captured, which takes about as long as ten steps."""
MOST_LATE = 64
"""Graphs of cascade plans; further forms run eagerly."""

LIBRARY_BYTES = 64 << 20
"""Of the workspaces of cuBLAS and cuBLASLt on the stream that captures: 32 MiB each from sm_90 on, less
before (torch's defaults)."""

Key = tuple[int, tuple["Form", ...]]
"""The index of a size, and the form of each window size's plan."""

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


@dataclasses.dataclass(slots=True)
class _Step:
    """One captured step: the buffers of its plans by window size, and its graph and result once captured."""

    rooms: dict[int, StaticPlan]
    graph: torch.cuda.CUDAGraph | None = None
    hidden: Tensor | None = None


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
        self._longest = max_pages * pool.page_size
        self._memory: Any = None
        """The memory that all graphs share."""
        self._space = torch.empty(self.space_bytes() // 4, dtype=torch.float32, device=device)
        self._steps = {key: self._step_of(key) for key in self.planned_keys()}
        self._seen: Counter[Key] = Counter()
        self._late = 0

    def planned_keys(self) -> Iterator[Key]:
        """Of the steps that are captured at start, those of the largest size first."""
        from ramify.kernels.triton.plan.attention_graph import Form

        for index in reversed(range(len(self.sizes))):
            for level in reversed(range(1 + max(self._highest(index).values()))):
                yield index, tuple(self._bounded(index, [Form(level)] * len(self._attention.planners)))

    def space_bytes(self) -> int:
        """Bytes of the softmax states of all graphs, which run one after the other."""
        return max(
            (
                planner.state_bytes(form, self.sizes[index], self._positions(index))
                for index, forms in self._largest_keys()
                for planner, form in zip(self._attention.planners.values(), forms, strict=True)
            ),
            default=0,
        )

    def _largest_keys(self) -> Iterator[Key]:
        """The keys of the most states: of the largest size, with and without a cascade."""
        for index, forms in self.planned_keys():
            if index == len(self.sizes) - 1:
                yield index, forms
                tile = next(iter(self._attention.planners.values())).shape.tiles[0]
                listed = [form._replace(listed=((tile, 1),)) for form in forms]
                yield index, tuple(listed)

    def _highest(self, index: int) -> dict[int, int]:
        """By window size, the highest level of flat plans."""
        size, positions = self.sizes[index], self._positions(index)
        return {
            window: planner.highest_level(size, positions)
            for window, planner in self._attention.planners.items()
        }

    def _positions(self, index: int) -> int:
        """The most positions that the decodes of a size can see together."""
        return min(self._pool.num_pages * self._pool.page_size, self.sizes[index] * self._longest)

    def _bounded(self, index: int, forms: Sequence[Form]) -> Iterator[Form]:
        """One level for all window sizes, as far as their plans reach it, so that there are few keys."""
        level = max(form.level for form in forms)
        for form, highest in zip(forms, self._highest(index).values(), strict=True):
            yield form._replace(level=min(level, highest))

    def _step_of(self, key: Key) -> _Step:
        index, forms = key
        size, positions = self.sizes[index], self._positions(index)
        return _Step(
            {
                window: planner.room(form, size, positions, self._space)
                for (window, planner), form in zip(self._attention.planners.items(), forms, strict=True)
            }
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every step that is planned, the largest first: the others reuse its memory."""
        if self._pool.k.device.type != "cuda":
            return
        self._memory = torch.cuda.graph_pool_handle()
        for key, step in self._steps.items():
            self._tokens[key[0]][2].fill_(self._pool.padding_page * self._pool.page_size)
            self._run(key[0], step)  # compiles kernels, which must not happen during a capture
            self._capture(key[0], step)

    def _capture(self, index: int, step: _Step) -> None:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            step.hidden = self._run(index, step)
        step.graph = graph

    def run(self, batch: ForwardBatch) -> Tensor | None:
        """The hidden states of a batch of decodes; None where the batch is too large, or its plan has no
        graph."""
        count, width = batch.page_table.shape
        index = bisect.bisect_left(self.sizes, count)
        if index == len(self.sizes):
            return None
        plans = self._attention.plans(batch, torch.device("cpu"))
        step = self._find(index, plans)
        if step is None or not all(room.load(plans[window]) for window, room in step.rooms.items()):
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
        if step.graph is None:
            hidden = self._run(index, step)
            if self._memory is not None:  # for the steps to come: capturing computes nothing
                self._capture(index, step)
            return hidden[:count]
        step.graph.replay()
        assert step.hidden is not None
        return step.hidden[:count]

    def _find(self, index: int, plans: dict[int, Plan]) -> _Step | None:
        """The step of these plans; None where it has none yet."""
        planners = self._attention.planners
        forms = [planner.form(plans[window], self.sizes[index]) for window, planner in planners.items()]
        key = index, tuple(self._bounded(index, forms))
        step = self._steps.get(key)
        if step is None and self._late < MOST_LATE and any(form.listed for form in forms):
            self._seen[key] += 1
            if self._seen[key] == OFTEN:
                self._late += 1
                step = self._steps[key] = self._step_of(key)
        return step

    def _padded(self, tokens: Tensor, size: int) -> Tensor:
        padded = torch.zeros(3, size, dtype=torch.int64)
        padded[2] = self._pool.padding_page * self._pool.page_size
        padded[:, : tokens.shape[1]] = tokens
        return padded

    def _run(self, index: int, step: _Step) -> Tensor:
        tokens = self._tokens[index]
        plans = {window: room.plan for window, room in step.rooms.items()}
        size = self.sizes[index]
        attention = self._attention.planned(plans, self._table[:size], self._attended[:size])
        states = None
        if self._states is not None:
            slots, starts, lens = self._states
            states = StepStates(slots[:size], starts[: size + 1], lens[:size])
        return self._compute(tokens[0], tokens[1], tokens[2], attention, states)


def bytes_beside(attention: PlannedAttention, sizes: Sequence[int], positions: int, hidden_bytes: int) -> int:
    """The most bytes that graphs of `sizes` take beside the largest step's: softmax states, results and
    library workspaces.

    positions : of the KV pages, at the most
    hidden_bytes : of a token's hidden state
    """
    from ramify.kernels.triton.plan.attention_graph import Form

    states = rows = 0
    for planner in attention.planners.values():
        levels = [planner.highest_level(size, positions) for size in sizes]
        form = Form(max(levels[-1], 1), ((planner.shape.tiles[0], 1),))
        states = max(states, planner.state_bytes(form, sizes[-1], positions))
        rows = max(rows, sum(size * (level + 1) for size, level in zip(sizes, levels, strict=True)))
    return states + rows * hidden_bytes + LIBRARY_BYTES
