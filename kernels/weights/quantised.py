"""Quantised weight matrices as GPU kernels read them: int4, int8 and float8, in blocks of inputs.

A block holds `block` inputs of every output, so a tile of a block lies in one piece of memory:

int4   byte j of an output: the code of input j in its lower four bits, that of input j + block / 2 above
int8   byte j of an output: the number of input j, plus 128
fp8    byte j of an output: the float8_e4m3fn of input j

The weight of a byte or four bits is factor * (code + shift) (+ offset), or factor * float8. A group of inputs
shares a factor and an offset. A block of int8 or fp8 lies within one group, and so does each half of a block
of int4. Factors and offsets are ordered by group, then by output, so that a tile's lie side by side.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ramify.kernels.weights.rows import Rows

STEP = {"int4": 32, "int8": 64, "fp8": 128}
"""The most bytes of an output in a block. With 64 for int4, a tile of 64 rows spills registers on sm_80."""


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A matrix W, (outputs, inputs).

    numbers : (blocks, outputs, bytes) uint8
    factors : (groups, outputs) float16, bfloat16 or float32
    offsets : like factors; None for a matrix without offsets
    group : inputs of a group, a multiple of `bytes`
    shift : added to a code of int4 or int8
    order : (inputs,) int32, the input of each column; None if column i is input i
    float8_activations : whether the checkpoint asks for activations in float8; only with float8 numbers
    """

    form: Literal["int4", "int8", "fp8"]
    inputs: int
    group: int
    numbers: Tensor
    factors: Tensor
    offsets: Tensor | None = None
    shift: int = 0
    order: Tensor | None = None
    float8_activations: bool = False

    @property
    def outputs(self) -> int:
        return self.numbers.shape[1]

    @property
    def block(self) -> int:
        return self.numbers.shape[2] * (2 if self.form == "int4" else 1)

    @property
    def padded(self) -> int:
        """Inputs, with the padding of the last block."""
        return self.numbers.shape[0] * self.block

    @property
    def activation_group(self) -> int:
        """Inputs of a row of x that share a factor when x is rounded to float8; 0 if all share one."""
        return 0 if self.group == self.padded else self.block

    @property
    def nbytes(self) -> int:
        parts = self.numbers, self.factors, self.offsets, self.order
        return sum(part.nbytes for part in parts if part is not None)

    def values(self) -> Tensor:
        """The dequantised weights, (outputs, inputs) float32."""
        numbers = self.numbers
        if self.form == "fp8":
            wide = numbers.view(torch.float8_e4m3fn).float()
        else:
            codes = torch.cat([numbers & 15, numbers >> 4], -1) if self.form == "int4" else numbers
            wide = codes.float() + self.shift
        wide = wide.transpose(0, 1).flatten(1)

        def of_inputs(scales: Tensor) -> Tensor:
            return scales.t().float().repeat_interleave(self.group, 1)[:, : wide.shape[1]]

        wide = of_inputs(self.factors) * wide
        if self.offsets is not None:
            wide += of_inputs(self.offsets)
        wide = wide[:, : self.inputs]
        return wide if self.order is None else wide[:, torch.argsort(self.order)]


class Rounded(NamedTuple):
    """Activations rounded to float8 for products with one `QuantisedWeight`.

    numbers : (T, weight.padded) float8_e4m3fn, 0 in the padding
    factors : (groups, T) float32, max |x| / 448 over the inputs of a group
        A group is `weight.activation_group` inputs, or all inputs if `activation_group` is 0.
    dtype : of the activations, and of products with them
    """

    numbers: Tensor
    factors: Tensor
    dtype: torch.dtype


def lay_out(rows: Rows, *, inputs: int, device: torch.device | str) -> QuantisedWeight | None:
    """Lay `rows` out on `device`. Returns None if they are not quantised. `inputs`: columns before padding.

    Codes with a table become the table's int8 numbers, unless the table only adds one number to all codes.
    """
    if rows.factors is None:
        return None
    rows = rows.decoded()
    assert rows.factors is not None
    form, numbers, shift = rows.format, rows.numbers.to(device), 0
    if rows.table is not None:
        shift = int(rows.table[0])
        if not torch.equal(rows.table.int(), torch.arange(shift, shift + 16, dtype=torch.int32)):
            form, numbers = "int8", rows.table.to(device)[numbers.int()]
    if form == "int8":
        numbers, shift = numbers.view(torch.uint8) ^ 128, -128
    assert form in ("int4", "int8", "fp8")
    whole = rows.factors.shape[1] == 1
    step = math.gcd(0 if whole and form == "fp8" else rows.group, STEP[form])
    block = 2 * step if form == "int4" else step
    numbers = numbers.view(torch.uint8)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % block))
    numbers = numbers.unflatten(1, (-1, block)).transpose(0, 1)
    if form == "int4":
        numbers = numbers[..., :step] | numbers[..., step:] << 4
    padded = numbers.shape[0] * block
    group = padded if whole else rows.group

    def of_groups(scales: Tensor | None) -> Tensor | None:
        if scales is None:
            return None
        missing = -(-padded // group) - scales.shape[1]
        return torch.nn.functional.pad(scales.to(device), (0, missing)).t().contiguous()

    factors, offsets = of_groups(rows.factors), of_groups(rows.offsets)
    assert factors is not None
    order, numbers = None if rows.order is None else rows.order.int().to(device), numbers.contiguous()
    return QuantisedWeight(
        form, inputs, group, numbers, factors, offsets, shift, order, rows.float8_activations
    )


def multiplies_float8(weight: QuantisedWeight) -> bool:
    """Whether `weight` is to be multiplied by `float8_matmul`: its checkpoint asks for float8 activations,
    and its blocks are multiples of 32 inputs, as float8 instructions need."""
    return weight.float8_activations and weight.form == "fp8" and weight.block % 32 == 0
