"""Decoding steps as CUDA graphs, captured at a ladder of batch sizes; batches in between are padded.

At each size there is a graph for each level of the flat plans of attention, which have no cascade
(`attention_graph.Form`). So a step launches at most about twice the programs that have work. Sizes other than
powers of two, the means of adjacent powers and the largest size have graphs of the two lowest levels alone,
because large batches rarely need a higher level. A step with a higher level is padded to the next size that
has a graph of it.

Each coarse size has two graphs for cascades besides (`attention_graph.cascade_form`). Plans with other forms,
such as flat plans that merge few tokens, take a graph that has room for them until their own is captured
(`captured_steps.py`). A step that finds none at its size is padded to at most `MOST_PADDED` times its size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ramify.kernels.machine.transfers import to_device
from ramify.runtime.executor.attention import PlannedAttention
from ramify.runtime.executor.batch import ForwardBatch
from ramify.runtime.executor.captured_steps import MOST_LATE, CapturedSteps
from ramify.runtime.executor.graph_buffers import GraphBuffers, GraphStep
from ramify.runtime.executor.kv_pool import StatePool, StepStates

if TYPE_CHECKING:
    from ramify.kernels.triton.plan.attention_graph import Form
    from ramify.kernels.triton.plan.attention_plan import Plan

MOST_PADDED = 2
"""The most rows of a padded step, as a multiple of its size in the ladder. A step that would need more runs
eagerly."""
FINE = ((256, 8), (1 << 30, 16))
"""(largest size, step) of adjacent ranges of sizes. In each range the ladder has all multiples of the step,
in addition to the coarse sizes."""
FINE_LEVELS = 2
"""Number of levels of flat plans, the lowest ones, that have a graph at every size. Higher levels have graphs
at coarse sizes alone."""
CASCADES = 2
"""The most graphs for cascades at a coarse size."""

LIBRARY_BYTES = 64 << 20
"""Bytes of the workspaces of cuBLAS and cuBLASLt on the stream that captures: torch's defaults are 32 MiB
each from sm_90 on, and less on older GPUs."""
GRAPH_BYTES = 96 << 10
"""Bytes that the driver takes for a graph, for each layer. An H100 took 0.55 GB for 182 graphs of 32 layers
(2026-11-27)."""

Key = tuple[int, tuple["Form", ...]]
"""(index of a size, forms of the plans: one for each window size)."""


def ladder(largest: int) -> list[int]:
    """Batch sizes up to `largest`: powers of two, the means of adjacent powers, multiples of 8 up to 256,
    multiples of 16 above, and `largest`."""
    sizes = {1, largest}
    power = 2
    while power < largest:
        sizes |= {power, power + power // 2}
        power *= 2
    low = 0
    for high, step in FINE:
        sizes |= set(range(low + step, min(high, largest) + 1, step))
        low = high
        if largest <= high:
            break
    return sorted(size for size in sizes if size <= largest)


def is_coarse(size: int) -> bool:
    """Whether `size` is a power of two, or the mean of two adjacent powers."""
    odd = size // (size & -size)
    return odd == 1 or (odd == 3 and size > 1)


class DecodeGraphs:
    """Decodes of up to ``max(sizes)`` requests, padded to the next of `sizes`. `sizes` ascend. Padding rows
    write their state into `StatePool.padding_slot`.

    buffers : with room for ``max(sizes)`` tokens and rows
    states : the pool of states, for models that have states
    """

    def __init__(self, sizes: Sequence[int], buffers: GraphBuffers, states: StatePool | None = None) -> None:
        self.sizes = list(sizes)
        self.buffers = buffers
        self._states: StepStates | None = None
        if states is not None:
            slots = torch.full((self.sizes[-1],), states.padding_slot, device=buffers.device)
            starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=buffers.device)
            self._states = StepStates(slots, starts, torch.ones_like(starts)[1:])
            self._padding_slot = states.padding_slot
        self._attention = buffers.attention
        self._coarse = [is_coarse(size) or size == self.sizes[-1] for size in self.sizes]
        buffers.reserve(self.space_bytes())
        self.steps = CapturedSteps(buffers, self._step_of, self.planned_keys())

    def planned_keys(self) -> Iterator[Key]:
        """Keys of the graphs that are captured at start, the largest size first."""
        from ramify.kernels.triton.plan.attention_graph import full_form

        for index in reversed(range(len(self.sizes))):
            size, count = self.sizes[index], len(self._attention.planners)
            levels = 1 + max(self._highest(index).values())
            for level in reversed(range(levels if self._coarse[index] else min(levels, FINE_LEVELS))):
                yield index, tuple(self._bounded(index, [full_form(level, size)] * count))
            if self._coarse[index] and size > 1:
                for level in self._cascade_levels(levels - 1):
                    forms = [
                        planner.cascade_form(size, level) if planner.cascades else full_form(level, size)
                        for planner in self._attention.planners.values()
                    ]
                    yield index, tuple(self._bounded(index, forms))

    def _cascade_levels(self, highest: int) -> Iterable[int]:
        """Levels of the graphs for cascades at a size: for short and for long sequences behind what they
        share."""
        cascades = any(planner.cascades for planner in self._attention.planners.values())
        return sorted({1, max(highest, 1)}) if cascades else ()

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
        """The keys that can need the most softmax states: all keys of the largest size, with and without a
        cascade."""
        for index, forms in self.planned_keys():
            if index == len(self.sizes) - 1:
                yield index, forms
                tile = next(iter(self._attention.planners.values())).shape.tiles[0]
                listed = [form._replace(listed=((tile, 1),)) for form in forms]
                yield index, tuple(listed)

    def _highest(self, index: int) -> dict[int, int]:
        """(window size → highest level of flat plans) at the size `index`."""
        size, positions = self.sizes[index], self._positions(index)
        return {
            window: planner.highest_level(size, positions)
            for window, planner in self._attention.planners.items()
        }

    def _positions(self, index: int) -> int:
        """The most positions that all decodes of the size `index` together can see."""
        pool = self.buffers.pool
        return min(pool.num_pages * pool.page_size, self.sizes[index] * self.buffers.longest)

    def _bounded(self, index: int, forms: Sequence[Form]) -> Iterator[Form]:
        """`forms` with one level and one number of merges for all window sizes, each bounded by what the
        plans of its window size can reach.

        This keeps the number of keys small.
        """
        level = max(form.level for form in forms)
        merges = max(form.merges for form in forms)
        for form, highest in zip(forms, self._highest(index).values(), strict=True):
            yield form._replace(level=min(level, highest), merges=merges if highest else 0)

    def _step_of(self, key: Key) -> GraphStep:
        index, forms = key
        size, positions = self.sizes[index], self._positions(index)
        return GraphStep(
            {
                window: planner.room(form, size, positions, self.buffers.space)
                for (window, planner), form in zip(self._attention.planners.items(), forms, strict=True)
            }
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every planned step."""
        self.buffers.capture_steps(
            (step, self.sizes[index], partial(self._run, index, step))
            for (index, _), step in self.steps.planned.items()
        )

    def replay(self, batch: ForwardBatch) -> Tensor | None:
        """The hidden states of a batch of decodes; None if the batch is larger than every size, or if its
        plan has no graph."""
        count = len(batch.kv_lens)
        if count > self.sizes[-1]:
            return None
        plans = self._attention.plans(batch, torch.device("cpu"))
        first, last = self.range_of(count)
        index, step = self.steps.find(self._key(first, plans), last)
        if step is None or not all(room.load(plans[window]) for window, room in step.rooms.items()):
            return None
        size, device = self.sizes[index], self.buffers.device
        self.buffers.load_batch(batch, size)
        if self._states is not None:
            assert batch.states is not None
            slots, _, lens = self._states
            slots[:count].copy_(to_device(batch.states, device))
            slots[count:].fill_(self._padding_slot)
            lens[:count].copy_(to_device(batch.kv_lens, device))
        return self.buffers.compute(step, size, partial(self._run, index, step))[:count]

    def range_of(self, count: int) -> tuple[int, int]:
        """(first, last) index of the sizes to which a step of `count` decodes may be padded."""
        first = bisect.bisect_left(self.sizes, count)
        return first, bisect.bisect_right(self.sizes, MOST_PADDED * self.sizes[first]) - 1

    def _key(self, index: int, plans: dict[int, Plan]) -> Key:
        planners, size = self._attention.planners, self.sizes[index]
        forms = [planner.form(plans[window], size) for window, planner in planners.items()]
        return index, tuple(self._bounded(index, forms))

    def _run(self, index: int, step: GraphStep) -> Tensor:
        size = self.sizes[index]
        states = None
        if self._states is not None:
            slots, starts, lens = self._states
            states = StepStates(slots[:size], starts[: size + 1], lens[:size])
        return self.buffers.run_padded(size, size, step.rooms, states)


def bytes_beside(
    attention: PlannedAttention, sizes: Sequence[int], positions: int, results: int, space: int = 0
) -> int:
    """The most bytes that graphs of `sizes` need beside the memory of the largest step: softmax states,
    results and library workspaces.

    positions : the most positions that the KV pages can have
    results : bytes of the hidden states and the outputs of attention that all steps share
    space : bytes of the softmax states of other steps, which share the memory
    """
    from ramify.kernels.triton.plan.attention_graph import Form

    states = space
    for planner in attention.planners.values():
        level = planner.highest_level(sizes[-1], positions)
        form = Form(max(level, 1), sizes[-1], ((planner.shape.tiles[0], 1),))
        states = max(states, planner.state_bytes(form, sizes[-1], positions))
    return states + results + LIBRARY_BYTES


def most_graphs(attention: PlannedAttention, sizes: Sequence[int], positions: int, longest: int) -> int:
    """The most graphs of decodes, planned and late, with a cascade.

    positions : the most positions that the KV pages can have
    longest : positions of the longest request
    """
    count = MOST_LATE
    for size in sizes:
        seen = min(positions, size * longest)
        levels = 1 + max(planner.highest_level(size, seen) for planner in attention.planners.values())
        coarse = is_coarse(size) or size == sizes[-1]
        count += levels + CASCADES if coarse else min(levels, FINE_LEVELS)
    return count
