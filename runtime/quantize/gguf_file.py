"""Writes a model as a GGUF file in one of ggml's plain block types, which llama.cpp and the tools based on
it read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from ramify.runtime.model.gguf.blocks import floats
from ramify.runtime.model.gguf.header import raw_fields, read_header
from ramify.runtime.quantize.errors import Class, Report, add_error
from ramify.runtime.quantize.gguf_folder import TensorToWrite, folder_as_gguf

FORMATS = {
    "int8": "Q8_0",
    "int4": "Q4_1",
    **{name.lower(): name for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "F16", "BF16", "F32")},
}
"""Format by name → ggml's type. int4 is a type with offsets, like the engine's int4."""
CHUNK = 1 << 21
"""Weights that are converted at a time: 8 MB of float32."""

_ENDS = ("token_embd.weight", "output.weight")
"""Matrices that always get 8 bits: their rounding errors affect every token."""
_KEPT = ("ffn_gate_inp", "ssm_conv1d")
"""Matrices that keep their type: routers, and convolutions, which llama.cpp reads in float32."""
_ALIGNMENT = 32


def write_gguf(source: Path, target: Path, to: str) -> Report:
    """Write the model of `source`, a folder of safetensors or a GGUF file, into the file `target`, with its
    matrices in the format `to`.

    Vectors, routers, and matrices whose rows are no multiple of 32 keep their type. Of a GGUF file the
    metadata, which includes the tokenizer, is copied bit for bit. `CHUNK` weights at a time are converted.
    """
    fields, tensors = folder_as_gguf(source) if source.is_dir() else _gguf_as_gguf(source)
    wanted = GGMLQuantizationType[FORMATS[to]]
    kinds = {name: _kind(name, tensor, wanted) for name, tensor in tensors.items()}
    report = Report()
    partial = target.with_name(f".{target.name}.partial")
    try:
        with partial.open("wb") as file:
            _write_header(file, fields, tensors, kinds, wanted)
            for name, tensor in tensors.items():
                before, after = (_size(tensor.shape, kind) for kind in (tensor.type, kinds[name]))
                entry = report.add(name, kinds[name].name, int(np.prod(tensor.shape)), before, after)
                for raw in tensor.pieces():
                    for part in _converted(raw, tensor.type, kinds[name], entry):
                        file.write(part)
                file.write(bytes(-after % _ALIGNMENT))
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return report


def _gguf_as_gguf(source: Path) -> tuple[dict[str, bytes], dict[str, TensorToWrite]]:
    header = read_header(source)
    files = {path: np.memmap(path, np.uint8, mode="r") for path in header.paths}
    tensors = {}
    for name, info in header.tensors.items():
        kind = GGMLQuantizationType(info.type)
        raw = files[info.path][info.offset : info.offset + _size(info.shape, kind)]
        tensors[name] = TensorToWrite(info.shape, kind, lambda raw=raw: iter([raw]))  # type: ignore[misc]
    fields = raw_fields(header.paths[0])
    for name in [name for name in fields if name.startswith("split.") or name == "general.alignment"]:
        del fields[name]
    return fields, tensors


def _kind(name: str, tensor: TensorToWrite, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    block = GGML_QUANT_SIZES[wanted][0]
    if len(tensor.shape) < 2 or tensor.shape[-1] % block or any(part in name for part in _KEPT):
        return tensor.type
    return GGMLQuantizationType.Q8_0 if name in _ENDS and block > 1 else wanted


def _size(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block * size


def _write_header(
    file: BinaryIO,
    fields: dict[str, bytes],
    tensors: dict[str, TensorToWrite],
    kinds: dict[str, GGMLQuantizationType],
    wanted: GGMLQuantizationType,
) -> None:
    mostly = "ALL_F32" if wanted.name == "F32" else f"MOSTLY_{wanted.name}"
    fields["general.file_type"] = _number("general.file_type", LlamaFileType[mostly])
    fields["general.quantization_version"] = _number("general.quantization_version", 2)
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(kinds), len(fields)))
    for field in fields.values():
        file.write(field)
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]  # the dimension that moves fastest comes first
        encoded = name.encode()
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.write(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kinds[name], offset))
        offset += -(-_size(tensor.shape, kinds[name]) // _ALIGNMENT) * _ALIGNMENT
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _number(key: str, value: int) -> bytes:
    encoded = key.encode()
    return struct.pack("<Q", len(encoded)) + encoded + struct.pack("<II", 4, value)  # 4: an unsigned int32


def _converted(
    raw: NDArray[np.uint8], stored: GGMLQuantizationType, wanted: GGMLQuantizationType, entry: Class
) -> Iterator[bytes]:
    """The bytes of a tensor in the type `wanted`. The rounding errors are added to `entry`."""
    if stored == wanted:
        yield from (raw[at : at + CHUNK].tobytes() for at in range(0, len(raw), CHUNK))
        return
    block, size = GGML_QUANT_SIZES[stored]
    step = CHUNK // block * size
    for at in range(0, len(raw), step):
        values = floats(raw[at : at + step].reshape(-1, size), stored)
        rows = 16 if len(values) % (16 * GGML_QUANT_SIZES[wanted][0]) == 0 else 1  # `gguf` takes 16 at a time
        blocks = quantize(values.reshape(rows, -1), wanted)
        add_error(entry, values, dequantize(blocks, wanted).reshape(-1))
        yield blocks.tobytes()
