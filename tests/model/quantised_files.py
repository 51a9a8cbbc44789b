"""Quantises a random model's projections and writes them as the schemes' own libraries do.

`write` also gives the model the dequantised values, so that transformers computes what must come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

Parts = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]
"""(outputs, inputs) float32 to the tensors of a checkpoint, and the dequantised values."""


def write(
    model: PreTrainedModel, folder: Path, config: dict[str, Any], quantise: Quantise, *, skip: str = ""
) -> Path:
    """Write `model` with all its projections but `skip` quantised."""
    tensors: Parts = {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or (skip and skip in name):
            continue
        parts, values = quantise(module.weight.detach())
        module.weight.data.copy_(values)
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        tensors[f"{name}.weight"] = tensors.get(f"{name}.weight", torch.empty(0))
    for name, tensor in model.state_dict().items():
        tensors.setdefault(name, tensor)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor.numel()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    fields = model.config.to_dict() | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


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
    """compressed-tensors, pack-quantized."""

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
