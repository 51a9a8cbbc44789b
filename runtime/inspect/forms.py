"""The format in which a device keeps a matrix.

It is found by packing a small matrix with the functions that pack a model. The answers are kept on disk, so
that only the first question on a machine imports torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path

import ramify.kernels
import ramify.runtime.model
from ramify import cache

_SHAPE = (64, 512)
"""(outputs, inputs) of the small matrix: multiples of every format's blocks and of a panel, so that nothing
is padding."""
_FILE = "forms.json"
_OTHERS = {"checkpoint": "none"}
"""Quantization → the quantization whose forms apply to its float matrices. Those of a quantised checkpoint
are packed as those of any other checkpoint."""


@dataclass(frozen=True)
class Form:
    """The format in which a matrix is kept. `bits` a weight include its scales; None: it stays unpacked, in
    the model's dtype."""

    name: str
    bits: float | None


def form_of(kind: str, quantization: str, dtype: str, device: str) -> Form:
    """The form of a matrix stored in the format `kind` (a name of GGML or safetensors), under the engine's
    options `quantization` and `dtype`."""
    table = _table()
    name, bits = (quantization == "gguf" and table.get(f"{device} gguf {kind}")) or table[
        f"{device} {_OTHERS.get(quantization, quantization)} {dtype}"
    ]
    return Form(name if bits else dtype, bits)


@remembered
def _table() -> dict[str, tuple[str, float | None]]:
    kernels, model = (Path(package.__path__[0]) for package in (ramify.kernels, ramify.runtime.model))
    sources = [
        kernels / "weights" / "packed.py",
        kernels / "weights" / "quantised.py",
        model / "gguf" / "blocks.py",
        model / "quantization.py",
    ]
    entry = cache.entry_of(sources, "forms", "forms", _SHAPE)
    try:
        cache.ensure(entry, lambda folder: _write(folder))
    except cache.NotWritable:
        return _probed()
    cache.remove_outdated(entry)
    found: dict[str, tuple[str, float | None]] = json.loads((entry / _FILE).read_text(encoding="utf-8"))
    return found


def _write(folder: Path) -> None:
    (folder / _FILE).write_text(json.dumps(_probed()), encoding="utf-8")


def _probed() -> dict[str, tuple[str, float | None]]:
    import numpy as np
    import torch
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from ramify.kernels.weights.packed import pack
    from ramify.kernels.weights.quantised import lay_out
    from ramify.kernels.weights.rows import Rows
    from ramify.runtime.model.gguf.blocks import rows_of
    from ramify.runtime.model.quantization import packing

    table: dict[str, tuple[str, float | None]] = {}

    def add(key: str, rows: Rows | None) -> None:
        table[f"cpu {key}"] = table[f"cuda {key}"] = "", None
        if rows is None:
            return
        weight, laid = pack(rows, inputs=_SHAPE[1]), lay_out(rows, inputs=_SHAPE[1], device="cpu")
        size = weight.panels.nbytes + weight.scales.nbytes
        table[f"cpu {key}"] = str(weight.format), 8 * size / math.prod(_SHAPE)
        if laid is not None:
            table[f"cuda {key}"] = laid.form, 8 * laid.nbytes / math.prod(_SHAPE)

    for kind in GGMLQuantizationType:
        block, size = GGML_QUANT_SIZES[kind]
        raw = np.zeros(_SHAPE[0] * _SHAPE[1] // block * size, np.uint8)
        try:
            rows = rows_of(raw, kind, _SHAPE)
        except NotImplementedError:  # `gguf` cannot dequantise it
            rows = None
        if rows is not None:
            add(f"gguf {kind.name}", rows)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for quantization in ("none", "gguf", "int8", "int4"):
            form = packing(quantization, dtype)
            matrix = torch.zeros(_SHAPE, dtype=dtype)
            add(f"{quantization} {name}", None if form is None else form(matrix))
    return table
