"""The matrices of a folder that is already quantised: the stored parts of each one joined. Imports no
torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ramify.runtime.inspect.checkpoint import StoredTensor

_CODES = ("weight_packed", "qweight", "_blocks")
_SCALES = ("weight_scale", "weight_scale_inv", "scales", "_scales")
_ZEROS = ("weight_zero_point", "qzeros")
_OTHERS = ("weight_shape", "weight_g_idx", "g_idx", "input_scale", "input_zero_point", "activation_scale")
_EIGHTS = {"F8_E4M3": "fp8", "I8": "int8"}
_BYTES = {"F32": 4}
_SPREAD = 128
"""Inputs of a group for integers with one scale a row, which is repeated for each group
(`quantised.schemes.SPREAD`)."""


def whole_matrices(tensors: list[StoredTensor], config: Mapping[str, Any]) -> list[StoredTensor]:
    """`tensors`, in which the parts of each quantised matrix are replaced by one tensor. Its `kept` is the
    packed format that the matrix has on the CPU.

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
