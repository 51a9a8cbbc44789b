"""Builds the runner that a configuration describes: device, kernels, model, pages, CUDA graphs."""

from __future__ import annotations

import dataclasses
import logging

import torch

from ramify.errors import UnsupportedField
from ramify.kernels.registry import Ops
from ramify.machine_code import keep_triton_kernels
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.attention import CalledAttention, PlannedAttention, has_cascade
from ramify.runtime.executor.batch import Extension, pack
from ramify.runtime.executor.captured_steps import MOST_LATE
from ramify.runtime.executor.decode_graphs import GRAPH_BYTES, bytes_beside, ladder, most_graphs
from ramify.runtime.executor.device import (
    Backend,
    resolve_device,
    resolve_dtype,
    resolve_ops,
    resolve_page_dtype,
)
from ramify.runtime.executor.kv_pool import StatePool, page_bytes, pool_for
from ramify.runtime.executor.load import LoadDraft, LoadModel
from ramify.runtime.executor.memory import (
    FRACTION,
    LEAST_STATES,
    DeviceMemory,
    PageBudget,
    check_host,
    check_memory,
    fitting,
    free_for_pages,
    pages_in,
    pages_left,
    states_in,
    with_defaults_of,
)
from ramify.runtime.executor.runner import Compiled, Runner
from ramify.runtime.executor.token_graphs import PLANNED, buckets, space_bytes
from ramify.runtime.executor.triton_forms import compile_warm_up
from ramify.runtime.host_memory import host_memory, mapped_weights
from ramify.runtime.model.causal_lm import CausalLM
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.families.draft_heads import DraftHead
from ramify.runtime.parallel.ranks import Ranks

log = logging.getLogger("ramify")


def build_runner(config: EngineConfig, load: LoadModel) -> Runner:
    """The runner that `config` describes. `load` loads the runner's model.

    Raises `UnsupportedField` for options that cannot be honoured here, and `EngineError` if memory is too
    small.
    """
    return build_runners(config, load, None)[0]


def build_runners(
    config: EngineConfig, load: LoadModel, load_draft: LoadDraft | None, ranks: Ranks | None = None
) -> tuple[Runner, Runner | None]:
    """The runners of the model, which `load` loads, and of the draft model, which `load_draft` loads. The
    second runner is None if `load_draft` is None or returns None.

    Both runners have the same number of pages, and share the memory for KV. With `ranks`, `load` loads one
    rank's part of the model, and all ranks get the same number of pages.
    """
    device = resolve_device(config, 0 if ranks is None else ranks.index)
    check_memory(config, device)
    config = with_defaults_of(config, device)
    assert config.max_running is not None
    assert config.page_size is not None
    if device.type == "cuda":
        keep_triton_kernels()
    backend, ops = resolve_ops(config, device)
    graphs = _wants_graphs(config, device, ops)
    cascade = _wants_cascade(config, backend, ops)
    dtype = resolve_dtype(config, device)
    kept = resolve_page_dtype(config, backend, device, dtype)
    compiled: dict[int, Compiled] = {}  # by the model's id

    def prepared(model: CausalLM, main: CausalLM | None = None) -> CausalLM:
        if isinstance(model, DraftHead):
            assert isinstance(main, Model)
            model.attach(main)
        # All ranks launch the same kernels. The others wait in `connect`.
        if device.type == "cuda" and backend != "torch" and (ranks is None or ranks.index == 0):
            compiled[id(model)] = done = compile_warm_up(config, model, ops, dtype, device)
            log.info("%s: %d Triton kernels, %d compiled and %d failed, in %.1f s", device, *done)
        return model

    with fitting("The model's weights", device):
        model = prepared(load(dtype, device, ops))
    if ranks is not None:
        assert isinstance(model, Model)
        ranks.connect(device, deterministic=ops.deterministic)
        model.join(ranks.sum)
    draft: CausalLM | None = None
    if load_draft is not None:
        with fitting("The draft model's weights", device):
            draft = load_draft(dtype, device, ops)
            draft = draft and prepared(draft, model)
    shape, draft_shape = model.config, None if draft is None else draft.config
    size = page_bytes(shape, config.page_size, kept, draft_shape)
    host = host_memory(mapped_weights())
    available = free_for_pages(host.total, host.free) if device.type == "cpu" else 0
    budget = pages_in(config, shape, kept, device, draft_shape, available=available)
    if budget is None:
        with fitting("The model and its largest steps", device):
            memory = measured_memory(config, model, ops, dtype, device, graphs)
            if draft is not None:
                of_draft = measured_memory(config, draft, ops, dtype, device, graphs)
                workspace = max(memory.workspace, of_draft.workspace)
                memory = dataclasses.replace(of_draft, workspace=workspace)
        fraction = config.memory_fraction or FRACTION
        room = int(memory.total * fraction) - memory.used - memory.workspace
        slots = states_in(config, shape, room // 2, device)
        if shape.states is not None:
            memory = dataclasses.replace(memory, used=memory.used + (slots + 1) * shape.states.bytes)
        pages = pages_left(memory, fraction, size)
        budget = PageBudget(pages, pages, "memory")
        log.info("%s: %s, %d pages, %d states", device, memory, pages, slots)
    else:
        pages = budget.pages
        slots = states_in(config, shape, budget.kept * size, device)
        if device.type == "cpu":
            states_bytes = 0 if shape.states is None else (slots + 1) * shape.states.bytes
            check_host(config, pages * size * config.tensor_parallel, states_bytes)
    if ranks is not None:
        pages = ranks.group.least(pages)
    if draft_shape is not None:
        part = page_bytes(draft_shape, config.page_size, kept)
        log.info(
            "%d KV pages of %d bytes, of which %d bytes are the draft model's: %.2f of %.2f GiB",
            *(pages, size, part, pages * part / 2**30, pages * size / 2**30),
        )

    sizes = ladder(config.max_running)

    def runner_of(model: CausalLM, states: StatePool | None) -> Runner:
        shape = model.config
        pool = pool_for(config, shape, pages, dtype, device)
        done = compiled.get(id(model))
        runner = Runner(model, pool, ops, cascade=cascade, states=states, compiled=done)
        # Warmed up here: else the draft model's first pass, which compiles kernels, would count as typical.
        if (device.type == "cuda" and backend != "torch") or model is draft:
            runner.warm_up()
        # transformers' code may read values of the device on the host, which a graph cannot capture.
        if graphs and isinstance(model, Model) and not model.hidden_input_width:
            longest = min(shape.context_length, pages * pool.page_size)
            tokens = [] if states is not None else _buckets(config, longest)
            runner.capture_graphs(sizes, -(-longest // pool.page_size), tokens)
        runner.budget = budget._replace(pages=pages)
        if ranks is not None and ranks.index == 0:
            runner.ranks = ranks  # from now on passes are told, those above were the same on all ranks
        return runner

    with fitting(f"{pages} KV pages, {slots} states and the steps on them", device):
        states = None if shape.states is None else StatePool(shape.states, num_slots=slots, device=device)
        return runner_of(model, states), None if draft is None else runner_of(draft, None)


def _wants_graphs(config: EngineConfig, device: torch.device, ops: Ops) -> bool:
    possible = device.type == "cuda" and ops.planner is not None and config.tensor_parallel == 1
    if config.cuda_graphs and not possible:
        raise UnsupportedField(
            "cuda_graphs is set; only the triton backend on a CUDA device has them, and the device is "
            f"{device.type}.",
            field="cuda_graphs",
            remedy="Leave it out.",
        )
    return possible if config.cuda_graphs is None else config.cuda_graphs


def _wants_cascade(config: EngineConfig, backend: Backend, ops: Ops) -> bool:
    possible = has_cascade(ops)
    if config.cascade and not possible:
        raise UnsupportedField(
            f"cascade is set, which the attention backend {backend} does not have.",
            field="cascade",
            remedy="Leave it out, or choose the attention backend cpu or triton.",
        )
    return possible if config.cascade is None else config.cascade


def measured_memory(
    config: EngineConfig,
    model: CausalLM,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    graphs: bool = False,
) -> DeviceMemory:
    """Measure the device's memory with the weights loaded, and the workspace of a step, on a few pages.

    The workspace is the sum for the largest prefill chunk and the largest decode, each with its logits. All
    CUDA graphs share the memory of the largest decode or bucket of tokens. Steps that are not captured need
    their own memory. The measured steps see few positions, so `_unmeasured` adds the further memory of long
    sequences and graphs.
    """
    shape = model.config
    assert config.max_running is not None
    assert config.chunk_tokens is not None
    assert config.page_size is not None
    chunk, batch = min(config.chunk_tokens, shape.context_length), config.max_running
    pages = -(-chunk // config.page_size)
    pool = pool_for(config, shape, pages, dtype, device)
    states = None if shape.states is None else StatePool(shape.states, num_slots=LEAST_STATES, device=device)
    runner = Runner(model, pool, ops, cascade=False, states=states)
    zeros = torch.zeros(chunk, dtype=torch.int32).numpy()
    # The requests share slots and overwrite each other's states, which does not change the workspace.
    slots = [None if states is None else row % LEAST_STATES for row in range(batch)]
    prefill = [Extension(zeros, 0, chunk, range(pages), slots[0])]
    decodes = [Extension(zeros, 0, 1, (0,), slot) for slot in slots]

    def taken(runner: Runner, extensions: list[Extension]) -> int:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        hidden = runner.forward(pack(extensions, runner.pool.page_size))
        if runner.has_head:
            logits = runner.logits(hidden[-batch:])
            torch.argmax(logits, dim=-1)
        torch.cuda.synchronize(device)
        widths.append(hidden.shape[1])
        return torch.cuda.max_memory_allocated(device) - before

    widths: list[int] = []
    captured = taken(runner, decodes)
    if graphs and states is None:
        bucket = _buckets(config, shape.context_length)[-1]
        captured = max(captured, taken(runner, [Extension(zeros, 0, min(bucket, chunk), range(pages))]))
    workspace = taken(runner, prefill) + captured
    workspace += _unmeasured(config, runner, widths[0] * dtype.itemsize, device, graphs)
    del runner, pool, states
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, used=total - free, workspace=workspace)


def _buckets(config: EngineConfig, longest: int) -> list[int]:
    """Token counts of the captured steps other than decodes, for contexts of up to `longest` tokens."""
    assert config.max_running is not None
    assert config.chunk_tokens is not None
    return buckets(config.max_running + min(config.chunk_tokens, config.max_running * longest))


def _unmeasured(
    config: EngineConfig, runner: Runner, hidden_bytes: int, device: torch.device, graphs: bool
) -> int:
    """Bytes that the measured steps do not show: softmax states of steps that split sequences, and the memory
    of graphs."""
    attention = runner.attention
    if isinstance(attention, CalledAttention):
        return 0
    most = attention.most_state_bytes()
    if not graphs:
        return most
    assert isinstance(attention, PlannedAttention)
    assert config.max_running is not None
    shape, sizes = runner.model.config, ladder(config.max_running)
    token_bytes = page_bytes(shape, 1, runner.pool.k.dtype)
    free = torch.cuda.mem_get_info(device)[0]
    positions = min(free // token_bytes, sizes[-1] * shape.context_length)
    tokens, count = sizes[-1], most_graphs(attention, sizes, positions, shape.context_length)
    if shape.states is None:
        sizes_in_tokens = _buckets(config, shape.context_length)
        tokens = max(tokens, sizes_in_tokens[-1])
        count += PLANNED * len(sizes_in_tokens) + MOST_LATE
    attended = shape.num_heads * shape.head_dim * runner.pool.dtype.itemsize
    results = tokens * (hidden_bytes + attended)
    beside = bytes_beside(attention, sizes, positions, results, space_bytes(attention, tokens))
    return most + beside + count * shape.num_layers * GRAPH_BYTES
