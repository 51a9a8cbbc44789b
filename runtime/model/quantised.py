"""The tensors of a quantised checkpoint folder, with each quantised matrix as `Rows`.

Each scheme has a function. The values of its rows follow the formula of the scheme's own library, computed in
float32. The library computes in the dtype of the scales; rounded to that dtype, the values here equal the
library's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.errors import InvalidRequest
from ramify.kernels.weights.packed import SCALE_DTYPES
from ramify.kernels.weights.rows import Rows
from ramify.runtime.model.checkpoint import open_shard, weight_files
from ramify.runtime.model.shape.quantised_config import Quantised

Stored = Mapping[str, Tensor]
"""The tensors of one matrix, by the last part of their names."""

E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""The values of the 4-bit codes of E2M1 (two bits of exponent, one of mantissa; OCP Microscaling Formats
1.0), doubled."""
SIGNED = torch.arange(-8, 8, dtype=torch.int8)
"""The values of 4-bit codes whose zero point is 8."""
SPREAD = 128
"""Group size for matrices with one scale a row; the scale is repeated for each group. Activations are rounded
to int8 in the groups of the weights: in a group of all inputs, one large activation would round others to
0."""
WORDS_AT_ONCE = 1 << 15
"""int32 words that are unpacked at a time."""


def mxfp4(blocks: Tensor, scales: Tensor) -> Rows:
    """A matrix of gpt-oss (`quant_method: mxfp4`).

    blocks : (outputs, groups, 16) or (experts, outputs, groups, 16) uint8: two codes a byte, the lower four
        bits first; 32 inputs a group
    scales : (outputs, groups) or (experts, outputs, groups) uint8: exponents of two, plus 127
    """
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise _Unfit(f"has blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)}")
    blocks, scales = blocks.flatten(0, -3), scales.flatten(0, -2)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
    # 2**(scale - 128), halved for the table, by its bits. bfloat16 has the exponents of float32.
    wide = scales.short()
    bits = torch.where(wide > 1, wide - 1 << 7, 32 << wide)
    return Rows(codes, bits.view(torch.bfloat16), table=E2M1)


def eight_bits(stored: Stored, quantised: Quantised) -> Rows:
    """float8_e4m3fn or int8 with a scale for the tensor, or scales for each output, group or block.

    Written by `quant_method: fp8`, and by compressed-tensors in the formats float-quantized, int-quantized
    and naive-quantized.

    weight : (outputs, inputs)
    weight_scale or weight_scale_inv : (), (1,), (outputs, 1), (outputs, groups) or (blocks, blocks)
        Both names are used for scales.
    weight_zero_point : int8, in the shape of the scales; optional
    """
    weight = stored["weight"]
    if weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise _Unfit(f"holds a quantised matrix as {weight.dtype}; float8_e4m3fn or int8 is needed")
    scale = stored.get("weight_scale_inv", stored.get("weight_scale"))
    assert scale is not None
    if weight.dtype == torch.float8_e4m3fn and (weight.view(torch.int8) & 127 == 127).any():
        raise _Unfit("holds a float8 matrix with a number that is none (NaN)")
    factors, group = _by_output(scale, weight, quantised)
    zeros = stored.get("weight_zero_point")
    if zeros is None or not zeros.any():
        float8 = weight.dtype == torch.float8_e4m3fn and quantised.float8_activations
        return _spread(Rows(weight, factors, group=group, float8_activations=float8))
    if weight.dtype != torch.int8:
        raise _Unfit("has zero points for a float8 matrix")
    return _spread(_shifted(weight, factors, _by_output(zeros.float(), weight, quantised)[0], group))


def packed(stored: Stored, quantised: Quantised) -> Rows:
    """The format pack-quantized of compressed-tensors: integers of 4 or 8 bits, stored plus half their range.

    weight_packed : (outputs, ceil(inputs * bits / 32)) int32, the lowest bits first
    weight_scale : (outputs, 1) or (outputs, groups)
    weight_shape : (2,), outputs and inputs
    weight_zero_point : (outputs * bits / 32, groups) int32, packed over the outputs, the lowest bits
        first; or int8, in the shape of the scale; optional
    weight_g_idx : (inputs,) int32, the group of each input; optional
    """
    words, scale = stored["weight_packed"], stored["weight_scale"]
    outputs, inputs = (int(size) for size in stored["weight_shape"])
    bits = _bits_of(words.shape[1], inputs)
    codes = _unpacked(words, bits)[:, :inputs]
    if codes.shape != (outputs, inputs):
        raise _Unfit(f"has the shape {outputs, inputs} and packed rows {tuple(words.shape)}")
    zeros = stored.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _unpacked(zeros.t().contiguous(), bits)[:, :outputs].t().short() - (1 << bits - 1)
    order = _input_order(stored.get("weight_g_idx"), inputs, scale.shape[1], quantised)
    factors, group = _by_output(scale, codes, quantised)
    return _integers(codes, bits, factors, zeros, group, order)


def gptq(stored: Stored, quantised: Quantised) -> Rows:
    """GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel write it, with 4 or 8 bits.

    qweight : (inputs * bits / 32, outputs) int32, eight or four inputs an int32, the lowest bits first
    qzeros : (groups, outputs * bits / 32) int32: zero points, less 1 in the first version of the format
    scales : (groups, outputs)
    g_idx : (inputs,) int32, the group of each input; optional
    """
    scales, words = stored["scales"], stored["qweight"]
    bits = _bits_of(stored["qzeros"].shape[1], scales.shape[1])
    codes = _unpacked(words.t().contiguous(), bits)
    # The first version wraps round: a zero point of 0 is stored as -1.
    zeros = _unpacked(stored["qzeros"], bits).short() + quantised.zero_shift & (1 << bits) - 1
    zeros = (zeros - (1 << bits - 1)).t()
    order = _input_order(stored.get("g_idx"), codes.shape[1], len(scales), quantised)
    factors, group = _by_output(scales.t(), codes, quantised)
    return _integers(codes, bits, factors, zeros, group, order)


def awq(stored: Stored, quantised: Quantised) -> Rows:
    """AWQ (arXiv 2306.00978), version gemm, with 4 bits.

    qweight : (inputs, outputs / 8) int32, eight outputs an int32: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits
    qzeros : (groups, outputs / 8) int32, packed like qweight
    scales : (groups, outputs)
    """
    codes, zeros = (_unpacked(stored[name], 4, halves=True).t() for name in ("qweight", "qzeros"))
    codes, zeros = codes.contiguous(), zeros.short() - 8
    factors, group = _by_output(stored["scales"].t(), codes, quantised)
    return _integers(codes, 4, factors, zeros, group, None)


def _unpacked(words: Tensor, bits: int, *, halves: bool = False) -> Tensor:
    """The codes packed in `words`: (rows, words) int32 as (rows, codes) uint8, the lowest bits first.

    With `halves` the codes 0, 2, 4 and 6 are in the lower half of an int32, and 1, 3, 5 and 7 in the upper
    half. 4-bit codes are spread over the bytes of int64 by shifts, on as many rows at a time as fit the
    processor's cache.
    """
    if words.dtype != torch.int32:
        raise _Unfit(f"packs numbers in {words.dtype}; int32 is needed")
    words = words.contiguous()
    if bits == 8:
        return words.view(torch.uint8)
    out = torch.empty(len(words), 8 * words.shape[1], dtype=torch.uint8)
    eights, step = out.view(torch.int64), max(1, WORDS_AT_ONCE // words.shape[1])
    for start in range(0, len(words), step):
        wide = words[start : start + step].long()
        if halves:
            parts = [wide & 0xFFFF, wide >> 16 & 0xFFFF]
            for part in parts:
                part |= part << 24
                part &= 0xFF000000FF
                part |= part << 12
                part &= 0xF000F000F000F
            wide = parts[0].bitwise_or_(parts[1].bitwise_left_shift_(8))
        else:
            wide &= 0xFFFFFFFF
            wide |= wide << 16
            wide &= 0xFFFF0000FFFF
            wide |= wide << 8
            wide &= 0xFF00FF00FF00FF
            wide |= wide << 4
            wide &= 0xF0F0F0F0F0F0F0F
        eights[start : start + step] = wide
    return out


def _bits_of(words: int, numbers: int) -> int:
    """The bits of each number, if `words` int32 hold `numbers` numbers."""
    for bits in (4, 8):
        if words == -(-numbers * bits // 32):
            return bits
    raise _Unfit(f"packs {numbers} numbers in {words} int32; 4 or 8 bits a number are needed")


def _integers(
    codes: Tensor, bits: int, factors: Tensor, zeros: Tensor | None, group: int, order: Tensor | None
) -> Rows:
    """Rows with the values scale * (code - half - zero), where half is 2**(bits - 1). `codes` are in the
    inputs' own order."""
    if zeros is not None and zeros.shape != factors.shape:
        raise _Unfit(f"has zero points {tuple(zeros.shape)} for scales {tuple(factors.shape)}")
    if order is not None:
        codes = codes[:, order]
    numbers = codes if bits == 4 else (codes.short() - 128).to(torch.int8)
    if zeros is None or not zeros.any():
        table = SIGNED if bits == 4 else None
        return _spread(Rows(numbers, factors, table=table, group=group, order=order))
    rows = _shifted(numbers, factors, zeros.float() + (8 if bits == 4 else 0), group)
    return _spread(dataclasses.replace(rows, order=order))


def _shifted(numbers: Tensor, factors: Tensor, zeros: Tensor, group: int) -> Rows:
    """Rows with the values scale * (number - zero). Offsets are float32, as scale * zero has more bits."""
    factors = factors.float()
    return Rows(numbers, factors, -(factors * zeros), group=group)


def _spread(rows: Rows) -> Rows:
    """`rows` in groups of `SPREAD`, if they are integers with one scale a row; else `rows` unchanged."""
    assert rows.factors is not None
    if rows.factors.shape[1] > 1 or rows.numbers.dtype == torch.float8_e4m3fn or rows.group <= SPREAD:
        return rows
    groups = -(-rows.numbers.shape[1] // SPREAD)

    def repeated(scales: Tensor | None) -> Tensor | None:
        return None if scales is None else scales.expand(-1, groups).contiguous()

    return dataclasses.replace(
        rows, factors=repeated(rows.factors), offsets=repeated(rows.offsets), group=SPREAD
    )


def _by_output(scale: Tensor, numbers: Tensor, quantised: Quantised) -> tuple[Tensor, int]:
    """Scales per tensor, output, group or block, expanded to (outputs, groups), and the group size (0: all
    inputs)."""
    outputs, inputs = numbers.shape
    if scale.dtype not in SCALE_DTYPES:
        scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1).contiguous(), 0
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.shape == (outputs, 1):
        return scale.contiguous(), 0
    for height, width in quantised.blocks:
        if scale.shape == (-(-outputs // height), -(-inputs // width)):
            return scale.repeat_interleave(height, 0)[:outputs].contiguous(), width
    for group in quantised.groups:
        if scale.shape == (outputs, -(-inputs // group)):
            return scale.contiguous(), group
    raise _Unfit(f"has scales {tuple(scale.shape)} for a matrix {outputs, inputs}")


def _input_order(group_of: Tensor | None, inputs: int, groups: int, quantised: Quantised) -> Tensor | None:
    """The permutation that sorts the inputs by group (`desc_act`); None if they are sorted already."""
    if group_of is None:
        return None
    if group_of.shape != (inputs,):
        raise _Unfit(f"has a g_idx {tuple(group_of.shape)} for {inputs} inputs")
    if groups == 1 or (group_of < 0).any():
        return None
    order = torch.argsort(group_of, stable=True)
    places = torch.arange(inputs)
    for group in quantised.groups:
        if torch.equal(group_of[order], (places // group).to(group_of.dtype)):
            return None if torch.equal(order, places) else order.int()
    raise _Unfit(f"has a g_idx whose {groups} groups are not of {quantised.groups} inputs each")


class _Unfit(Exception):
    """The reason why the tensors of a matrix cannot be read."""


_SCHEMES: dict[str, Callable[[Stored, Quantised], Rows]] = {
    "weight_packed": packed,
    "weight_scale": eight_bits,
    "weight_scale_inv": eight_bits,
}
"""Name of a tensor that only this scheme has → the scheme. awq and gptq are not listed: their tensors have
the same names."""
_PARTS = {
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape",
    "weight_g_idx", "qweight", "qzeros", "scales", "g_idx",
}  # fmt: skip
_ACTIVATIONS = {"input_scale", "input_zero_point", "activation_scale"}
"""Static scales of activations. They are not used: when activations are rounded to float8, each token gets
its own scale."""


def quantised_tensors(
    folder: Path, quantised: Quantised, needed: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor | Rows]]:
    """(name, tensor or rows) for each `needed` tensor of `folder`, mapped into memory, one matrix at a time.

    Rows have the name that the matrix has in an unquantised checkpoint. A matrix of mxfp4 has the shape
    (experts * outputs, inputs).
    """
    with contextlib.ExitStack() as stack:
        shard_of: dict[str, Any] = {}
        modules: dict[str, dict[str, str]] = {}
        for path in weight_files(folder):
            shard = stack.enter_context(open_shard(path))
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if not needed(name):
                    continue
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
    """The matrix `stem` as `Rows`, if it is quantised, and the module's other tensors, such as the bias.

    names : last part of a tensor's name → its name
    """
    if quantised.method == "mxfp4" and "blocks" in names:
        parts = {last: tensor(name) for last, name in names.items()}
        yield stem, _rows(stem, lambda stored, _: mxfp4(stored["blocks"], stored["scales"]), parts, quantised)
        return
    scheme = next((scheme for name, scheme in _SCHEMES.items() if name in names), None)
    if "qweight" in names:
        scheme = awq if quantised.method == "awq" else gptq
    if scheme is None:
        for name in names.values():
            yield name, tensor(name)
        return
    parts = {last: tensor(name) for last, name in names.items() if last in _PARTS}
    yield f"{stem}.weight", _rows(stem, scheme, parts, quantised)
    for last, name in names.items():
        if last not in _PARTS | _ACTIVATIONS:
            yield name, tensor(name)


def _rows(
    name: str, scheme: Callable[[Stored, Quantised], Rows], parts: Stored, quantised: Quantised
) -> Rows:
    """The rows of the matrix `name`. Raises `InvalidRequest`, with this name, if its parts do not fit."""
    layout = quantised.for_matrix(name)
    try:
        rows = scheme(parts, layout)
        values, factors = rows.numbers, rows.factors
        if factors is None or factors.shape != (len(values), -(-values.shape[1] // rows.group)):
            raise ValueError("factors and numbers do not fit")
    except _Unfit as error:
        raise _bad(name, str(error)) from error
    except KeyError as error:
        raise _bad(name, f"lacks {error.args[0]}") from error
    except (RuntimeError, ValueError, IndexError, TypeError) as error:  # a shape or a type, as torch says it
        shapes = ", ".join(f"{part} {tuple(tensor.shape)} {tensor.dtype}" for part, tensor in parts.items())
        raise _bad(name, f"has tensors that do not fit each other: {shapes}") from error
    if not all(torch.isfinite(scales).all() for scales in (factors, rows.offsets) if scales is not None):
        raise _bad(name, "has scales that are not finite")
    return rows


def _bad(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"This checkpoint's matrix {name} {reason}.", field="model")
