"""Attention as the runtime uses it: plans of batches, their launches, and buffers for CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.triton.attention import plan_attention, run_plan, warm_up
from ramify.kernels.triton.cascade import plan_from_page_tables
from ramify.kernels.triton.plan.attention_config import CHUNK, device_of, tiles
from ramify.kernels.triton.plan.attention_graph import (
    Form,
    StaticPlan,
    TokenForm,
    cascade_form,
    form_of,
    highest_level,
    launches_of,
    mixed_form,
    rounded_up,
    state_bytes,
    token_form_of,
)
from ramify.kernels.triton.plan.attention_plan import STATE_BYTES, Plan, Shape
from ramify.kernels.triton.tiles.merge import AT_ONCE

CASCADE_LEVELS = 4
"""Levels of the prefix tree that a graph has room for. A step with more runs without a graph."""
CASCADE_STATES, SMALL_CASCADE = 32, 64
"""The most states for each sequence that shared nodes may leave in a graph: of any batch, and of up to 64
sequences, which cut a node into more parts to fill the device. A step with more runs without a graph."""


class Planner:
    """A planner of attention for layers with the same parameters. A plan is made on the host, once a step,
    for all of these layers.

    Parameters
    ----------
    heads, kv_heads, head_dim, dtype, page_size : of the model and its pages
    page_dtype : dtype of the pages; None if this is `dtype`
    window : positions each query sees, 0 for all
    device : of the pages
    deterministic : bits do not depend on the batch
    cascade : read shared prefixes once where this saves time; ignored with a window
    """

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int,
        window: int,
        device: torch.device,
        deterministic: bool,
        cascade: bool,
        page_dtype: torch.dtype | None = None,
    ) -> None:
        figures = device_of(device)
        chosen = tiles(head_dim, dtype, figures, deterministic=deterministic)
        size = (page_dtype or dtype).itemsize
        self.shape = Shape(heads, kv_heads, head_dim, size, page_size, window, deterministic, chosen, figures)
        self._device = device
        self._dtype = dtype
        self.cascades = cascade and not window
        """Whether plans read shared prefixes once where this saves time."""

    def plan(
        self,
        page_table: NDArray[np.int32],
        query_starts: Sequence[int] | NDArray[np.int32],
        kv_lens: Sequence[int] | NDArray[np.int32],
        device: torch.device | None = None,
    ) -> Plan:
        """The plan of a batch, from lengths on the host; its tensors are on `device`, by default that of the
        pages.

        page_table : (B, max_pages) int32
        query_starts, kv_lens : B + 1 and B integers
        """
        device = device or self._device
        if self.cascades:
            return plan_from_page_tables(page_table, query_starts, kv_lens, self.shape, device)  # type: ignore[arg-type]
        return plan_attention(query_starts, kv_lens, self.shape, device)  # type: ignore[arg-type]

    def cascade_form(self, sequences: int, level: int) -> Form:
        """The form captured at start for cascades over `sequences` decodes, at a level of the flat launch."""
        return cascade_form(self.shape, sequences, level)

    def mixed_form(self, tokens: int, states: int) -> TokenForm:
        """The form captured at start for steps of up to `tokens` tokens that mix prompts and decodes."""
        listed = rounded_up(CASCADE_LEVELS * tokens) if self.cascades else 0
        return mixed_form(self.shape, tokens, states, listed_tokens=listed)

    form = staticmethod(form_of)
    token_form = staticmethod(token_form_of)

    def highest_level(self, sequences: int, positions: int) -> int:
        """The highest level of forms without a cascade for `sequences` decodes over `positions` positions in
        all."""
        return highest_level(self.shape, sequences, self._seen(sequences, positions))

    def room(self, form: Form, sequences: int, positions: int, space: Tensor | None) -> StaticPlan:
        """Buffers for plans of `form`, of up to `sequences` decodes over `positions` positions in all.

        space : float32 memory of `state_bytes` bytes; None: each run allocates its own
        """
        cascade = bool(form.listed)
        return StaticPlan(
            self.shape,
            self._device,
            tokens=sequences,
            forms=launches_of(self.shape, form, sequences),
            states=self._states(form, sequences, positions),
            merges=form.merges,
            listed_tokens=CASCADE_LEVELS * sequences if cascade else 0,
            space=space,
        )

    def state_bytes(self, form: Form, sequences: int, positions: int) -> int:
        """Bytes of the softmax states for which `room` has room."""
        return state_bytes(self.shape, self._states(form, sequences, positions))

    def _states(self, form: Form, sequences: int, positions: int) -> int:
        if not form.merges:
            return 0
        states = max(AT_ONCE[-1], 1 << form.level) * sequences  # at least as many as the merge loads at once
        if self.shape.deterministic:
            states += self._seen(sequences, positions) // CHUNK
        if form.listed:
            states += max(CASCADE_STATES * sequences, SMALL_CASCADE * min(sequences, 64))
        return min(states, STATE_BYTES // state_bytes(self.shape, 1))

    def _seen(self, sequences: int, positions: int) -> int:
        """The most positions that the decodes see, with room for a partial chunk at each end of a window."""
        window = self.shape.window
        return min(positions, sequences * (window + 2 * CHUNK)) if window else positions

    def token_room(self, form: TokenForm, tokens: int, space: Tensor | None) -> StaticPlan:
        """Buffers for plans of `form`, of up to `tokens` tokens. `space` is as in `room`, with
        `token_state_bytes` bytes."""
        return StaticPlan(
            self.shape,
            self._device,
            tokens=tokens,
            forms=form.launches,
            states=form.states,
            listed_tokens=form.listed_tokens,
            space=space,
        )

    def token_state_bytes(self, form: TokenForm) -> int:
        """Bytes of the softmax states for which `token_room` has room."""
        return state_bytes(self.shape, form.states)

    def warm_up(
        self, k_pages: Tensor, v_pages: Tensor, *, soft_cap: float = 0.0, sinks: bool = False
    ) -> None:
        """Compile every specialisation that a plan can launch; the pages are neither read nor written."""
        shape = self.shape
        q = torch.zeros(1, shape.heads, shape.head_dim, dtype=self._dtype, device=self._device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=self._device)
        zeros = torch.zeros(shape.heads, device=self._device) if sinks else None
        pages = k_pages, v_pages, table
        warm_up(shape, q, *pages, soft_cap=soft_cap, sinks=zeros, cascade=self.cascades)

    run = staticmethod(run_plan)
