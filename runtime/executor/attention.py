"""The attention of one step: from a batch to the function that each layer calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.machine.transfers import to_device
from ramify.kernels.registry import Ops, PromptAttention
from ramify.runtime.executor.batch import ForwardBatch
from ramify.runtime.executor.kv_pool import KvPool
from ramify.runtime.model.shape.config import ModelShape

if TYPE_CHECKING:
    from ramify.kernels.flashinfer import FlashInferPlanner
    from ramify.kernels.triton.plan.attention_plan import Plan
    from ramify.kernels.triton.planner import Planner


class StepAttention(Protocol):
    def __call__(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int, sinks: Tensor | None
    ) -> Tensor:
        """softmax(scale · q kᵀ) v over the pages of one layer, (T, heads, head_dim)."""
        ...


class CalledAttention:
    """Attention by one kernel call for each layer. The kernel itself divides the work over the threads."""

    def __init__(self, ops: Ops, scale: float, soft_cap: float, *, cascade: bool) -> None:
        self.scale, self.soft_cap = scale, soft_cap
        self._attend = ops.paged_attention if cascade else ops.flat_attention or ops.paged_attention

    def step(self, batch: ForwardBatch, device: torch.device) -> StepAttention:
        table, starts, lens = (
            each.to(device) for each in (batch.page_table, batch.query_starts, batch.kv_lens)
        )

        def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int, sinks: Tensor | None) -> Tensor:
            return self._attend(
                q, k_pages, v_pages, table, starts, lens,
                scale=self.scale, window=window, soft_cap=self.soft_cap, sinks=sinks,
            )  # fmt: skip

        return attend


class PlannedAttention:
    """Attention planned on the host. A step has one plan for each window size; all layers of that size share
    the plan and only launch kernels."""

    def __init__(
        self, planners: Mapping[int, Planner], model: ModelShape, prompts: PromptAttention | None = None
    ) -> None:
        self.planners, self._prompts = planners, prompts
        self.scale, self.soft_cap = model.score_scale, model.attention_soft_cap
        self._forms = set(zip(model.windows, model.sinks or (False,) * model.num_layers, strict=True))

    def step(self, batch: ForwardBatch, device: torch.device) -> StepAttention:
        table = to_device(batch.page_table, device)
        planned = self.planned(self.plans(batch, None), table)
        lens: list[int] = batch.kv_lens.tolist()
        if self._prompts is None or self.soft_cap or not self._are_prompts(batch):
            return planned
        prompts, scale = self._prompts, self.scale

        def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int, sinks: Tensor | None) -> Tensor:
            if sinks is not None or 0 < window < max(lens):
                return planned(q, k_pages, v_pages, window, sinks)
            return prompts(q, k_pages, v_pages, table, lens, scale=scale)

        return attend

    @staticmethod
    def _are_prompts(batch: ForwardBatch) -> bool:
        """Whether every sequence is a long prompt whose tokens are all new."""
        from ramify.kernels.triton.trials.prompts import LEAST_TOKENS

        new = batch.query_starts.diff()
        return bool((new == batch.kv_lens).all() and new.min() >= LEAST_TOKENS)

    def warm_up(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Compile every kernel that a plan can launch; pages are neither read nor written."""
        for window, sinks in self._forms:
            self.planners[window].warm_up(k_pages, v_pages, soft_cap=self.soft_cap, sinks=sinks)

    def most_state_bytes(self) -> int:
        """The most bytes of softmax states in an eager step. Each part of a split sequence leaves a state, to
        be merged."""
        from ramify.kernels.triton.plan.attention_plan import STATE_BYTES

        return STATE_BYTES

    def plans(self, batch: ForwardBatch, device: torch.device | None) -> dict[int, Plan]:
        """The plan for each window size, with tensors on `device`; None: on the device of the pages."""
        table, starts, lens = (
            np.asarray(each) for each in (batch.page_table, batch.query_starts, batch.kv_lens)
        )
        return {
            window: planner.plan(table, starts, lens, device) for window, planner in self.planners.items()
        }

    def planned(
        self, plans: Mapping[int, Plan], page_table: Tensor, out: Tensor | None = None
    ) -> StepAttention:
        """The attention of a step by `plans`.

        out : (T, heads, head_dim), overwritten by every layer in turn; None: each layer allocates its output
        """

        def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int, sinks: Tensor | None) -> Tensor:
            to = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
            return self.planners[window].run(
                plans[window], q, k_pages, v_pages, page_table, to,
                scale=self.scale, soft_cap=self.soft_cap, sinks=sinks,
            )  # fmt: skip

        return attend


class FlashInferAttention:
    """Attention planned by FlashInfer. Models with attention sinks are refused earlier, by
    `check_attention`."""

    def __init__(self, planners: Mapping[int, FlashInferPlanner]) -> None:
        self.planners = planners

    def step(self, batch: ForwardBatch, device: torch.device) -> StepAttention:
        lengths = (np.asarray(each) for each in (batch.page_table, batch.query_starts, batch.kv_lens))
        table, starts, lens = lengths
        for planner in self.planners.values():
            planner.plan(table, starts, lens)

        def attend(q: Tensor, k_pages: Tensor, v_pages: Tensor, window: int, sinks: Tensor | None) -> Tensor:
            if sinks is not None:
                raise ValueError("FlashInfer's wrappers ignore attention sinks.")
            return self.planners[window].run(q, k_pages, v_pages)

        return attend

    def warm_up(self, k_pages: Tensor, v_pages: Tensor) -> None:
        """Compile or load every kernel that a step can need."""
        for planner in self.planners.values():
            planner.warm_up(k_pages, v_pages)

    def most_state_bytes(self) -> int:
        """The bytes of all workspaces of FlashInfer."""
        from ramify.kernels.flashinfer import OWN_BYTES, WORKSPACE

        return WORKSPACE + OWN_BYTES * len(self.planners)


def has_cascade(ops: Ops) -> bool:
    return ops.planner is not None or ops.flat_attention is not None


def attention_of(
    ops: Ops, model: ModelShape, pool: KvPool, *, cascade: bool
) -> CalledAttention | PlannedAttention | FlashInferAttention:
    """The attention of a model on its pages. `cascade` has no effect if the kernels have no cascade."""
    shape: dict[str, Any] = {
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "dtype": pool.dtype,
        "page_size": pool.page_size,
        "device": pool.k.device,
    }
    scale, soft_cap = model.score_scale, model.attention_soft_cap
    if (wrap := ops.flashinfer) is not None:
        windows = set(model.windows)
        return FlashInferAttention(
            {window: wrap(window=window, scale=scale, soft_cap=soft_cap, **shape) for window in windows}
        )
    if (make := ops.planner) is None:
        return CalledAttention(ops, scale, soft_cap, cascade=cascade)
    shape |= {"page_dtype": pool.k.dtype, "deterministic": ops.deterministic, "cascade": cascade}
    planners = {window: make(window=window, **shape) for window in set(model.windows)}
    return PlannedAttention(planners, model, ops.prompt_attention)


def index_select(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """``tensor[rows]``, without synchronising with the device."""
    return tensor[to_device(torch.tensor(rows, dtype=torch.int64), tensor.device)]
