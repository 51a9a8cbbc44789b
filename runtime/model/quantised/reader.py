"""The tensors of a quantised checkpoint folder. The tensors of each quantised matrix are joined to `Rows`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.errors import InvalidRequest
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.checkpoint import weight_files
from ramify.runtime.model.quantised import schemes
from ramify.runtime.model.quantised.schemes import Stored
from ramify.runtime.model.shape.quantised_config import Quantised
from ramify.runtime.model.weights import open_shard


@dataclasses.dataclass(frozen=True)
class _Scheme:
    rows: Callable[[Stored, Quantised], Rows]
    needs: tuple[str, ...]
    """The tensors that every matrix of the scheme has."""


_SCHEMES = {
    "weight_packed": _Scheme(schemes.packed, ("weight_packed", "weight_scale", "weight_shape")),
    "weight_scale": _Scheme(schemes.eight_bits, ("weight", "weight_scale")),
    "weight_scale_inv": _Scheme(schemes.eight_bits, ("weight", "weight_scale_inv")),
}
"""Name of a tensor that only this scheme has → the scheme. awq and gptq are not listed: their tensors have
the same names."""
_AWQ = _Scheme(schemes.awq, ("qweight", "qzeros", "scales"))
_GPTQ = _Scheme(schemes.gptq, ("qweight", "qzeros", "scales"))
_MXFP4 = _Scheme(lambda stored, _: schemes.mxfp4(stored["blocks"], stored["scales"]), ("blocks", "scales"))
_PARTS = {
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
    "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
}  # fmt: skip
_ACTIVATIONS = {"input_scale", "input_zero_point", "activation_scale"}
"""Static scales of activations. They are not used: when activations are rounded to float8, each token gets
its own scale."""


def quantised_tensors(folder: Path, quantised: Quantised) -> Iterator[tuple[str, Tensor | Rows]]:
    """(name, tensor or rows) for each tensor of `folder`, mapped into memory, one matrix at a time.

    Rows have the name that the matrix has in an unquantised checkpoint. A matrix of mxfp4 has the shape
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
            yield from matrix_tensors(stem, names, tensor, quantised)


def matrix_tensors(
    stem: str, names: dict[str, str], tensor: Callable[[str], Tensor], quantised: Quantised
) -> Iterator[tuple[str, Tensor | Rows]]:
    if quantised.method == "mxfp4" and "blocks" in names:
        parts = {last: tensor(name) for last, name in names.items()}
        yield stem, _rows(stem, _MXFP4, parts, quantised)
        return
    scheme = next((scheme for name, scheme in _SCHEMES.items() if name in names), None)
    if "qweight" in names:
        scheme = _AWQ if quantised.method == "awq" else _GPTQ
    if scheme is None:
        for name in names.values():
            yield name, tensor(name)
        return
    parts = {last: tensor(name) for last, name in names.items() if last in _PARTS}
    yield f"{stem}.weight", _rows(stem, scheme, parts, quantised)
    for last, name in names.items():
        if last not in _PARTS | _ACTIVATIONS:
            yield name, tensor(name)


def _rows(name: str, scheme: _Scheme, parts: Stored, quantised: Quantised) -> Rows:
    """The rows of the matrix `name`. Raises `InvalidRequest`, with the matrix's name, if its parts do not fit
    together."""
    missing = [part for part in scheme.needs if part not in parts]
    if missing:
        raise _bad(name, f"lacks {', '.join(missing)}")
    layout = quantised.for_matrix(name)
    try:
        rows = scheme.rows(parts, layout)
        values, factors = rows.numbers, rows.factors
        if factors is None or factors.shape != (len(values), -(-values.shape[1] // rows.group)):
            raise ValueError("factors and numbers do not fit")
    except InvalidRequest as error:
        raise _bad(name, error.message.removeprefix("This checkpoint ").rstrip(".")) from error
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # a shape or a type, as torch says it
        shapes = ", ".join(f"{part} {tuple(tensor.shape)} {tensor.dtype}" for part, tensor in parts.items())
        raise _bad(name, f"has tensors that do not fit each other: {shapes}") from error
    if not all(torch.isfinite(scales).all() for scales in (factors, rows.offsets) if scales is not None):
        raise _bad(name, "has scales that are not finite")
    return rows


def _bad(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"This checkpoint's matrix {name} {reason}.", field="model")
