"""The tensors of a quantised checkpoint folder, those of a quantised matrix together as rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ramify.kernels.packed import Rows
from ramify.runtime.model.checkpoint import weight_files
from ramify.runtime.model.quantised import schemes
from ramify.runtime.model.quantised.config import Quantised
from ramify.runtime.model.quantised.schemes import Stored
from ramify.runtime.model.weights import open_shard

_SCHEMES: dict[str, Callable[[Stored, Quantised], Rows]] = {
    "weight_packed": schemes.packed,
    "weight_scale": schemes.eight_bits,
    "weight_scale_inv": schemes.eight_bits,
}
"""By a tensor that only matrices of the scheme have. Those of awq and gptq have the same names."""
_PARTS = {
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
    "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
}  # fmt: skip
_ACTIVATIONS = {"input_scale", "input_zero_point", "activation_scale"}
"""Static scales of activations, which are not rounded to the scheme's type here."""


def quantised_tensors(folder: Path, quantised: Quantised) -> Iterator[tuple[str, Tensor | Rows]]:
    """(name, tensor or rows) for each tensor of `folder`, mapped into memory, one matrix at a time.

    Rows have the name that the matrix would have if it were not quantised. A matrix of mxfp4 has the shape
    (experts * outputs, inputs).
    """
    with contextlib.ExitStack() as stack:
        shard_of: dict[str, Any] = {}
        modules: dict[str, dict[str, str]] = {}
        for path in weight_files(folder):
            shard = stack.enter_context(open_shard(path))
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                shard_of[name] = shard
                stem, _, last = name.rpartition(".")
                if quantised.method == "mxfp4" and last.endswith(("_blocks", "_scales")):
                    stem, _, last = name.rpartition("_")
                modules.setdefault(stem, {})[last] = name

        def tensor(name: str) -> Tensor:
            found: Tensor = shard_of[name].get_tensor(name)
            return found

        for stem, names in modules.items():
            yield from _module(stem, names, tensor, quantised)


def _module(
    stem: str, names: dict[str, str], tensor: Callable[[str], Tensor], quantised: Quantised
) -> Iterator[tuple[str, Tensor | Rows]]:
    if "blocks" in names and "scales" in names:
        blocks, scales = tensor(names["blocks"]), tensor(names["scales"])
        yield stem, schemes.mxfp4(blocks.flatten(0, -3), scales.flatten(0, -2))
        return
    scheme = next((scheme for name, scheme in _SCHEMES.items() if name in names), None)
    if "qweight" in names:
        scheme = schemes.awq if quantised.method == "awq" else schemes.gptq
    if scheme is None:
        for name in names.values():
            yield name, tensor(name)
        return
    parts = {last: tensor(name) for last, name in names.items() if last in _PARTS}
    yield f"{stem}.weight", scheme(parts, quantised)
    for last, name in names.items():
        if last not in _PARTS | _ACTIVATIONS:
            yield name, tensor(name)
