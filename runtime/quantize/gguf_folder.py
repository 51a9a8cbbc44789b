"""A folder of safetensors as the fields and tensors of a GGUF file.

The names and orders of tensors are those by which GGUF files are read (`gguf.parts`), inverted: each name
that a file may have is followed to the model's parameters, and so are the names of the folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.model.checkpoint import open_shard, weight_files
from ramify.runtime.model.decoder import Model
from ramify.runtime.model.gguf.config import ARCHITECTURES, PAIRED
from ramify.runtime.model.gguf.header import raw_fields
from ramify.runtime.model.gguf.parts import Part, joined, parts_by_name, parts_of, stored_names
from ramify.runtime.model.loading.load import dummy_model, read_config
from ramify.runtime.model.shape.config import ModelConfig
from ramify.runtime.model.shape.hf_config import text_config_of
from ramify.runtime.model.weights import pair_rows
from ramify.runtime.quantize.gguf_metadata import (
    ROPE_FREQUENCIES,
    Metadata,
    architecture_of,
    check_metadata,
    metadata_of,
    rope_factors,
)
from ramify.runtime.quantize.gguf_vocabulary import check_tokenizer, tokenizer_metadata

_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
_DTYPES = {kind.name: dtype for dtype, kind in _TYPES.items()}
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")
_FUSED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
"""Qwen3-Next's projections → those that its GGUF files have, which are Qwen3.5's."""


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a GGUF file. `shape` is row-major."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    """The type of the bytes that `pieces` yields."""
    pieces: Callable[[], Iterator[NDArray[np.uint8]]]
    """The tensor's bytes, in order, in pieces of whole rows."""


def folder_as_gguf(folder: Path) -> tuple[dict[str, bytes], dict[str, TensorToWrite]]:
    """The encoded metadata fields of the checkpoint in `folder`, and its tensors, by their names in files.

    Raises `UnsupportedField` for a family, a value or a tokenizer that GGUF files cannot hold.
    """
    config = read_config(folder)
    if config.quantised is not None:
        raise UnsupportedField(
            f"{folder} is quantised already.", field="model", remedy="Give the checkpoint it was made from."
        )
    metadata = metadata_of(config, text_config_of(folder)) | tokenizer_metadata(folder, config)
    metadata["general.name"] = folder.resolve().name
    tensors = _Tensors(folder).all()
    factors = rope_factors(config)
    if factors is not None:
        tensors = {ROPE_FREQUENCIES: _whole(factors), **tensors}
    check_metadata(config, metadata, {name: tensor.shape for name, tensor in tensors.items()})
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "fields.gguf"
        _write_fields(path, metadata)
        check_tokenizer(folder, path)
        return raw_fields(path), tensors


class _Tensors:
    """The tensors of a checkpoint in `folder`, by the names of the model's parameters and by those of GGUF
    files."""

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        self.architecture = architecture_of(self.config)
        # Parameters have the names of the family that the file is read as.
        read_as = replace(self.config, family=ARCHITECTURES[self.architecture][0])
        self.source, self.model = _on_meta(self.config), _on_meta(read_as)
        self.slots, self._orders = dict(self.model.slots()), dict(self.source.slots())
        self._places: dict[str, tuple[Path, str, Tensor]] = {}
        """Parameter → (file, name in the file, a tensor of its shape and dtype on the meta device)."""
        self._read: tuple[str, dict[str, Tensor]] = "", {}
        """The stored tensor that was read last, and its parameters: fused ones have several."""
        for path in weight_files(folder):
            with open_shard(path) as shard:
                for stored in shard.keys():  # noqa: SIM118 - not a mapping
                    part = shard.get_slice(stored)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise InvalidRequest(
                            f"{path} has {stored} as {part.get_dtype()}; F32, F16 or BF16 is needed.",
                            field="model",
                        )
                    empty = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                    for name, tensor in self._entries(stored, empty):
                        self._place(name, tensor, path, stored)
        missing = [name for name in self.slots if name not in self._places]
        if missing:
            raise InvalidRequest(
                f"{folder} lacks {len(missing)} tensors, such as {missing[0]}.",
                field="model",
                remedy="Fetch the checkpoint again.",
            )

    def _place(self, name: str, tensor: Tensor, path: Path, stored: str) -> None:
        if name == "lm_head.weight" and self.config.tie_embeddings:
            return
        if name not in self.slots or tensor.shape != self.slots[name].target.shape:
            raise InvalidRequest(
                f"{path} has {stored} of shape {tuple(tensor.shape)}, which is no tensor of a "
                f"{self.config.family} model.",
                field="model",
                remedy="Fetch the checkpoint again.",
            )
        self._places[name] = path, stored, tensor

    def _entries(self, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, entry in self.source.entries(stored, tensor):
            assert isinstance(entry, Tensor)
            stem, _, last = name.removesuffix(".weight").rpartition(".")
            if name in self.slots or last not in _FUSED:
                yield name, entry
                continue
            order = self._orders[name].order
            names = [f"{stem}.{part}.weight" for part in _FUSED[last]]
            sizes = [len(self.slots[name].target) for name in names]
            yield from zip(names, torch.split(entry[order], sizes), strict=True)

    def _load(self, name: str) -> Tensor:
        path, stored, _ = self._places[name]
        if self._read[0] != stored:
            with open_shard(path) as shard:
                self._read = stored, dict(self._entries(stored, shard.get_tensor(stored)))
        return self._read[1][name]

    def all(self) -> dict[str, TensorToWrite]:
        parts = parts_by_name(self.architecture, self.config.states)
        found, left = dict[str, TensorToWrite](), set(self.slots)
        for stored in stored_names(self.architecture, parts, self.config.depth):
            of_tensor = parts_of(stored, parts)
            names = [self._names(part, stored) for part in of_tensor]
            if all(left.issuperset(each) for each in names):
                left.difference_update(*names)
                found[stored] = self._tensor(stored, of_tensor, names)
        if left:
            raise UnsupportedField(
                f"GGUF files of the architecture {self.architecture} have no name for {min(left)}.",
                field="model",
                remedy="Write a folder: --to int8 or int4, and an out without .gguf.",
            )
        return found

    def _names(self, part: Part, stored: str) -> list[str]:
        """The parameters of a part: one, or one of each expert."""
        experts = self.config.experts
        indices = range(experts.count) if "{}" in part.name and experts is not None else range(1)
        nothing = torch.empty(0, device="meta")
        return [name for index in indices for name, _ in self.model.entries(part.name.format(index), nothing)]

    def _tensor(self, stored: str, parts: Sequence[Part], names: Sequence[Sequence[str]]) -> TensorToWrite:
        exact = any(part.exact for part in parts) or not set(_ROUTERS).isdisjoint(stored.split("."))

        def piece(load: Callable[[str], Tensor], index: int) -> Tensor:
            tensors = [self._paired(each[index], load(each[index])) for each in names]
            tensor = joined(parts, [tensor.float() for tensor in tensors] if exact else tensors)
            if parts[0].name.endswith("shared_expert_gate.weight"):
                tensor = tensor.flatten()  # a matrix of one row
            return tensor.float() if tensor.dim() == 1 else tensor

        first, count = piece(lambda name: self._places[name][2], 0), len(names[0])
        stacked = "{}" in parts[0].name
        return TensorToWrite(
            (count, *first.shape) if stacked else tuple(first.shape),
            _TYPES[first.dtype],
            lambda: (_bytes(piece(self._load, index)) for index in range(count)),
        )

    def _paired(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` with the two rows of a rotary pair as neighbours, in families whose files have them so."""
        slot = self.slots[name]
        if slot.rotary is None or self.model.config.family not in PAIRED:
            return tensor
        paired = tensor.clone()
        pair_rows(paired, tensor, slot.rotary)
        return paired


def _on_meta(config: ModelConfig) -> Model:
    model = dummy_model(config, dtype=torch.float32, device="meta")
    assert isinstance(model, Model)
    return model


def _whole(tensor: Tensor) -> TensorToWrite:
    return TensorToWrite(tuple(tensor.shape), _TYPES[tensor.dtype], lambda: iter([_bytes(tensor)]))


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _write_fields(path: Path, metadata: Metadata) -> None:
    """Write a GGUF file without tensors."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    if key == "tokenizer.chat_template" and not isinstance(value, str):
        assert isinstance(value, Mapping)
        writer.add_chat_template([{"name": name, "template": text} for name, text in value.items()])
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)
