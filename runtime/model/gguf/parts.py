"""The names of tensors in GGUF files, and how llama.cpp's converter reorders their rows and changes their
values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.families.qwen3_next import ungrouped
from ramify.runtime.model.shape.config import StateShape


@dataclass(frozen=True)
class Part:
    """A tensor of the Hugging Face checkpoint that is obtained from a tensor of the GGUF file."""

    name: str
    """The name in Hugging Face checkpoints, with {} for the index of an expert."""
    change: Callable[[Any], Any] | None = None
    """Function from the stored tensor or rows to those of the checkpoint; None if they are equal."""
    exact: bool = False
    """Whether the tensor is read in float32, because the model keeps float32 or `change` computes in it."""


Parts = Mapping[str, Sequence[Part]]
"""Stored tensor's name → its parts. All names are without layer and suffix, which `parts_of` adds."""

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_GEMMA = {
    **_POST_NORM,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HYBRID = {**_POST_NORM, "ssm_norm": "linear_attn.norm"}
_MORE_NAMES = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    **dict.fromkeys(("glm4moe", "gpt-oss"), _POST_NORM),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _HYBRID),
}
_NORMS_PLUS_ONE = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
"""Architectures whose files store norms' weights plus 1, except `ssm_norm` (the norm of delta-net layers)."""
_WITHOUT_SUFFIX = ("ssm_a", "ssm_dt")
"""Tensors that Hugging Face checkpoints name without ".weight": `A_log` and `dt_bias`."""


def parts_by_name(architecture: str, states: StateShape | None) -> Parts:
    """Stored tensor's name → its parts, for all tensors of an architecture. `states` is the config's."""
    found: dict[str, Sequence[Part]] = {}
    for stored, name in (_OUTSIDE | _IN_LAYERS | _MORE_NAMES.get(architecture, {})).items():
        plus_one = architecture in _NORMS_PLUS_ONE and stored.endswith("_norm") and stored != "ssm_norm"
        found[stored] = [Part(name, (lambda numbers: numbers - 1.0) if plus_one else None, exact=plus_one)]
    return found if states is None else found | _delta_net(states, tiled=architecture != "qwen3next")


def parts_of(stored: str, parts: Parts) -> Sequence[Part]:
    """The parts of the tensor `stored`, with their full names. An unknown tensor is its own part:
    `weights.fill` refuses its name."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(\.\w+)?", stored)
    if found is None or found[2] not in parts or (found[2] in _OUTSIDE) == (found[1] is not None):
        return [Part(stored)]
    stem = f"model.layers.{found[1]}." if found[1] else ""
    suffix = "" if found[2] in _WITHOUT_SUFFIX else found[3] or ""
    return [replace(part, name=f"{stem}{part.name}{suffix}") for part in parts[found[2]]]


def _delta_net(states: StateShape, *, tiled: bool) -> dict[str, Sequence[Part]]:
    """The tensors of a gated delta-net layer.

    In the checkpoint, value heads that share a key head are adjacent. With `tiled` the file interleaves them:
    for 2 key heads and 4 value heads, the key heads of the value heads are 0, 1, 0, 1. Fused projections are
    stored grouped by key head (`ssm_ba`, and `ssm_in` of files of 2025), or part after part (`attn_qkv`,
    `attn_gate`).
    """
    groups, share = states.key_heads, states.heads // states.key_heads
    heads = torch.arange(states.heads)
    if tiled:
        heads = heads.view(share, groups).t().flatten()
    values = (heads[:, None] * states.value_dim + torch.arange(states.value_dim)).flatten()
    keys = states.channels - len(values)
    channels = torch.cat([torch.arange(keys), keys + values])
    sizes = (states.key_dim, states.key_dim, share * states.value_dim, share * states.value_dim)
    qkv, z = ungrouped(groups, sizes).split([states.channels, len(values)])
    b, a = ungrouped(groups, (share, share)).chunk(2)
    stem = "linear_attn."
    return {
        "attn_qkv": [Part(stem + "in_proj_qkv", _rows(channels))],
        "attn_gate": [Part(stem + "in_proj_z", _rows(values))],
        "ssm_in": [Part(stem + "in_proj_qkv", _rows(qkv)), Part(stem + "in_proj_z", _rows(z))],
        "ssm_beta": [Part(stem + "in_proj_b", _rows(heads))],
        "ssm_alpha": [Part(stem + "in_proj_a", _rows(heads))],
        "ssm_ba": [Part(stem + "in_proj_b", _rows(b)), Part(stem + "in_proj_a", _rows(a))],
        "ssm_conv1d": [Part(stem + "conv1d", lambda stored: stored[channels][:, None], exact=True)],
        "ssm_dt": [Part(stem + "dt_bias", _rows(heads), exact=True)],
        "ssm_a": [Part(stem + "A_log", lambda stored: torch.log(-stored[heads]), exact=True)],
        "ssm_out": [Part(stem + "out_proj", _inputs(values))],
    }


def _rows(order: Tensor) -> Callable[[Any], Any]:
    """A change that gathers the stored rows `order`."""
    if torch.equal(order, torch.arange(len(order))):
        return lambda stored: stored
    return lambda stored: stored.index_select(order) if isinstance(stored, Rows) else stored[order]


def _inputs(order: Tensor) -> Callable[[Any], Any]:
    """A change that gathers the stored columns `order`. In quantised `Rows` the columns stay in place,
    because a group of them shares a scale; `Rows.order` gathers the inputs instead."""
    if torch.equal(order, torch.arange(len(order))):
        return lambda stored: stored
    back = torch.argsort(order)
    return lambda stored: replace(stored, order=back) if isinstance(stored, Rows) else stored[:, order]
