"""The tensors that a checkpoint stores, by the headers of its files, and the formats in which they are kept.
Imports no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ramify.runtime.model.checkpoint import open_shard, weight_files
from ramify.runtime.model.gguf.header import read_header

_EXPERT = re.compile(r"\.experts\.|_exps\b")
_EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight", "wte.weight")
_HEADS = ("lm_head.weight", "output.weight")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint. `format` is the type's name in GGML or safetensors; `size` is in bytes."""

    name: str
    shape: tuple[int, ...]
    format: str
    size: int
    kept: tuple[str, float] | None = None
    """(packed format, bits a weight, scales included) of a matrix quantised in the checkpoint; else None."""

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def is_embedding(self) -> bool:
        return self.name.endswith(_EMBEDDINGS)

    @property
    def is_head(self) -> bool:
        return self.name in _HEADS

    @property
    def is_expert(self) -> bool:
        """Whether the tensor belongs to routed experts. An expert's weights are read only if a token is
        routed to it."""
        return _EXPERT.search(self.name) is not None


def stored_tensors(weights: Path) -> list[StoredTensor]:
    """The tensors of a folder of safetensors or a GGUF model.

    Raises `InvalidRequest` for a file that cannot be read, and `NotFound` if a file is missing.
    """
    found = []
    if weights.is_dir():
        for path in weight_files(weights):
            with open_shard(path, "numpy") as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    part = shard.get_slice(name)
                    shape, form = tuple(part.get_shape()), part.get_dtype()
                    bits = re.search(r"\d+", form)  # F8_E4M3, BF16, BOOL
                    size = math.prod(shape) * int(bits[0] if bits else 8) // 8
                    found.append(StoredTensor(name, shape, form, size))
        return found
    for name, info in read_header(weights).tensors.items():
        try:
            kind = GGMLQuantizationType(info.type)
        except ValueError:
            found.append(StoredTensor(name, info.shape, f"type {info.type}", 0))
            continue
        block, size = GGML_QUANT_SIZES[kind]
        found.append(StoredTensor(name, info.shape, kind.name, math.prod(info.shape) // block * size))
    return found


_CODES4 = {"Q2_K": 8.0, "Q3_K": 6.0, "Q4_0": 5.0, "Q4_1": 5.0, "Q4_K": 6.0}
_TABLES4 = {"IQ4_NL": 4.5, "IQ4_XS": 5.0, "MXFP4": 4.5, "NVFP4": 5.0}
"""Type of GGML with 4-bit codes into a table → bits a weight on the CPU. CUDA keeps int8 numbers instead."""
_NUMBERS8 = {
    **dict.fromkeys(("Q5_0", "Q8_0"), 8.5),
    **dict.fromkeys(("Q5_1", "IQ1_S", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0"), 9.0),
    **dict.fromkeys(("Q5_K", "Q6_K", "IQ1_M", "IQ2_S", "IQ2_XS"), 10.0),
}
"""Type of GGML → bits a weight in memory, scales and offsets included."""


@dataclass(frozen=True)
class Form:
    """The format in which a matrix is kept. `bits`: bits a weight, scales included; None: the matrix stays
    unpacked, in the model's dtype."""

    name: str
    bits: float | None


def form_of(kind: str, quantization: str, dtype: str, device: str) -> Form:
    """The form of a matrix stored in the format `kind` (a name of GGML or safetensors), under the engine's
    options `quantization` and `dtype`."""
    if quantization == "gguf":
        if kind in _CODES4:
            return Form("int4", _CODES4[kind])
        if kind in _TABLES4:
            codes = _TABLES4[kind]
            return Form("int4", codes) if device == "cpu" else Form("int8", codes + 4)
        if kind in _NUMBERS8:
            return Form("int8", _NUMBERS8[kind])
    rounded = {"int8": Form("int8", 8.25), "int4": Form("int4", 5.0)}.get(quantization)
    if rounded is not None:
        return rounded
    return Form("bf16", 16.0) if (device, dtype) == ("cpu", "bfloat16") else Form(dtype, None)


_CODES = ("weight_packed", "qweight", "_blocks")
_SCALES = ("weight_scale", "weight_scale_inv", "scales", "_scales")
_ZEROS = ("weight_zero_point", "qzeros")
_OTHERS = ("weight_shape", "weight_g_idx", "g_idx", "input_scale", "input_zero_point", "activation_scale")
_EIGHTS = {"F8_E4M3": "fp8", "I8": "int8"}
_BYTES = {"F32": 4}
_SPREAD = 128
"""Group size for integers with one scale a row; the scale is repeated for each group
(`model.quantised.SPREAD`)."""


def whole_matrices(tensors: list[StoredTensor], config: Mapping[str, Any]) -> list[StoredTensor]:
    """`tensors` with the parts of each quantised matrix replaced by one tensor, the matrix. `kept` of this
    tensor is the matrix's packed format on the CPU.

    Example: up_proj.weight_packed (64, 16) int32 of 4 bits and up_proj.weight_scale (64, 4) bfloat16 become
    up_proj.weight with 64 · 128 numbers, kept as int4 with 4.5 bits.
    """
    bits, symmetric = _bits(config), _is_symmetric(config)
    parts: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in tensors:
        base, kind = _part(tensor)
        parts[base][kind] = tensor
    return [found for base, stored in parts.items() for found in _whole(base, stored, bits, symmetric)]


def _whole(base: str, stored: dict[str, StoredTensor], bits: int, symmetric: bool) -> Iterator[StoredTensor]:
    scales = stored.get("scales")
    codes = stored.get("codes") or (stored.get("weight") if scales else None)
    if codes is None or scales is None:
        yield from stored.values()
        return
    eight = _EIGHTS.get(codes.format)
    each = {"I32": 32 // bits, "U8": 2}.get(codes.format, 1)
    numbers, form = codes.numbers * each, eight or ("int8" if bits == 8 else "int4")
    groups = scales.numbers
    if eight == "fp8" and groups * 128 < codes.shape[0]:
        groups = max(groups, codes.shape[0])  # factors of blocks and tensors, for each output
    elif eight != "fp8" and groups <= codes.shape[0]:
        groups = max(groups, numbers // _SPREAD)
    # Zero points become offsets; then scales and offsets are float32. Exponents (U8) become bfloat16.
    scale_bytes = 8 if "zeros" in stored and not symmetric else _BYTES.get(scales.format, 2)
    size = sum(tensor.size for tensor in stored.values() if tensor is not stored.get("bias"))
    kept = (form, 8 * (numbers * (8 if form != "int4" else 4) / 8 + groups * scale_bytes) / numbers)
    yield StoredTensor(
        f"{base}weight", (codes.shape[0], numbers // codes.shape[0]), _name(form, bits), size, kept
    )
    yield from (tensor for kind, tensor in stored.items() if kind == "bias")


def _name(form: str, bits: int) -> str:
    return f"{form} codes" if form == "fp8" else f"{8 if form == 'int8' else bits}-bit codes"


def _part(tensor: StoredTensor) -> tuple[str, str]:
    """(matrix name, role of the tensor in it: codes, scales, zero points, …)."""
    for kind, suffixes in {"codes": _CODES, "scales": _SCALES, "zeros": _ZEROS}.items():
        for suffix in suffixes:
            if tensor.name.endswith(suffix):
                base = tensor.name.removesuffix(suffix)
                if base.endswith(".") or suffix.startswith("_"):
                    return base, kind
    stem, dot, last = tensor.name.rpartition(".")
    return f"{stem}{dot}", last if last in ("weight", "bias", *_OTHERS) else tensor.name


def _bits(config: Mapping[str, Any]) -> int:
    groups = config.get("config_groups")
    entries = groups.values() if isinstance(groups, Mapping) else ()
    weights = [entry.get("weights") for entry in entries if isinstance(entry, Mapping)]
    found = [entry.get("num_bits") for entry in weights if isinstance(entry, Mapping)]
    return next((bits for bits in (*found, config.get("bits")) if bits in (4, 8)), 4)


def _is_symmetric(config: Mapping[str, Any]) -> bool:
    return bool(config.get("sym", False))
