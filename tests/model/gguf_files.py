"""Writes a random checkpoint as llama.cpp's converter would, so that reading it back can be tested."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize

if TYPE_CHECKING:  # importing it takes seconds from a cold disk, and `random_blocks` needs none of it
    from transformers import PreTrainedModel

_HALVES = {
    0: "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K IQ1_S IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS",
    2: "Q4_1 Q5_1 Q4_K Q5_K",
    52: "TQ1_0",
    64: "TQ2_0",
    80: "Q2_K",
    82: "Q2_K",
    108: "Q3_K",
    208: "Q6_K",
}
SCALES_AT = {
    name: [at for at, names in _HALVES.items() if name in names.split()]
    for name in sorted({"MXFP4", "NVFP4", "IQ1_M"}.union(*(names.split() for names in _HALVES.values())))
}
"""Type → offsets of the float16 scales in its blocks; all other bytes may be anything."""


def random_blocks(shape: tuple[int, int], kind: GGMLQuantizationType, *, rms: float = 0.0) -> np.ndarray:
    """A matrix of random bytes, (outputs, bytes of a row), finite. With `rms` its values have that size."""
    block, size = GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = raw[..., 0] % 8 + 116  # an exponent
    if kind.name == "IQ1_M":
        raw[..., 55] = raw[..., 55] & 15 | 32  # the upper four bits of a float16
    for at in SCALES_AT[kind.name]:
        scales = generator.standard_normal(raw[..., :1].shape).astype(np.float16)
        if not rms:
            scales[0], scales[1] = 0, 6e-8  # nothing, and the smallest number above it
        raw[..., at : at + 2] = scales.view(np.uint8)
    if rms:
        factor = rms / np.sqrt(np.square(dequantize(raw.reshape(shape[0], -1), kind)).mean())
        for at in SCALES_AT[kind.name]:
            scales = np.ascontiguousarray(raw[..., at : at + 2]).view(np.float16)
            raw[..., at : at + 2] = (scales * np.float32(factor)).astype(np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1)


def converted(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of mixtures of experts under the names that llama.cpp's converter has for them."""
    for stored, tensor in named:
        name = re.sub(r"block_sparse_moe\.router", "mlp.gate", stored).replace("block_sparse_moe", "mlp")
        name = name.replace("shared_mlp.", "mlp.shared_expert.").replace("output_linear", "down_proj")
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith(("experts.gate_up_proj", "shared_expert.input_linear.weight")):
            stem = name.removesuffix("gate_up_proj").removesuffix("input_linear.weight")
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                yield f"{stem}{part}_proj.weight", half
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor


def converted_hybrid(
    config: Any, named: Iterable[tuple[str, torch.Tensor]], *, legacy: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of Qwen3-Next and Qwen3.5, as the converter's classes for these families change them.

    With `legacy` the fused projection of Qwen3-Next is left as it is, as converters of 2025 left it.
    """
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    share = heads // groups

    def tiled(tensor: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
        # ggml repeats all key heads one after the other, transformers each of them.
        if config.model_type == "qwen3_next":  # whose class does not reorder
            return tensor
        return tensor.unflatten(dim, (groups, share, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    for name, tensor in named:
        stem, _, last = name.removesuffix(".weight").rpartition(".linear_attn.")
        keys = 2 * groups * key
        if last in ("in_proj_qkv", "conv1d"):
            tensor = tensor.squeeze(1)  # the convolution's, (channels, 1, width)
            yield name, torch.cat([tensor[:keys], tiled(tensor[keys:], value)])
        elif last == "in_proj_z":
            yield name, tiled(tensor, value)
        elif last in ("in_proj_a", "in_proj_b"):
            yield name, tiled(tensor, 1)
        elif last == "out_proj":
            yield name, tiled(tensor, value, 1)
        elif last == "A_log":
            yield name, tiled(-torch.exp(tensor), 1)  # the factor itself
        elif last == "dt_bias":
            yield f"{stem}.linear_attn.dt_proj.bias", tiled(tensor, 1)  # a name that Mamba has
        elif last == "in_proj_qkvz" and not legacy:
            parts = tensor.unflatten(0, (groups, -1)).split([key, key, share * value, share * value], 1)
            flat = [part.flatten(0, 1) for part in parts]
            yield f"{stem}.linear_attn.in_proj_qkv.weight", torch.cat(flat[:3])
            yield f"{stem}.linear_attn.in_proj_z.weight", flat[3]
        elif name.endswith("norm.weight") and last != "norm":
            yield name, tensor + 1.0  # norms are around zero, and ggml adds nothing
        else:
            yield name, tensor


def converted_gpt_oss(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of gpt-oss, whose columns of gate and up alternate: (experts, inputs, outputs)."""
    for name, tensor in named:
        stem, _, last = name.partition(".experts.")
        if not last:
            yield f"{name}.weight" if name.endswith("sinks") else name, tensor
            continue
        matrix, _, bias = last.partition("_proj")
        parts = ("gate", "up") if matrix == "gate_up" else (matrix,)
        for at, part in enumerate(parts):
            each = tensor[..., at :: len(parts)]
            place = f"{stem}.experts.{part}_proj"
            yield (f"{place}.bias", each) if bias else (f"{place}.weight", each.transpose(1, 2))


def hybrid_metadata(config: Any) -> dict[str, int]:
    found = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }
    if hasattr(config, "num_experts"):
        found |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    return found


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    *,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    others: dict[str, GGMLQuantizationType] | None = None,
    metadata: dict[str, int | float | str] | None = None,
    rope_factors: np.ndarray | None = None,
    drop: str | None = None,
    random: bool = False,
    per_file: int = 0,
    nextn: bool = False,
    legacy: bool = False,
) -> None:
    """Mistral checkpoints have the architecture "llama". `drop` leaves out one tensor, by its GGUF name.

    `others` are the types of single kinds of matrices, such as "attn_v". With `random` the matrices in blocks
    are `random_blocks`, and `model` is given their values: `gguf` cannot quantise to every type. With
    `per_file` the model is split into files of that many tensors. `nextn` adds a tensor of a layer that
    predicts further tokens, and `legacy` is that of `converted_hybrid`.
    """
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(path, architecture, split_max_tensors=per_file)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + nextn)
    if nextn:
        writer.add_nextn_predict_layers(1)
        block = f"blk.{config.num_hidden_layers}"
        for name in (f"{block}.nextn.eh_proj.weight", f"{block}.attn_q.weight"):
            writer.add_tensor(name, np.zeros((2, 32), np.float32))
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    turning = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(turning["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    # A vocabulary, longer than the arrays that the header reader keeps, and another array of its length.
    writer.add_token_list([f"token{index}" for index in range(5000)])
    writer.add_token_types([1] * 5000)
    hybrid = hasattr(config, "linear_num_key_heads")
    if hybrid:
        writer.add_rope_dimension_sections([2, 1, 1, 0])  # of images' positions; text has three equal ones
    for key, value in ((hybrid_metadata(config) if hybrid else {}) | (metadata or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)  # type: ignore[operator]

    model_arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    named = get_tensor_name_map(model_arch, config.num_hidden_layers).get_name
    neighbours = architecture in ("llama", "granite", "granitemoe")
    gemma = architecture.startswith("gemma")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    buffers = [entry for entry in model.named_buffers() if entry[0].endswith("e_score_correction_bias")]
    given: Iterable[tuple[str, torch.Tensor]] = [*model.named_parameters(), *buffers]
    if hybrid:
        given = converted_hybrid(config, given, legacy=legacy)
    elif architecture == "gpt-oss":
        given = converted_gpt_oss(given)
    for name, parameter in converted(given):
        stem, _, suffix = name.rpartition(".")
        if suffix == "A_log":
            writer.add_tensor(f"{named(name)}", parameter.detach().float().numpy())
            continue
        place = named(stem)
        short = place.rpartition(".")[2]
        array = parameter.detach().float().numpy() + (1.0 if gemma and short.endswith("_norm") else 0.0)
        if neighbours and short in heads:
            # The two halves of a head are interleaved: rows 0, d/2, 1, d/2 + 1, …
            halves = array.reshape(heads[short], 2, head_dim // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        full = f"{place}.{suffix}"
        if full == drop:
            continue
        if short in ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d"):
            writer.add_tensor(full, array.astype(np.float32).squeeze())
        elif array.ndim > 1 and suffix == "weight":
            type_ = (others or {}).get(short, matrices)
            drawn = random and type_.name in SCALES_AT
            flat = array.reshape(-1, array.shape[-1])
            raw = random_blocks(flat.shape, type_, rms=0.05) if drawn else quantize(flat, type_)
            raw = raw.reshape(*array.shape[:-1], -1)
            writer.add_tensor(full, raw, raw_dtype=type_)
            if drawn:
                values = dequantize(raw, type_)
                if neighbours and short in heads:
                    pairs = values.reshape(heads[short], head_dim // 2, 2, -1)
                    values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
                parameter.data.copy_(torch.from_numpy(values))
        else:
            writer.add_tensor(full, np.ascontiguousarray(array, np.float32))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
