"""The tensors that a checkpoint stores, read from the headers of its files. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ramify.errors import InvalidRequest
from ramify.runtime.model.checkpoint import weight_files
from ramify.runtime.model.gguf.header import read_header

_EXPERT = re.compile(r"\.experts\.|_exps\b")
_SCALES = re.compile(r"(scale|zero|zeros|g_idx|scale_inv|shape|_scales|_blocks_scale)$")
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
    """(packed format, bits a weight including scales) of a matrix that is quantised in the checkpoint; else
    None."""

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
    if weights.is_dir():
        return [tensor for path in weight_files(weights) for tensor in _in_safetensors(path)]
    found = []
    for name, info in read_header(weights).tensors.items():
        try:
            kind = GGMLQuantizationType(info.type)
        except ValueError:
            found.append(StoredTensor(name, info.shape, f"type {info.type}", 0))
            continue
        block, size = GGML_QUANT_SIZES[kind]
        found.append(StoredTensor(name, info.shape, kind.name, math.prod(info.shape) // block * size))
    return found


def _in_safetensors(path: Path) -> list[StoredTensor]:
    """The tensors in a safetensors file: eight bytes with the header's length, then the header in JSON
    (huggingface.co/docs/safetensors)."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            end = file.tell()
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        end += max((entry["data_offsets"][1] for _, entry in entries), default=0)
        tensors = [
            StoredTensor(
                name,
                tuple(entry["shape"]),
                entry["dtype"],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in entries
        ]
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise _unreadable(path, repr(error)) from None
    if end != (size := path.stat().st_size):
        raise _unreadable(path, f"it has {size:,} bytes, and {end:,} by its header")
    return tensors


def _unreadable(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is not a readable safetensors file: {reason}.", field="model", remedy="Fetch it again."
    )
