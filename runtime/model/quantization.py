"""Weight formats: the values of `--quantization` for a checkpoint, and the packing of its matrices.

Imports torch only to pack: `ramify inspect` and servers of several models ask for formats alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.model.shape.quantised_config import Quantised

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ramify.kernels.weights.rows import Rows

Quantization = Literal["none", "int8", "int4", "gguf", "checkpoint"]
"""none: the model's dtype. int8, int4: rounded, with a scale for each group of inputs. gguf: the file's
format. checkpoint: the format of a folder that is already quantised."""

GROUPS = {"int8": 64, "int4": 32}
"""Inputs that share a scale. Scales included, a weight takes 8.25 bits in int8 and 5 bits in int4, which also
has offsets."""


def resolve_quantization(
    wanted: Literal["auto"] | Quantization,
    weights: Path,
    *,
    exact: bool,
    quantised: Quantised | None = None,
) -> Quantization:
    """The format for the checkpoint `weights`, a folder or a .gguf file. `quantised` is that of its config.

    "auto" keeps the format of the file or folder, which is fastest and loses nothing: "gguf", "checkpoint"
    for a quantised folder, "none" for a folder of float weights. With `exact` (the user asked for float32)
    "auto" is always "none".
    """
    is_gguf = not weights.is_dir()
    if wanted == "auto":
        if exact:
            return "none"
        return "gguf" if is_gguf else "none" if quantised is None else "checkpoint"
    if quantised is not None and wanted in ("int8", "int4"):
        raise UnsupportedField(
            f"quantization is {wanted!r}, but {weights} is quantised already ({quantised.method}).",
            field="quantization",
            remedy="Leave it out to run the checkpoint as it is, or choose none to dequantise it.",
        )
    if wanted == "gguf" and not is_gguf:
        raise InvalidRequest(
            f"quantization is 'gguf', but {weights} is no GGUF file.",
            field="quantization",
            remedy="Choose int8, int4 or none, or name a .gguf file.",
        )
    return wanted


def packing(
    quantization: Quantization, dtype: torch.dtype, *, everything: bool = False
) -> Callable[[Tensor], Rows] | None:
    """The function that packs matrices not quantised in the checkpoint; None if such matrices stay unpacked.

    float32 is packed only with `everything`: torch's float32 products are faster.
    """
    import torch

    from ramify.kernels.weights.rows import Rows, quantised

    if quantization == "int8" or quantization == "int4":
        return lambda weight: quantised(weight, quantization, GROUPS[quantization])
    return Rows if everything or dtype == torch.bfloat16 else None
