"""The report of `ramify inspect`: a model, its needs, and whether it fits this machine.

No weights are loaded. The figures come from the functions that an engine uses at its start: for the shape
that pages are made for, the packed formats, and the number of pages.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from ramify.errors import EngineError, RamifyError, UnsupportedField
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.kv_pool import page_bytes
from ramify.runtime.executor.memory import (
    COW_PAGES,
    FRACTION,
    free_for_pages,
    pages_in,
    room_of,
    states_in,
    with_defaults,
)
from ramify.runtime.inspect.checkpoint import Form, StoredTensor, form_of, stored_tensors, whole_matrices
from ramify.runtime.inspect.machine import Machine, dtype_of_torch
from ramify.runtime.inspect.refusals import (
    Refusal,
    native_shape,
    refused_adapters,
    refused_draft,
    refused_options,
    refused_types,
)
from ramify.runtime.model.checkpoint import ModelFiles, has_tokenizer
from ramify.runtime.model.gguf.header import read_header
from ramify.runtime.model.shape.config import ModelConfig, ModelShape
from ramify.runtime.model.shape.context import context_notes, with_context
from ramify.runtime.model.shape.heads import HeadConfig, is_loaded
from ramify.runtime.model.tokenizer.end_tokens import with_end_tokens
from ramify.runtime.parallel.checks import check_ranks, part_for, possible_ranks

WORKSPACE = 1 << 30
"""Bytes set aside beside weights and KV pages: for the processes of the engine core, the context of a CUDA
device, and the tensors of the largest step. Measured on SmolLM2-135M on the CPU: 0.8 GiB."""
LEAST_TOKENS = 8192
"""Tokens whose KV must fit beside the weights: this number, or the model's context if that is shorter."""
_BYTES = {"float32": 4, "bfloat16": 2}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class FormatShare:
    """The matrices and vectors of one stored format. `kept_as`: their packed format; None: not packed."""

    format: str
    tensors: int
    share: float
    kept_as: str | None
    bits: float


@dataclass(frozen=True)
class Chat:
    """The abilities of a chat template. `tools` is the name of the format of tool calls, `thinking` the mark
    that opens thoughts."""

    tools: str
    thinking: str | None
    exact: bool


@dataclass(frozen=True)
class Inspection:
    """Everything that `ramify inspect` found. Sizes are in bytes, lengths in tokens."""

    model: str
    path: str
    family: str | None
    implementation: Literal["native", "transformers"] | None
    """The code that runs the model: ours (native) or transformers'; None if neither can."""
    parameters: int
    active_parameters: int
    file_bytes: int
    formats: list[FormatShare]
    device: str
    memory: int
    dtype: str
    quantization: str
    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    state_bytes: int
    """Bytes of one sequence's state in linear attention layers."""
    context_length: int
    kv_tokens: int
    """Tokens for which the engine makes KV pages. `kv_kept_tokens`: tokens whose memory stays with the engine
    on the CPU; `kv_text`: the engine's line about both at its start, empty for a CUDA device."""
    kv_kept_tokens: int
    kv_text: str
    kv_tokens_at_most: int
    """Tokens whose KV the memory holds beside the weights and a workspace."""
    max_running: int
    """The most requests of a step."""
    chunk_tokens: int
    """The most prompt tokens of a step."""
    page_size: int
    """Tokens of a KV page."""
    ranks: int
    """Ranks of tensor parallelism. Figures of memory are those of the first rank, which has the head."""
    divides_by: list[int]
    """The numbers of ranks among which the model can be divided; empty if its family cannot be divided."""
    lora: bool
    """Whether LoRA adapters can be loaded: only if our own code runs the model."""
    chat: Chat | None
    not_native: list[Refusal]
    """Reasons why our own code does not run the model, if transformers' code does."""
    refused: list[Refusal]
    """Reasons why no code runs the model here; empty if it runs."""
    refused_options: list[Refusal]
    notes: list[str]
    """Further sentences, which an engine logs when it starts with the model."""

    @property
    def fits(self) -> bool:
        return not self.refused

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "fits": self.fits}, indent=2)


def inspected(
    files: ModelFiles,
    machine: Machine,
    config: EngineConfig | None = None,
    *,
    draft: ModelFiles | None = None,
    chat: bool = True,
) -> Inspection:
    """The inspection of a model on a machine. Without `chat` the tokenizer is not read, and neither possible
    numbers of ranks nor a draft head in the checkpoint are sought: both would import torch. `draft` is the
    files of the draft model that the configuration names.

    Raises `InvalidRequest` for files that cannot be read.
    """
    config = with_defaults(config or EngineConfig(), None if machine.device == "cpu" else machine.memory)
    assert config.max_running is not None
    assert config.chunk_tokens is not None
    assert config.page_size is not None
    weights = files.weights
    tensors = stored_tensors(weights)
    shape, not_native, refused = _shape(weights, config)
    if not weights.is_dir():
        refused += refused_types(weights)
    elif scheme := _config(weights).get("quantization_config"):
        tensors = whole_matrices(tensors, scheme)
    if chat and not has_tokenizer(files.tokenizer):
        refused.append(Refusal("model", "it has no tokenizer.json"))
    native = isinstance(shape, ModelConfig)
    dtype = config.dtype
    if dtype == "auto":
        by_torch = machine.device == "cpu" and (not native or config.attention_backend == "torch")
        dtype = dtype_of_torch() if by_torch else machine.dtype
    own = shape.quantised is not None if isinstance(shape, ModelConfig) else False
    quantization = _quantization(config, "checkpoint" if own else "none" if weights.is_dir() else "gguf")
    ranked = chat or config.tensor_parallel > 1
    divides_by, ranks, undivided = _ranks(shape, config, weights) if ranked else ([], 1, [])
    draft_shape, refused_as_draft = None, list[Refusal]()
    loaded = tensors
    if shape is not None:
        if chat or draft is not None:
            draft_shape, refused_as_draft = refused_draft(shape, config, machine.device, files, draft)
        head = draft_shape if draft is None and isinstance(draft_shape, HeadConfig) else None
        loaded = [tensor for tensor in tensors if is_loaded(tensor.name, shape, head)]
    formats, weight_bytes = _sizes(loaded, machine.device if native else None, quantization, dtype, ranks)
    numbers = _parameters(weights, tensors)
    family = shape.family if shape else _family(weights)
    facts: dict[str, Any] = dict.fromkeys(
        (
            *("kv_bytes_per_token", "state_bytes", "context_length"),
            *("kv_tokens", "kv_kept_tokens", "kv_tokens_at_most"),
        ),
        0,
    )
    facts["kv_text"] = ""
    options: list[Refusal] = []
    notes: list[str] = []
    if shape is not None:
        notes = context_notes(shape, config.context_length)
        if chat and has_tokenizer(files.tokenizer):
            about_ends = with_end_tokens(shape, files.tokenizer)[1]
            notes += [] if about_ends is None else [about_ends]
        beside = 0
        options = refused_options(shape, machine, config)
        asked = (
            f"--quantization {config.quantization}",
            f"--kv-cache-dtype {config.kv_cache_dtype}",
            "--draft-model" if config.draft_model else "",
        )
        refused += [refusal for refusal in options if refusal.subject in asked]
        refused += refused_as_draft
        if draft is not None:
            beside = inspected(draft, machine, EngineConfig(dtype=config.dtype), chat=False).weight_bytes
        if config.loras:
            refused += refused_adapters(shape, config.loras)
        refused += undivided
        part = part_for(shape, 0, ranks)
        facts, problem = kv_facts(part, machine, config, dtype, weight_bytes + beside, draft_shape)
        refused += [Refusal("memory", problem)] if problem else []
    return Inspection(
        model=files.name,
        path=str(weights),
        family=family,
        implementation=None if shape is None else "native" if native else "transformers",
        parameters=numbers[0],
        active_parameters=numbers[1],
        file_bytes=sum(tensor.size for tensor in tensors),
        formats=formats,
        device=machine.device,
        memory=machine.memory,
        dtype=dtype,
        kv_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        quantization=quantization,
        weight_bytes=weight_bytes,
        max_running=config.max_running,
        chunk_tokens=config.chunk_tokens,
        page_size=config.page_size,
        ranks=ranks,
        divides_by=divides_by,
        lora=native and ranks == 1,
        chat=_chat(files.tokenizer) if chat and has_tokenizer(files.tokenizer) else None,
        not_native=[] if native else not_native,
        refused=refused,
        refused_options=options,
        notes=notes,
        **facts,
    )


def _shape(weights: Path, config: EngineConfig) -> tuple[ModelShape | None, list[Refusal], list[Refusal]]:
    """(shape, reasons against our own code, reasons against any code)."""
    own, not_native = (
        native_shape(weights, config.rope_scaling) if config.model_impl != "transformers" else (None, [])
    )
    if own is not None:
        return own, [], []
    if not weights.is_dir() or config.model_impl == "native":
        return None, [], not_native
    from ramify.runtime.model.loading.load import read_shape

    try:
        return read_shape(weights, "transformers", config.rope_scaling), not_native, []
    except RamifyError as error:
        return None, [], [*not_native, Refusal(error.field or "model", error.message.rstrip("."))]


def _ranks(
    shape: ModelShape | None, config: EngineConfig, weights: Path
) -> tuple[list[int], int, list[Refusal]]:
    """(rank counts that divide the model, requested count (1 if refused), refusals of the requested
    count)."""
    if shape is None:
        return [], 1, []
    try:
        divides_by = possible_ranks(config, shape, weights)
    except UnsupportedField:
        divides_by = []
    try:
        check_ranks(config, shape, weights)
    except UnsupportedField as error:
        subject = f"--{(error.field or '').replace('_', '-')}"
        return divides_by, 1, [Refusal(subject, error.message.rstrip("."))]
    return divides_by, config.tensor_parallel, []


def _quantization(config: EngineConfig, stored: str) -> str:
    """The format in which the engine would keep weights. `stored`: the checkpoint's format."""
    if config.quantization != "auto":
        return config.quantization
    return stored if config.dtype != "float32" else "none"


def _config(weights: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    return config


def _sizes(
    tensors: list[StoredTensor],
    packs_on: Literal["cpu", "cuda"] | None,
    quantization: str,
    dtype: str,
    ranks: int = 1,
) -> tuple[list[FormatShare], int]:
    """The stored formats with their packed formats, and the bytes in memory of the first rank's weights.

    packs_on : the device, if our own code runs the model; else None
    """
    wide = 8 * _BYTES[dtype]
    tied = not any(tensor.is_head for tensor in tensors)
    total, by_format = 0.0, defaultdict[str, list[tuple[StoredTensor, Form, float]]](list)
    for tensor in tensors:
        form, bits = Form(dtype, None), float(wide)
        device = None if packs_on == "cuda" and tensor.is_expert else packs_on
        if device and quantization == "checkpoint" and tensor.kept:
            form = Form(*tensor.kept)
            bits = tensor.kept[1]
        elif device and len(tensor.shape) > 1 and (not tensor.is_embedding or tied):
            form = form_of(tensor.format, quantization, dtype, device)
            bits = form.bits or wide
            if tensor.is_embedding and form.bits:  # rows are looked up in one copy, and multiplied by another
                total += tensor.numbers * wide / 8
        divided = ranks if len(tensor.shape) > 1 and not (tensor.is_embedding or tensor.is_head) else 1
        total += tensor.numbers * bits / 8 / divided
        by_format[tensor.format].append((tensor, form, bits))
    numbers = sum(tensor.numbers for tensor in tensors) or 1
    shares = []
    for name, entries in by_format.items():
        largest = max(entries, key=lambda entry: entry[0].numbers)
        share = sum(tensor.numbers for tensor, _, _ in entries) / numbers
        kept_as = largest[1].name if largest[1].bits else None
        shares.append(FormatShare(name, len(entries), share, kept_as, largest[2]))
    return sorted(shares, key=lambda entry: -entry.share), int(total)


def kv_facts(
    shape: ModelShape,
    machine: Machine,
    config: EngineConfig,
    dtype: str,
    weight_bytes: int,
    draft: ModelShape | None = None,
) -> tuple[dict[str, Any], str | None]:
    """(figures of KV memory and a text, reason why the model does not fit the machine or None if it fits)."""
    kept = config.kv_cache_dtype
    size = SimpleNamespace(itemsize=_BYTES[dtype] if kept == "auto" else 1, is_floating_point=kept != "int8")
    per_token = page_bytes(shape, 1, size, draft)
    context = with_context(shape, config.context_length).context_length
    assert config.page_size is not None
    fraction = config.memory_fraction or FRACTION
    room = int(fraction * machine.memory) - weight_bytes - WORKSPACE
    problem, budget, slots, text = None, None, 0, ""
    states = 0 if shape.states is None else shape.states.bytes
    device: Any = SimpleNamespace(type=machine.device)
    try:
        shorter = dataclasses.replace(shape, context_length=context)
        left = room
        if machine.free is not None:
            left = free_for_pages(machine.memory, machine.free) - weight_bytes - WORKSPACE
        budget = pages_in(config, shorter, size, device, draft, available=left)
        kv = max(0, room // 2) if budget is None else budget.kept * config.page_size * per_token
        slots = states_in(config, shape, kv, device)
        if budget is not None:
            text = room_of(config, shorter, size, machine.device, budget, draft).text
    except EngineError as error:
        problem = error.message.rstrip(".")
    state_room = (slots + 1) * states  # one more than the slots, for padding
    at_most = max(0, (room - state_room) // per_token)
    tokens = kept_tokens = at_most
    if budget is not None:
        tokens, kept_tokens = ((pages - COW_PAGES) * config.page_size for pages in budget[:2])
    least = min(context, LEAST_TOKENS)
    if problem is None and at_most < least:
        problem = (
            f"its weights take {_gib(weight_bytes)}, KV for {least} tokens {_gib(least * per_token)}"
            + (f", {slots} states {_gib(state_room)}" if states else "")
            + f" and a workspace {_gib(WORKSPACE)}: more than {fraction:.0%} of the memory, "
            + _gib(machine.memory)
        )
    if problem is None and config.kv_memory_gb is not None and tokens > at_most:
        problem = (
            f"kv_memory_gb is {config.kv_memory_gb:g}, and beside the weights, states and a workspace "
            f"{_gib(max(0, room - state_room))} are left of {fraction:.0%} of the memory"
        )
    return {
        "kv_bytes_per_token": per_token,
        "state_bytes": states,
        "context_length": context,
        "kv_tokens": tokens,
        "kv_kept_tokens": kept_tokens,
        "kv_text": text,
        "kv_tokens_at_most": at_most,
    }, problem


def _parameters(weights: Path, tensors: list[StoredTensor]) -> tuple[int, int]:
    """(number of parameters, number of active parameters, which count only the chosen routed experts)."""
    total = sum(tensor.numbers for tensor in tensors)
    experts = sum(tensor.numbers for tensor in tensors if tensor.is_expert)
    if not experts:
        return total, total
    if weights.is_dir():
        config = _config(weights)
        config |= config.get("text_config") or {}
        count = next((config[name] for name in _EXPERTS if config.get(name)), 1)
        active = next((config[name] for name in _ACTIVE if config.get(name)), count)
    else:
        metadata = read_header(weights).metadata
        architecture = metadata.get("general.architecture")
        count = metadata.get(f"{architecture}.expert_count", 1)
        active = metadata.get(f"{architecture}.expert_used_count", count)
    return total, total - experts + experts * active // count


def _family(weights: Path) -> str | None:
    if not weights.is_dir():
        return read_header(weights).metadata.get("general.architecture")
    found = _config(weights).get("model_type")
    return found if isinstance(found, str) else None


def _chat(tokenizer: Path) -> Chat | None:
    from ramify.runtime.model.tokenizer.chat_format import chat_format
    from ramify.runtime.model.tokenizer.tokenizer import load_tokenizer

    found = chat_format(load_tokenizer(tokenizer))
    if found is None:
        return None
    return Chat(found.tool_format, found.thinking.start.strip() if found.thinking else None, found.exact)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
