"""Quantises a random model's projections and writes them as the schemes' own libraries do.

What `write` returns has the dequantised values, so that transformers computes what must come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Parts = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]
"""A matrix, (outputs, inputs) float32 → the tensors of a checkpoint, and the dequantised values."""


_LEFT_ALONE = re.compile(r"(\.gate|_gate|\.router(\.layer)?)\.weight$")
"""Routers and gates of one output, as the schemes' libraries leave them."""


def write(
    model: PreTrainedModel, folder: Path, config: dict[str, Any], quantise: Quantise, *, skip: str = " "
) -> PreTrainedModel:
    """Write `model` to `folder`, the matrices of its layers quantised but those whose name has `skip`.

    Experts are quantised where each has a tensor of its own. Returns the model with the dequantised values.
    """
    values = folder / "values"
    model.save_pretrained(values)
    stored = load_file(values / "model.safetensors")
    tensors: Parts = {}
    for name, tensor in list(stored.items()):
        stem = name.removesuffix(".weight")
        if (
            ".layers." not in name
            or stem == name
            or tensor.dim() != 2
            or skip in name
            or _LEFT_ALONE.search(name)
        ):
            tensors[name] = tensor
        else:
            parts, stored[name] = quantise(tensor)
            tensors |= {f"{stem}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(stored, values / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((values / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(fields))
    return type(model).from_pretrained(values, dtype=torch.float32).eval()


def write_mxfp4(reference: Any, folder: Path) -> None:
    """A gpt-oss of random experts in MXFP4, as it is published. `reference` is given their values."""
    generator = torch.Generator().manual_seed(2)
    stored = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for name, values in reference.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = values.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator).byte()
        scales = torch.randint(122, 126, blocks.shape[:3], generator=generator).byte()
        values.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    reference.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    reference.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors")


def compressed(
    form: str, weights: dict[str, Any], *, activations: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "output_activations": None}
    group["input_activations"] = activations
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {
        **config,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


def integers(bits: int, group: int, *, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def scales_of(weight: Tensor, group: int, steps: float, dtype: torch.dtype) -> Tensor:
    """(outputs, groups) factors with which a group's largest magnitude is `steps`. group 0: one for a row."""
    parts = weight.split(group or weight.shape[1], 1)
    return (torch.stack([part.abs().amax(1) for part in parts], 1) / steps).to(dtype)


def spread(scales: Tensor, group: int, inputs: int) -> Tensor:
    return scales.float().repeat_interleave(group or inputs, 1)[:, :inputs]


def fp8(scale_name: str, dtype: torch.dtype, *, tensor: bool = False, block: int = 0) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        scales = scales_of(weight, 0, 448, dtype)
        wide = scales.float()
        extra = {}
        if tensor:
            scales = scales.amax().reshape(1)
            wide = scales.float()
            extra |= {"input_scale": torch.ones(1), "activation_scale": torch.ones(1)}
        if block:
            rows = [scales_of(part.reshape(1, -1), 0, 448, dtype) for part in weight.split(block, 0)]
            columns = [scales_of(part.t().reshape(1, -1), 0, 448, dtype) for part in weight.split(block, 1)]
            scales = torch.maximum(torch.cat(rows, 0), torch.cat(columns, 1))
            wide = spread(scales, block, inputs).repeat_interleave(block, 0)[:outputs]
        numbers = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": numbers, scale_name: scales, **extra}, numbers.float() * wide

    return quantise


def int8(weight: Tensor) -> tuple[Parts, Tensor]:
    scales = scales_of(weight, 0, 127, torch.bfloat16)
    numbers = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """(rows, numbers) to (rows, ceil(numbers * bits / 32)) int32, the lowest bits first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    words = torch.zeros(len(codes), padded.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= padded[:, place::per_word] << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def codes_of(
    weight: Tensor, bits: int, group: int, dtype: torch.dtype, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales and zero points, from 0 to 2**bits - 1, and the dequantised values. With an `order`
    inputs lie in groups in that order."""
    if order is not None:
        weight = weight[:, order]
    half = 1 << bits - 1
    scales = scales_of(weight, group, half - 0.5, dtype)
    zeros = torch.full(scales.shape, half)
    if not symmetric:
        zeros += torch.randint(-half // 2, half // 2, scales.shape)
    wide, zero = spread(scales, group, weight.shape[1]), spread(zeros, group, weight.shape[1])
    codes = ((weight / wide).round() + zero).clamp(0, 2 * half - 1)
    values = (codes - zero) * wide
    if order is not None:
        back = torch.argsort(order)
        codes, values = codes[:, back], values[:, back]
    return codes.int(), scales, zeros, values


def packed(bits: int, group: int, *, symmetric: bool, ordered: bool = False) -> Quantise:
    """Quantise as compressed-tensors' pack-quantized."""

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        outputs, inputs = weight.shape
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if ordered else None
        codes, scales, zeros, values = codes_of(
            weight, bits, group, torch.bfloat16, symmetric=symmetric, order=order
        )
        parts = {
            "weight_packed": pack(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
        if order is not None:
            parts["weight_g_idx"] = (torch.argsort(order) // group).int()
        return parts, values

    return quantise


def gptq(bits: int, group: int, *, symmetric: bool, shift: int = 1, ordered: bool = False) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if ordered else None
        codes, scales, zeros, values = codes_of(
            weight, bits, group, torch.float16, symmetric=symmetric, order=order
        )
        place = torch.arange(inputs) if order is None else torch.argsort(order)
        parts = {
            "qweight": pack(codes, bits).t().contiguous(),
            "qzeros": pack((zeros - shift).t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": (place // (group or inputs)).int(),
            "bias": torch.zeros(len(weight)),
        }
        return parts, values

    return quantise


def awq(group: int) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        codes, scales, zeros, values = codes_of(weight, 4, group, torch.float16, symmetric=False)
        # AutoAWQ, WQLinear_GEMM.from_linear: bits 4i to 4i + 3 hold column order_map[i] of eight.
        order_map = [0, 2, 4, 6, 1, 3, 5, 7]

        def packed_columns(numbers: Tensor) -> Tensor:
            eights = numbers.t().unflatten(1, (-1, 8))[:, :, order_map]
            return pack(eights.flatten(1), 4)

        parts = {
            "qweight": packed_columns(codes),
            "qzeros": packed_columns(zeros),
            "scales": scales.t().contiguous(),
        }
        return parts, values

    return quantise
