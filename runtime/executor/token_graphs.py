"""Steps of several tokens a request as CUDA graphs, by token bucket: prompts, mixed steps, verification.

    a chunk of 40 tokens and 3 decodes     43 tokens in the graph of 48
    4 requests with 3 draft tokens each    16 tokens in the graph of 16

A whole step is captured, attention included. Attention's plan is made on the host. A graph is captured for
one form of plan: the number of work items of each tile, rounded up to powers of two
(`attention_graph.TokenForm`). The forms of a lone prompt and of verification passes are captured at start,
and for each bucket a form for mixed steps (`attention_graph.mixed_form`). Plans with other forms take a graph
that has room for them until their own is captured (`captured_steps.py`). Steps beyond the largest bucket
(`LARGEST`) always run eagerly.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ramify.runtime.executor.attention import PlannedAttention
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack
from ramify.runtime.executor.captured_steps import CapturedSteps
from ramify.runtime.executor.graph_buffers import GraphBuffers, GraphStep

if TYPE_CHECKING:
    from ramify.kernels.triton.plan.attention_graph import TokenForm
    from ramify.kernels.triton.plan.attention_plan import Plan

LARGEST = 2048
"""Tokens of the largest bucket. Larger steps are assumed to compute for longer than the host needs to launch
their 9 to 12 kernels a layer. The assumption is not measured: see docs/kernels.md."""
SMALL = (8, 16, 32, 48, 64, 96, 128)
"""Buckets up to which reading the weights takes longer than the products, so that padding costs little. By
the peaks of data sheets this holds up to 150 rows of 16-bit weights on an A100 and 300 on an H100."""
A_DOUBLING = 4
"""Number of buckets for each doubling of the size, above `SMALL`."""
PADDING = 64
"""Most padding in tokens. A step runs eagerly if its padding exceeds both this and an eighth of its
tokens."""
PLANNED = 4
"""The most graphs that are captured for a bucket at start."""
PREFIX = 4096
"""Two forms are captured for each bucket: a prompt alone, and a prompt after this number of cached tokens."""
VERIFIED = (4, 64, 1024)
"""(tokens of each request, most tokens of a pass, context length) of the verification passes that are
captured at start."""

STATES = 4
"""Softmax states, per token of the largest bucket, for which memory is reserved. Plans with more states run
eagerly."""

Key = tuple[int, tuple["TokenForm", ...]]
"""(index of a bucket, forms of the plans: one for each window size)."""


def buckets(largest: int) -> list[int]:
    """Bucket sizes in tokens, up to `largest` and at most `LARGEST`."""
    found, size = list(SMALL), SMALL[-1]
    while size < min(largest, LARGEST):
        found += [size + size * part // A_DOUBLING for part in range(1, A_DOUBLING + 1)]
        size *= 2
    return [bucket for bucket in found if bucket <= min(largest, LARGEST)] or [largest]


def space_bytes(attention: PlannedAttention, tokens: int) -> int:
    """Bytes reserved for the softmax states of steps of up to `tokens` tokens."""
    from ramify.kernels.triton.plan.attention_graph import TokenForm
    from ramify.kernels.triton.plan.attention_plan import STATE_BYTES

    form = TokenForm((), 0, STATES * tokens)
    planners = attention.planners.values()
    return min(STATE_BYTES, max(planner.token_state_bytes(form) for planner in planners))


class TokenGraphs:
    """Steps of up to ``max(sizes)`` tokens, padded to the next of `sizes`. `sizes` ascend.

    buffers : with room for ``max(sizes)`` tokens
    """

    def __init__(self, sizes: Sequence[int], buffers: GraphBuffers) -> None:
        self.sizes = list(sizes)
        self.buffers = buffers
        self._planners = buffers.attention.planners
        self.steps = CapturedSteps(buffers, self._step_of, self.planned_keys())

    def planned_keys(self) -> Iterator[Key]:
        """Keys of the graphs that are captured at start, the largest bucket first."""
        from ramify.kernels.triton.plan.attention_graph import rounded_up

        tokens, most, context = VERIFIED
        for size in reversed(self.sizes):
            batches = [(1, size, size), (1, size, size + PREFIX)]
            if size <= most:
                batches.append((max(size // tokens, 1), min(size, tokens), context))
            for count, new, length in batches:
                if length <= self.buffers.longest and count <= self.buffers.rows:
                    yield self._key(self._plans(self._batch(count, new, length)), size)
            states = min(rounded_up(STATES * size), STATES * self.sizes[-1])
            forms = [planner.mixed_form(size, states) for planner in self._planners.values()]
            yield self.sizes.index(size), tuple(forms)

    def _batch(self, count: int, new: int, length: int) -> ForwardBatch:
        """A batch from which a plan is made: `count` requests that share nothing, each with `length` tokens,
        of which the last `new` are new."""
        page_size = self.buffers.pool.page_size
        ids, pages = np.zeros(length, np.int32), -(-length // page_size)
        tables = [range(row * pages, (row + 1) * pages) for row in range(count)]
        return pack([Extension(ids, length - new, length, table) for table in tables], page_size)

    def _plans(self, batch: ForwardBatch) -> dict[int, Plan]:
        return self.buffers.attention.plans(batch, torch.device("cpu"))

    def _key(self, plans: dict[int, Plan], size: int) -> Key:
        forms = [planner.token_form(plans[window], size) for window, planner in self._planners.items()]
        return self.sizes.index(size), tuple(forms)

    def _step_of(self, key: Key) -> GraphStep | None:
        """A new, uncaptured step for `key`; None if its softmax states exceed the reserved workspace."""
        index, forms = key
        space, size = self.buffers.space, self.sizes[index]
        rooms = {}
        for (window, planner), form in zip(self._planners.items(), forms, strict=True):
            if space is not None and planner.token_state_bytes(form) > space.nbytes:
                return None
            rooms[window] = planner.token_room(form, size, space)
        return GraphStep(rooms)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every planned step."""
        self.buffers.capture_steps(
            (step, self.sizes[index], partial(self._run, index, step))
            for (index, _), step in self.steps.planned.items()
        )

    def replay(self, batch: ForwardBatch) -> Tensor | None:
        """The hidden states of a batch; None if the batch has too many tokens or requests, would need too
        much padding, or has a plan without a graph."""
        count, tokens = len(batch.kv_lens), batch.tokens.shape[1]
        index = bisect.bisect_left(self.sizes, tokens)
        if index == len(self.sizes) or count > self.buffers.rows:
            return None
        size = self.sizes[index]
        if size - tokens > max(PADDING, tokens // 8):
            return None
        plans = self._plans(batch)
        _, step = self.steps.find(self._key(plans, size), index)
        if step is None or not all(room.load(plans[window]) for window, room in step.rooms.items()):
            return None
        self.buffers.load_batch(batch, size)
        return self.buffers.compute(step, size, partial(self._run, index, step))[:tokens]

    def _run(self, index: int, step: GraphStep) -> Tensor:
        return self.buffers.run_padded(self.sizes[index], self.buffers.rows, step.rooms)
