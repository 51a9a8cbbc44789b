"""Runs the model: one forward pass over a packed batch, then the logits of the rows that need them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.arguments.gated_delta import DeltaWeights
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.reference.sampling import sample_tokens
from ramify.kernels.registry import Ops
from ramify.runtime.executor.attention import (
    CalledAttention,
    PlannedAttention,
    StepAttention,
    attention_of,
    has_cascade,
)
from ramify.runtime.executor.batch import Extension, ForwardBatch, pack, pass_of
from ramify.runtime.executor.decode_graphs import DecodeGraphs
from ramify.runtime.executor.graph_buffers import Captures, GraphBuffers
from ramify.runtime.executor.kv_pool import KvPool, StatePool, StepStates
from ramify.runtime.executor.sampler import DeviceSampler, HostSampler, stacked
from ramify.runtime.executor.token_graphs import TokenGraphs, space_bytes
from ramify.runtime.model.causal_lm import CausalLM
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.layers import HeadNorms
from ramify.runtime.model.lora.adapters import Adapters
from ramify.runtime.parallel.ranks import Ranks

if TYPE_CHECKING:
    from ramify.kernels.cpu.layer_stack import LayerStack
    from ramify.runtime.executor.memory import PageBudget

log = logging.getLogger("ramify")

MANY_ROWS = (65, 17)
"""Rows of warm-up passes. In deterministic mode, products of more than 64 rows use another kernel; with
quantised weights, products of more than 16 rows."""


class Compiled(NamedTuple):
    """Counts of Triton kernel variants (`kernels.triton.ahead.Form`) that a model's steps launch.

    forms : all variants
    compiled : variants that were not in the cache, and were compiled
    failed : variants that did not compile
    """

    forms: int
    compiled: int
    failed: int
    seconds: float


class Runner:
    """Owns the model, its KV pages and the states of its linear attention layers.

    cascade : whether attention reads shared prefixes once, if the kernels can and where this is faster
    states : the pool of states, for models that have states
    compiled : counts of the kernels that were compiled before the runner was made
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        ops: Ops,
        *,
        cascade: bool = True,
        states: StatePool | None = None,
        compiled: Compiled | None = None,
    ) -> None:
        self.model = model
        self.compiled = compiled
        self.pool = pool
        self.states = states
        self.device = pool.k.device
        self.ops = ops
        self.attention = attention_of(ops, model.config, pool, cascade=cascade)
        self._stacks: list[LayerStack] = []
        """Stacks of all layers, cut before each of the model's `captures`."""
        weights = model.layer_weights() if isinstance(model, Model) and not model.hidden_input_width else None
        if ops.layer_stack is not None and weights is not None:
            heads = model.config.num_heads
            cuts = [0, *model.captures, len(weights)]
            for part in map(slice, cuts, cuts[1:]):
                pages = pool.k[part], pool.v[part]
                self._stacks.append(ops.layer_stack(weights[part], *pages, heads=heads, cascade=cascade))
        self.stacked = bool(self._stacks)
        """Whether the layers are computed in one call, or in one call between captured layers."""
        self.cascades = cascade and has_cascade(ops)
        """Whether attention reads shared prefixes once where this is faster."""
        self._graphs: DecodeGraphs | None = None
        self._token_graphs: TokenGraphs | None = None
        self.ranks: Ranks | None = None
        """The ranks that this runner leads; each of them runs every pass. None unless this is the first of
        several ranks."""
        self.budget: PageBudget | None = None
        """The pages of the pool and the reason of their number; None if the caller made the pool."""
        self.has_head = not isinstance(model, Model) or model.head is not None
        """Whether the runner computes logits."""
        # Views of the pool are made once: indexing it costs 2 us, twice per layer and step.
        self.k_layers, self.v_layers = list(pool.k), list(pool.v)
        self.state_layers = [] if states is None else list(zip(states.conv, states.recurrent, strict=True))
        model.use_kernels(ops)
        self.adapters = Adapters(model)
        self.sampler: HostSampler | DeviceSampler = (
            HostSampler(ops.sample_tokens or sample_tokens, ops.log_sum)
            if ops.sampling is None
            else DeviceSampler(ops.sampling, self.device)
        )

    def warm_up(self) -> None:
        """Compile every kernel that a step can launch. Writes to pages, so no request may run yet."""
        if not isinstance(self.attention, CalledAttention):
            self.attention.warm_up(self.k_layers[0], self.v_layers[0])
        size = self.pool.page_size
        most = min(MANY_ROWS[0], self.pool.num_pages * size, self.model.config.context_length)
        for tokens in dict.fromkeys((most, min(most, MANY_ROWS[1]), 1)):
            state = None if self.states is None else self.states.padding_slot
            prompt = Extension(np.zeros(most, np.int32), 0, tokens, range(-(-tokens // size)), state)
            hidden = self.forward(pack([prompt], size, copies=[(0, 1)]))
            logits = self.logits(hidden) if self.has_head else None
        if isinstance(self.sampler, DeviceSampler) and logits is not None:
            self.sampler.warm_up(logits)

    def capture_graphs(self, sizes: Sequence[int], max_pages: int, buckets: Sequence[int] = ()) -> None:
        """Capture CUDA graphs, and replay steps as graphs from now on: decodes at the batch sizes `sizes`,
        other steps at the token counts `buckets`. On the CPU the same padded steps run eagerly.

        max_pages : pages of the longest request
        buckets : empty for models with states
        """
        assert isinstance(self.attention, PlannedAttention)
        buffers = GraphBuffers(
            self.model.config,
            self.pool,
            self.attention,
            self._compute,
            tokens=max(sizes[-1], *buckets, 0),
            rows=sizes[-1],
            max_pages=max_pages,
        )
        if buckets:
            buffers.reserve(space_bytes(self.attention, buckets[-1]))
        self._graphs = DecodeGraphs(sizes, buffers, self.states)
        if buckets:
            assert self.states is None
            self._token_graphs = TokenGraphs(buckets, buffers)
        for graphs in (self._token_graphs, self._graphs):  # those that need most memory first
            if graphs is not None:
                graphs.capture()
        captured = buffers.captured
        log.info("%s: %d CUDA graphs in %.1f s", self.device, captured.graphs, captured.seconds)

    @property
    def captured(self) -> Captures:
        """Counts of the CUDA graphs captured until now, at start and while serving."""
        return Captures() if self._graphs is None else self._graphs.buffers.captured

    def check_device(self) -> None:
        """Raise the error of the CUDA device, if there is one: after an error in a kernel the device computes
        nothing more. Also raises `EngineError` if the ranks of the model are out of step."""
        if self.ranks is not None:
            self.ranks.check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages. Each of `copies` is (source, destination)."""
        sources, destinations = zip(*copies, strict=True)
        self.ops.copy_pages(self.pool.k, self.pool.v, list(sources), list(destinations))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Copy pages, store the new tokens' KV, and return the hidden states: (T, hidden).

        The next call may overwrite the hidden states. On a CUDA device `forward` returns before the hidden
        states are computed.
        """
        if self.ranks is None:
            return self._forward(batch)
        with self.ranks.leading(pass_of(batch), batch.next_ids):
            return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if batch.copies:
            self.copy_pages(batch.copies)
        # Graphs have no launches for adapters: steps without adapters would pay for them.
        graphs = self._graphs if batch.decoding else self._token_graphs
        if graphs is not None and batch.lora is None:
            hidden = graphs.replay(batch)
            if hidden is not None:
                return hidden
        tokens = to_device(batch.tokens, self.device)
        ids = tokens[0] if batch.next_ids is None else batch.next_ids
        if self._stacks:
            return self._compute_stacks(ids, tokens[1], tokens[2], batch)
        hidden = batch.hidden
        if hidden is None and self.model.hidden_input_width:  # a warm-up
            hidden = torch.zeros(
                len(ids), self.model.hidden_input_width, dtype=self.pool.dtype, device=self.device
            )
        self.model.adapted.rows = batch.lora
        try:
            attention = self.attention.step(batch, self.device)
            return self._compute(ids, tokens[1], tokens[2], attention, self._step_states(batch), hidden)
        finally:
            self.model.adapted.rows = None

    def _step_states(self, batch: ForwardBatch) -> StepStates | None:
        if batch.states is None:
            return None
        parts = batch.states, batch.query_starts, batch.kv_lens
        return StepStates(*(to_device(each, self.device) for each in parts))

    def _compute(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: StepAttention,
        states: StepStates | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Hidden states, (T, hidden). ids, positions, slots: (T,) int64 on the device."""
        hidden: Tensor = self.model(ids, positions, _Step(self, slots, attention, states), read)
        return hidden

    def _compute_stacks(self, ids: Tensor, positions: Tensor, slots: Tensor, batch: ForwardBatch) -> Tensor:
        assert isinstance(self.model, Model)
        scale = self.model.config.score_scale

        def run(stack: LayerStack, x: Tensor, rotation: Tensor) -> None:
            lengths = batch.query_starts, batch.kv_lens
            stack(x, rotation, slots, batch.page_table, *lengths, scale=scale, lora=batch.lora)

        return self.model.forward_through(ids, positions, [partial(run, stack) for stack in self._stacks])

    def final(self, hidden: Tensor) -> Tensor:
        """The final states in `hidden`, (T, hidden), without the inputs of captured layers."""
        if not self.model.captures:
            return hidden
        return hidden[:, : hidden.shape[1] // (1 + len(self.model.captures))].contiguous()

    def read_by_head(self, hidden: Tensor) -> Tensor:
        """The part of `hidden` that a draft head reads: the inputs of captured layers, else `hidden`."""
        if not self.model.captures:
            return hidden
        return hidden[:, hidden.shape[1] // (1 + len(self.model.captures)) :]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, masks: Sequence[np.ndarray | None] = ()) -> Tensor:
        """(R, hidden) → (R, vocab), float32 or, where the device samples, in the model's dtype.

        masks : empty, or one for each row: the (ceil(vocab / 32),) int32 bitmask of the tokens whose logits
            are needed, or None for all tokens. The logits of other tokens may be minus infinity.
        """
        hidden = self.final(hidden)
        if self.ops.masked_linear is None or all(mask is None for mask in masks):
            return self.model.logits(hidden)
        return self.model.masked_logits(hidden, *stacked(masks))


class _Step:
    """The `Attend` of one step: attention on KV pages, the gated delta rule on states."""

    def __init__(
        self, runner: Runner, slots: Tensor, attention: StepAttention, states: StepStates | None
    ) -> None:
        self._runner, self._slots, self._attention, self._states = runner, slots, attention, states

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
        runner, store = self._runner, self._runner.ops.rope_store_kv
        k_pages, v_pages, slots = runner.k_layers[layer], runner.v_layers[layer], self._slots
        if norms is None:
            store(q, k, v, rotation, k_pages, v_pages, slots)
        else:
            q_norm, k_norm, eps = norms
            store(q, k, v, rotation, k_pages, v_pages, slots, q_norm=q_norm, k_norm=k_norm, eps=eps)
        return self._attention(q, k_pages, v_pages, window, sinks)

    def gated_delta_rule(
        self, layer: int, qkv: Tensor, b: Tensor, a: Tensor, weights: DeltaWeights
    ) -> Tensor:
        assert self._states is not None
        pool, states = self._runner.state_layers[layer], self._states
        return self._runner.ops.gated_delta_rule(qkv, b, a, weights, *pool, *states)
