"""The names of tensors in GGUF files, and how llama.cpp's converter reorders their rows and changes their
values. `weights` reads files by them, `quantize.gguf_folder` writes files by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from torch import Tensor

from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.families.qwen3_next import ungrouped
from ramify.runtime.model.shape.config import StateShape


@dataclass(frozen=True)
class Change:
    """A change of a tensor's values or of its shape."""

    read: Callable[[Any], Any]
    """Function from the stored tensor or rows to those of the checkpoint."""
    write: Callable[[Tensor], Tensor]
    """The inverse of `read`, for tensors."""


@dataclass(frozen=True)
class Part:
    """A tensor of the Hugging Face checkpoint that is obtained from a tensor of the GGUF file."""

    name: str
    """The name in Hugging Face checkpoints, with {} for the index of an expert."""
    change: Change | None = None
    """Change after the rows are gathered; None if the values are equal."""
    rows: Tensor | None = None
    """For each row of the part, the index of the stored tensor's row; None: all rows in their order."""
    exact: bool = False
    """Whether the tensor is read in float32, because the model keeps float32 or `change` computes in it."""

    def read(self, stored: Any) -> Any:
        """The part, from the stored tensor or rows."""
        if self.rows is not None and not torch.equal(self.rows, torch.arange(len(stored))):
            stored = stored.index_select(self.rows) if isinstance(stored, Rows) else stored[self.rows]
        return stored if self.change is None else self.change.read(stored)


def joined(parts: Sequence[Part], tensors: Sequence[Tensor]) -> Tensor:
    """The stored tensor whose `parts` are `tensors`."""
    written = [
        tensor if part.change is None else part.change.write(tensor)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
    orders = [part.rows for part in parts if part.rows is not None]
    return torch.cat(written)[torch.argsort(torch.cat(orders))] if orders else written[0]


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
_SUFFIXES = {"ssm_a": "", "ssm_dt": ".bias", "attn_sinks": ".weight"}
"""Stored suffixes of tensors that Hugging Face checkpoints name without one: `A_log`, `dt_bias`, `sinks`."""
_PLUS_ONE = Change(lambda stored: stored - 1.0, lambda tensor: tensor + 1.0)
_FACTOR = Change(lambda stored: torch.log(-stored), lambda tensor: -torch.exp(tensor))
"""The decay of a delta-net head: the file has the factor, the checkpoint the logarithm of its magnitude."""
_CHANNELS = Change(lambda stored: stored[:, None], lambda tensor: tensor[:, 0])


def parts_by_name(architecture: str, states: StateShape | None) -> Parts:
    """Stored tensor's name → its parts, for all tensors of an architecture. `states` is the config's."""
    found: dict[str, Sequence[Part]] = {}
    for stored, name in (_OUTSIDE | _IN_LAYERS | _MORE_NAMES.get(architecture, {})).items():
        plus_one = architecture in _NORMS_PLUS_ONE and stored.endswith("_norm") and stored != "ssm_norm"
        found[stored] = [Part(name, _PLUS_ONE if plus_one else None, exact=plus_one)]
    return found if states is None else found | _delta_net(states, tiled=architecture != "qwen3next")


def parts_of(stored: str, parts: Parts) -> Sequence[Part]:
    """The parts of the tensor `stored`, with their full names. An unknown tensor is its own part:
    `weights.fill` refuses its name."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)(\.\w+)?", stored)
    if found is None or found[2] not in parts or (found[2] in _OUTSIDE) == (found[1] is not None):
        return [Part(stored)]
    stem = f"model.layers.{found[1]}." if found[1] else ""
    suffix = "" if found[2] in _SUFFIXES else found[3] or ""
    return [replace(part, name=f"{stem}{part.name}{suffix}") for part in parts[found[2]]]


def stored_names(architecture: str, parts: Parts, depth: int) -> Iterator[str]:
    """The names that the tensors of an architecture of `depth` layers may have in GGUF files, by the `gguf`
    package. Of several names for one tensor, the one that llama.cpp's converter writes comes first."""
    found = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = [TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[found]]
    inside = [name for name in names if name.startswith("blk.")]
    blocks = [name.format(bid=layer) for layer in range(depth) for name in inside]
    for name in [*(name for name in names if name not in inside), *blocks]:
        stem = name.rpartition(".")[2]
        if stem in parts:
            suffixes = (_SUFFIXES[stem],) if stem in _SUFFIXES else (".weight", ".bias")
            yield from (name + suffix for suffix in suffixes)


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
        "attn_qkv": [Part(stem + "in_proj_qkv", rows=channels)],
        "attn_gate": [Part(stem + "in_proj_z", rows=values)],
        "ssm_in": [Part(stem + "in_proj_qkv", rows=qkv), Part(stem + "in_proj_z", rows=z)],
        "ssm_beta": [Part(stem + "in_proj_b", rows=heads)],
        "ssm_alpha": [Part(stem + "in_proj_a", rows=heads)],
        "ssm_ba": [Part(stem + "in_proj_b", rows=b), Part(stem + "in_proj_a", rows=a)],
        "ssm_conv1d": [Part(stem + "conv1d", _CHANNELS, channels, exact=True)],
        "ssm_dt": [Part(stem + "dt_bias", rows=heads, exact=True)],
        "ssm_a": [Part(stem + "A_log", _FACTOR, heads, exact=True)],
        "ssm_out": [Part(stem + "out_proj", _inputs(values))],
    }


def _inputs(order: Tensor) -> Change | None:
    """A change that gathers the stored columns `order`. In quantised `Rows` the columns stay in place,
    because a group of them shares a scale; `Rows.order` gathers the inputs instead."""
    if torch.equal(order, torch.arange(len(order))):
        return None
    back = torch.argsort(order)
    return Change(
        lambda stored: replace(stored, order=back) if isinstance(stored, Rows) else stored[:, order],
        lambda tensor: tensor[:, back],
    )
