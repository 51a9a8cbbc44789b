"""The tensors of a GGUF file: as quantised rows, or dequantised by the `gguf` package."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.gguf.blocks import CHUNK, floats, rows_of
from ramify.runtime.model.gguf.config import PAIRED, config_from_gguf
from ramify.runtime.model.gguf.header import GGUFHeader, TensorInfo, undequantisable
from ramify.runtime.model.gguf.parts import parts_by_name, parts_of
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.weights import RotaryLayout

_ROPE_FREQUENCIES = "rope_freqs.weight"


def config_of(header: GGUFHeader, rope_scaling: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config of a GGUF file: `config_from_gguf`, and the rotary factors if the file has such a tensor.

    Raises `UnsupportedField` for a tensor of a type that the `gguf` package does not dequantise.
    """
    for name, kind in undequantisable(header).items():
        raise UnsupportedField(
            f"{name} is stored as GGML type {kind}, which cannot be dequantised.",
            field="model",
            remedy="Choose a file quantised in another way, such as Q8_0 or Q4_K_M.",
        )
    config = config_from_gguf(header.metadata, header.shapes, rope_scaling)
    if config.rope.kind != "factors":
        return config
    stored = _stored(_map(header), _ROPE_FREQUENCIES, header.tensors[_ROPE_FREQUENCIES])
    factors = _dequantised(*stored, torch.float32)
    return replace(config, rope=replace(config.rope, factors=tuple(factors.tolist())))


def rotary_layout(config: ModelConfig) -> RotaryLayout:
    """The places of rotary pairs in the file. For Llama and families derived from it, llama.cpp's converter
    makes the two elements of a pair neighbours."""
    return "pairs" if config.family in PAIRED else "halves"


def tensors_in_file(
    header: GGUFHeader, dtype: torch.dtype, *, quantised: bool = False
) -> Iterator[tuple[str, Tensor | Rows]]:
    """Every weight under its Hugging Face name, converted to `dtype`, one at a time.

    With `quantised`, a matrix whose block type has a packed layout is returned as integers and scales. An
    embedding that is not tied to the head is dequantised: its rows are looked up, not multiplied. Layers for
    multi-token prediction, which come last, are not read.
    """
    config = config_from_gguf(header.metadata, header.shapes)
    untied = "output.weight" in header.tensors
    data = _map(header)
    parts = parts_by_name(header.metadata["general.architecture"], config.states)
    for name, whole in header.tensors.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        if name == _ROPE_FREQUENCIES or (layer and int(layer[1]) >= config.depth):
            continue  # the first is a part of the config
        looked_up = name == "token_embd.weight" and untied
        for part in parts_of(name, parts):
            for hf_name, info in _of_experts(part.name, whole):
                stored = _stored(data, name, info)
                kept = quantised and not looked_up and not part.exact
                rows = rows_of(*stored) if kept else None
                entry = rows or _dequantised(*stored, torch.float32 if part.exact else dtype)
                yield hf_name, part.read(entry)


def _of_experts(hf_name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """One entry for each expert, if `hf_name` has {} for the expert's index; else the tensor itself."""
    if "{}" not in hf_name:
        # A vector that Hugging Face checkpoints have as a matrix of one row.
        row = hf_name.endswith("shared_expert_gate.weight") and len(info.shape) == 1
        yield hf_name, replace(info, shape=(1, *info.shape)) if row else info
        return
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type)]
    shape = info.shape[1:]
    size = math.prod(shape) // block * block_bytes
    for index in range(info.shape[0]):
        yield hf_name.format(index), replace(info, shape=shape, offset=info.offset + index * size)


Files = Mapping[Path, NDArray[np.uint8]]
"""The bytes of each file of a model."""


def _map(header: GGUFHeader) -> Files:
    # Copy-on-write: torch warns of read-only arrays. Nothing here writes.
    return {path: np.memmap(path, np.uint8, mode="c") for path in header.paths}


def _stored(
    data: Files, name: str, info: TensorInfo
) -> tuple[NDArray[np.uint8], GGMLQuantizationType, tuple[int, ...]]:
    kind = GGMLQuantizationType(info.type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = math.prod(info.shape) // block * block_bytes
    raw = data[info.path][info.offset : info.offset + size]
    if raw.size != size:
        raise InvalidRequest(
            f"The GGUF file ends inside {name}.", field="model", remedy="Fetch the file again."
        )
    return raw, kind, info.shape


def _dequantised(
    raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    out, per_chunk = torch.empty(math.prod(shape), dtype=dtype), CHUNK // block
    for start, part in enumerate(out.split(per_chunk * block)):
        at = start * per_chunk * block_bytes
        blocks = raw[at : at + per_chunk * block_bytes].reshape(-1, block_bytes)
        part.copy_(torch.from_numpy(floats(blocks, kind)))
    return out.view(shape)
