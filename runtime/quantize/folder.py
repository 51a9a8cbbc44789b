"""Rewrites a folder of safetensors with packed integers, in compressed-tensors' format pack-quantized.

vLLM and others can read it. The value of a weight is scale · (number - zero point), with one scale and one
zero point for each group.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.inspect.checkpoint import StoredTensor, stored_tensors
from ramify.runtime.model.checkpoint import weight_files
from ramify.runtime.quantize.errors import Class, Report, add_error, class_of

SCHEMES: dict[str, tuple[int, int, bool]] = {"int8": (8, 64, True), "int4": (4, 32, False)}
"""Format → (bits, inputs of a group, whether quantisation is symmetric). int4 is not: it has zero points."""

_IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\..*\.weight")
_KEPT = re.compile(r"norm|vision|visual|router|\.gate\.weight|conv|embed")
"""Matches matrices that stay unquantised: routers, whose rounding errors would send tokens to other experts,
and parts that a text model does not use."""
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64"}
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_INDEX = "model.safetensors.index.json"
ROWS = 1 << 22
"""Weights that are quantised at a time."""

Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""(name, dtype, shape) of a tensor to write."""


def write_folder(source: Path, target: Path, to: str) -> Report:
    """Write the checkpoint `source` into the folder `target`, with its layers' matrices in the format `to`.

    Embeddings, head, norms, routers, and experts that are stored as one tensor stay as they are. One matrix
    at a time is in memory. Raises `UnsupportedField` if the checkpoint is already quantised.
    """
    if to not in SCHEMES:
        raise UnsupportedField(
            f"to is {to!r}, a type of GGUF files; {target} is a folder.",
            field="to",
            remedy="Choose int8 or int4, or name a .gguf file.",
        )
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        raise UnsupportedField(
            f"{source} is quantised already.", field="model", remedy="Give the checkpoint it was made from."
        )
    report, places, kept = Report(), dict[str, str](), list[str]()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for pattern in _COPIED:
            for path in source.glob(pattern):
                shutil.copy(path, partial)
        stored = {tensor.name: tensor for tensor in stored_tensors(source)}
        for path in weight_files(source):
            _write_file(path, partial / path.name, to, stored, report, places, kept)
        ignored = [name.removesuffix(".weight") for name in kept]
        config["quantization_config"] = _scheme(to, ["lm_head", *ignored])
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        if (source / _INDEX).is_file():
            index = {"metadata": {"total_size": report.after}, "weight_map": places}
            (partial / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _scheme(to: str, ignored: list[str]) -> dict[str, Any]:
    bits, group, symmetric = SCHEMES[to]
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": weights,
                "input_activations": None,
            }
        },
        "ignore": list(dict.fromkeys(ignored)),
    }


def _write_file(
    source: Path,
    target: Path,
    to: str,
    stored: Mapping[str, StoredTensor],
    report: Report,
    places: dict[str, str],
    kept: list[str],
) -> None:
    with safe_open(source, framework="pt") as shard, target.open("wb") as file:
        names = list(shard.keys())
        entries: list[Entry] = []
        for name in names:
            tensor = stored[name]
            if _is_quantised(tensor, to):
                entries += _packed_entries(tensor, to)
                continue
            if tensor.format not in _TYPES:
                raise InvalidRequest(f"{name} is stored as {tensor.format}.", field="model")
            if len(tensor.shape) > 1 and not tensor.is_embedding:
                kept.append(name)
            entries.append((name, _TYPES[tensor.format], tensor.shape))
        _write_header(file, entries)
        places |= {name: target.name for name, _, _ in entries}
        for name in names:
            values, tensor = shard.get_tensor(name), stored[name]
            if not _is_quantised(tensor, to):
                report.add(name, tensor.format, tensor.numbers, tensor.size, tensor.size)
                fused = len(tensor.shape) == 3 and not _KEPT.search(name)
                if fused and class_of(name) not in report.fused:
                    report.fused.append(class_of(name))
                _write_tensor(file, values)
                continue
            after = sum(_bytes(entry) for entry in _packed_entries(tensor, to))
            entry = report.add(name, to, tensor.numbers, tensor.size, after)
            for part in _packed(values, to, entry):
                _write_tensor(file, part)


def _is_quantised(tensor: StoredTensor, to: str) -> bool:
    if len(tensor.shape) != 2 or tensor.format not in _TYPES or _KEPT.search(tensor.name):
        return False
    outputs, inputs = tensor.shape
    fits = inputs % SCHEMES[to][1] == 0 and outputs % 8 == 0
    return fits and _IN_LAYERS.search(tensor.name) is not None


def _packed_entries(tensor: StoredTensor, to: str) -> list[Entry]:
    (outputs, inputs), (bits, group, symmetric) = tensor.shape, SCHEMES[to]
    groups, name = inputs // group, tensor.name
    dtype = torch.bfloat16 if tensor.format == "BF16" else torch.float16
    entries: list[Entry] = [(f"{name}_packed", torch.int32, (outputs, inputs * bits // 32))]
    entries += [(f"{name}_scale", dtype, (outputs, groups)), (f"{name}_shape", torch.int64, (2,))]
    if not symmetric:
        entries.append((f"{name}_zero_point", torch.int32, (outputs * bits // 32, groups)))
    return entries


def _bytes(entry: Entry) -> int:
    return int(np.prod(entry[2])) * entry[1].itemsize


def _write_header(file: BinaryIO, entries: list[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        name, dtype, shape = entry
        end = at + _bytes(entry)
        header[name] = {"dtype": _NAMES.get(dtype, "F32"), "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _packed(weight: Tensor, to: str, entry: Class) -> Iterator[Tensor]:
    bits, group, symmetric = SCHEMES[to]
    outputs, inputs = weight.shape
    scale_dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float16
    words = torch.empty(outputs, inputs * bits // 32, dtype=torch.int32)
    scales = torch.empty(outputs, inputs // group, dtype=scale_dtype)
    zeros = torch.zeros(outputs, inputs // group, dtype=torch.int32)
    step, half = max(1, ROWS // inputs), 1 << bits - 1
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        groups = weight[rows].float().unflatten(1, (-1, group))
        if symmetric:
            scale = (groups.abs().amax(-1) / (half - 1)).to(scale_dtype)
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = ((high - low) / (2 * half - 1)).to(scale_dtype)
            zeros[rows] = (-half - _divided(low, scale)).round().clamp(-half, half - 1).int()
        zero = zeros[rows][..., None]
        numbers = (_divided(groups, scale[..., None]) + zero).round().clamp(-half, half - 1)
        scales[rows] = scale
        words[rows] = _in_words(numbers.int().flatten(1) + half, bits)
        add_error(entry, groups.numpy(), ((numbers - zero) * scale[..., None].float()).numpy())
    yield words
    yield scales
    yield torch.tensor([outputs, inputs])
    if not symmetric:
        yield _in_words((zeros + half).t().contiguous(), bits).t()


def _divided(values: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, values / scale.float())


def _in_words(codes: Tensor, bits: int) -> Tensor:
    """The codes, (rows, codes), packed as (rows, words) int32, the first code in the lowest bits."""
    words = torch.zeros(len(codes), codes.shape[1] * bits // 32, dtype=torch.int32)
    for place, part in enumerate(codes.unflatten(1, (-1, 32 // bits)).unbind(-1)):
        words |= part << bits * place
    return words
