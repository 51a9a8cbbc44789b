"""Buffers that the CUDA graphs of steps share: inputs and results at fixed addresses, and the memory in
between."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ramify.kernels.machine.transfers import to_device
from ramify.runtime.executor.attention import PlannedAttention, StepAttention
from ramify.runtime.executor.batch import ForwardBatch
from ramify.runtime.executor.kv_pool import KvPool, StepStates
from ramify.runtime.model.shape.config import ModelShape

if TYPE_CHECKING:
    from ramify.kernels.triton.plan.attention_graph import StaticPlan

Compute = Callable[[Tensor, Tensor, Tensor, StepAttention, StepStates | None], Tensor]
"""(ids, positions, slots, attention, states) → hidden states."""


@dataclasses.dataclass(slots=True)
class GraphStep:
    """A step that is captured or will be captured: the buffers of its plans by window size, and its graph,
    None before the capture."""

    rooms: dict[int, StaticPlan]
    graph: torch.cuda.CUDAGraph | None = None
    bytes: int = 0
    """The device's memory that the graph takes, including the driver's share."""

    @property
    def programs(self) -> int:
        """Programs of attention that a layer of each window size launches."""
        return sum(room.programs for room in self.rooms.values())


@dataclasses.dataclass(slots=True)
class Captures:
    """A count of captured graphs, and their cost.

    graphs : captures until now, also of graphs that were released
    seconds : of the captures, and of the runs over padding before them
    bytes : of the device's memory that the present graphs take, including the driver's share
    awaited : steps that ran without a graph of their form, which is captured once the form has come up often
    """

    graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0
    awaited: int = 0


class GraphBuffers:
    """Steps of up to `tokens` tokens of up to `rows` requests, padded to the token count of a graph. On a
    device without CUDA graphs the same padded steps run eagerly.

    Padding tokens compute token 0 at position 0, write their keys and values into the pool's `padding_page`,
    and attend to nothing. The steps run one after the other, so all share one set of buffers. The hidden
    states of a step are valid until the next step.

    Parameters
    ----------
    max_pages : columns of the page table
    """

    def __init__(
        self,
        model: ModelShape,
        pool: KvPool,
        attention: PlannedAttention,
        compute: Compute,
        *,
        tokens: int,
        rows: int,
        max_pages: int,
    ) -> None:
        self.pool = pool
        self.device = device = pool.k.device
        self.attention = attention
        self.longest = max_pages * pool.page_size
        """Positions of the longest request."""
        self.tokens, self.rows = tokens, rows
        self._compute = compute
        self._inputs = torch.zeros(3 * tokens, dtype=torch.int64, device=device)
        self._table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        # Kernels do not write rows that attend to nothing. Zeros keep NaN out of these rows.
        heads, head_dim = model.num_heads, model.head_dim
        self._attended = torch.zeros(tokens, heads, head_dim, dtype=pool.dtype, device=device)
        self._hidden: Tensor | None = None
        self.space: Tensor | None = None
        """Memory for the softmax states of all steps. None before `reserve`: each run allocates memory."""
        self._memory: Any = None
        """The memory that all graphs share."""
        self.captured = Captures()

    def reserve(self, space_bytes: int) -> None:
        """Allocate `space_bytes` for the softmax states of all plans. Call before any plan is made."""
        if self.space is not None and self.space.nbytes >= space_bytes:
            return
        self.space = torch.empty(space_bytes // 4, dtype=torch.float32, device=self.device)

    @property
    def has_graphs(self) -> bool:
        return self.device.type == "cuda"

    def capture_steps(self, steps: Iterable[tuple[GraphStep, int, Callable[[], Tensor]]]) -> None:
        """Capture `steps`, each as (step, size, function that runs the step), if the device has CUDA graphs.
        The largest step comes first: the others reuse its memory. Later steps are captured as they run."""
        if not self.has_graphs:
            return
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        for step, size, run in steps:
            began = time.monotonic()
            self.clear(size)
            run()
            self.captured.seconds += time.monotonic() - began
            self._capture(step, run)

    def load_batch(self, batch: ForwardBatch, size: int) -> None:
        """Copy a batch of at most `size` tokens, padded to `size`, into the input buffers."""
        count, width = batch.page_table.shape
        padded = torch.zeros(3, size, dtype=torch.int64)
        padded[2] = self.pool.padding_page * self.pool.page_size
        padded[:, : batch.tokens.shape[1]] = batch.tokens
        inputs = self._inputs_of(size)
        inputs.copy_(to_device(padded, self.device))
        if batch.next_ids is not None:
            inputs[0, : len(batch.next_ids)].copy_(batch.next_ids)
        self._table[:count, :width].copy_(to_device(batch.page_table, self.device))

    def run_padded(
        self, size: int, rows: int, rooms: Mapping[int, StaticPlan], states: StepStates | None = None
    ) -> Tensor:
        """Run a step of `size` tokens on the loaded batch. Returns its hidden states: (size, hidden)."""
        ids, positions, slots = self._inputs_of(size)
        plans = {window: room.plan for window, room in rooms.items()}
        attention = self.attention.planned(plans, self._table[:rows], self._attended[:size])
        hidden = self._compute(ids, positions, slots, attention, states)
        if self._hidden is None:
            self._hidden = hidden.new_empty(self.tokens, hidden.shape[1])
        # All graphs share one result: hundreds of results would take hundreds of MiB. A copy is one launch.
        return self._hidden[:size].copy_(hidden)

    def clear(self, size: int) -> None:
        """Load a batch of `size` tokens that are all padding."""
        inputs = self._inputs_of(size)
        inputs[:2].zero_()
        inputs[2].fill_(self.pool.padding_page * self.pool.page_size)

    def compute(self, step: GraphStep, size: int, run: Callable[[], Tensor]) -> Tensor:
        """The hidden states of the loaded batch, by the graph of `step`. Without a graph, runs and then
        captures the step."""
        if step.graph is not None:
            assert self._hidden is not None
            step.graph.replay()
            return self._hidden[:size]
        hidden = run()
        if self._memory is not None:  # for the steps to come: capturing computes nothing
            self._capture(step, run)
        return hidden

    def release(self, step: GraphStep) -> None:
        """Give back the memory of a step's graph. Waits for the device, as the graph may be running."""
        if step.graph is None:
            return
        torch.cuda.synchronize()
        step.graph.reset()
        self.captured.bytes -= step.bytes
        step.graph, step.bytes = None, 0

    def _capture(self, step: GraphStep, run: Callable[[], Tensor]) -> None:
        """Capture `run`, which must have run before: kernels cannot be compiled during a capture."""
        began = time.monotonic()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a capture begins with it: what that gives back is not the graph's
        free, _ = torch.cuda.mem_get_info(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            run()
        step.graph, step.bytes = graph, free - torch.cuda.mem_get_info(self.device)[0]
        self.captured.graphs += 1
        self.captured.bytes += step.bytes
        self.captured.seconds += time.monotonic() - began

    def _inputs_of(self, size: int) -> Tensor:
        """(3, size): ids, positions and slots of a step."""
        return self._inputs[: 3 * size].view(3, size)
