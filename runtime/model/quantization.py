"""Weight formats: what `--quantization` means for a checkpoint, and how its matrices are packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ramify.errors import InvalidRequest
from ramify.kernels.packed import Rows, quantised

Quantization = Literal["none", "int8", "int4", "gguf"]
"""none: the model's dtype. int8, int4: rounded, with a scale for each group of inputs. gguf: what the file
holds."""

GROUPS = {"int8": 64, "int4": 32}
"""Inputs that share a scale: 8.25 bits a weight in all, and 5 (int4 has an offset as well)."""


def resolve_quantization(
    wanted: Literal["auto"] | Quantization, weights: Path, *, exact: bool
) -> Quantization:
    """The format for the checkpoint `weights`, a folder or a .gguf file.

    auto takes a GGUF file as it is, which is fastest and loses nothing; anything else, and everything where
    the user asked for an exact dtype, is not quantised.
    """
    is_gguf = not weights.is_dir()
    if wanted == "auto":
        return "gguf" if is_gguf and not exact else "none"
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
    """How a matrix that the checkpoint does not hold in quantised form is packed; None where it is not.

    float32 is packed only where `everything` has to be: torch's products with it are faster.
    """
    if quantization == "int8" or quantization == "int4":
        return lambda weight: quantised(weight, quantization, GROUPS[quantization])
    return Rows if everything or dtype == torch.bfloat16 else None
