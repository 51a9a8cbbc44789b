"""Rows of weight matrices as checkpoints have them, quantised or not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Format = Literal["bf16", "int8", "int4", "f32", "fp8"]
FORMATS: tuple[Format, ...] = ("bf16", "int8", "int4", "f32", "fp8")
BITS: dict[Format, int] = {"bf16": 16, "int8": 8, "int4": 4, "f32": 32, "fp8": 8}
"""Bits of a weight, without scales."""

INPUT_MULTIPLE = 32
"""Inputs are padded with zeros to a multiple of this, and of the group."""


@dataclasses.dataclass(frozen=True)
class NumbersAt:
    """The places of quantised numbers in a row of bytes. A row consists of blocks of `block` bytes. In each
    block, the numbers lie in `runs` runs of `size` bytes from byte `first` on, in the order of the inputs.

    bits : 8, or 4. With 4 a run has the low four bits of its bytes first, then their high four bits.
    size : a multiple of 8; with 8 bits a multiple of 16
    """

    bits: Literal[4, 8]
    block: int
    first: int
    size: int
    runs: int = 1


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """A format whose rows of bytes contain the numbers of `Rows` unchanged: the places of the numbers, and a
    function from rows of bytes to factors and offsets."""

    numbers: NumbersAt
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]


@dataclasses.dataclass(frozen=True)
class Stored:
    """Rows of a weight matrix in the bytes of a file.

    parts : tensors (outputs, bytes) uint8; the rows of all parts, one part after the other, make the matrix
    decode : a function from (outputs, bytes) uint8 to `Rows`. Two `Stored` with the same function can be
        joined.
    verbatim : the places of numbers that can be copied unchanged; None if they must be decoded
    """

    parts: tuple[Tensor, ...]
    decode: Callable[[Tensor], Rows]
    verbatim: Verbatim | None = None

    def __post_init__(self) -> None:
        width = self.parts[0].shape[1]
        if any(part.shape[1] != width or part.stride(1) != 1 or part.itemsize != 1 for part in self.parts):
            raise ValueError(f"rows of one width in bytes, contiguous each, are needed: {width}")

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        """The rows `index`, (chosen, bytes) uint8."""
        if isinstance(index, slice) and len(self.parts) == 1:
            return self.parts[0][index]
        from ramify.kernels.cpu.parts.packing import gather_rows

        if isinstance(index, slice):
            addresses = self._addresses[index].contiguous()
        else:
            addresses = self._addresses.index_select(0, index)  # refuses an index out of bounds
        found = self.parts[0].new_empty(len(addresses), self.parts[0].shape[1])
        gather_rows(addresses.numpy(), found.numpy())
        return found

    @functools.cached_property
    def _addresses(self) -> Tensor:
        """The address of each row, int64."""
        return torch.cat([part.data_ptr() + part.stride(0) * torch.arange(len(part)) for part in self.parts])


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a weight matrix, quantised or not, in row-major order.

    numbers : (outputs, inputs) float32, bfloat16, int8, float8_e4m3fn or, for int4, uint8 codes from 0 to 15
    factors : (outputs, groups) float16, bfloat16 or float32; None for float32 and bfloat16
    offsets : like factors, for int8 and int4; or None
    table : (16,) int8, the number of each code; None if each code is its own number
    group : inputs of a group, a multiple of 16; the last group may be partial. If 0 is given, groups are
        equal and their size follows from `factors`.
    order : (inputs,), for groups of inputs that do not lie side by side: column i of `numbers` is for input
        order[i]; None if column i is for input i
    float8_activations : whether the checkpoint asks for activations in float8; only with float8 numbers
    stored : the source of rows that are not decoded yet, else None. With `stored`, `numbers`, `factors` and
        `offsets` have shapes and dtypes but no memory: they are on the device "meta". `pack` decodes some
        rows at a time.
    """

    numbers: Tensor
    factors: Tensor | None = None
    offsets: Tensor | None = None
    table: Tensor | None = None
    group: int = 0
    order: Tensor | None = None
    float8_activations: bool = False
    stored: Stored | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __post_init__(self) -> None:
        if self.factors is None or self.group:
            return
        inputs, groups = self.numbers.shape[1], self.factors.shape[1]
        group = inputs // groups if groups > 1 else inputs + -inputs % INPUT_MULTIPLE
        object.__setattr__(self, "group", group)

    @classmethod
    def from_stored(cls, stored: Stored) -> Rows:
        """The rows of `stored`; they are decoded when they are needed."""
        return stored.decode(stored[:1])._storing(stored)

    def _storing(self, stored: Stored) -> Rows:
        """A copy of these rows that holds `stored`: numbers and scales have as many rows as `stored`, but no
        memory."""

        def empty(part: Tensor) -> Tensor:
            return part.new_empty(len(stored), part.shape[1], device="meta")

        scales = [None if part is None else empty(part) for part in (self.factors, self.offsets)]
        numbers = empty(self.numbers)
        return dataclasses.replace(self, numbers=numbers, factors=scales[0], offsets=scales[1], stored=stored)

    def decoded(self, index: Tensor | slice = slice(None)) -> Rows:
        """The rows `index`, in that order, decoded."""
        if self.stored is None:
            return self.index_select(index)
        rows = self.stored.decode(self.stored[index])
        return dataclasses.replace(rows, table=self.table, group=self.group, order=self.order)

    def with_offsets(self) -> Rows:
        """Rows of the same values with float32 factors and offsets, or these rows if that is impossible."""
        if self.factors is None or self.format not in ("int4", "int8"):
            return self
        if self.stored is not None:
            return self.decoded().with_offsets()
        factors, offsets, table = self.factors.float(), self.offsets, self.table
        if offsets is None:
            offsets, table = in_place_of(table, factors), None
        if offsets is None:
            return self
        return dataclasses.replace(self, factors=factors, offsets=offsets.float(), table=table)

    @property
    def format(self) -> Format:
        return _FORMAT_OF[self.numbers.dtype]

    def alike(self, other: Rows) -> bool:
        """Whether both can be packed into one matrix: same format, group, scale dtype, table and order of
        inputs, and both or neither with offsets."""

        def kind(rows: Rows) -> tuple[object, ...]:
            dtype = None if rows.factors is None else rows.factors.dtype
            fixed = [None if part is None else part.tolist() for part in (rows.table, rows.order)]
            return rows.format, rows.group, dtype, rows.offsets is None, rows.float8_activations, fixed

        return kind(self) == kind(other)

    def index_select(self, index: Tensor | slice) -> Rows:
        """The rows `index`, in that order. Rows that are not decoded stay undecoded."""
        if self.stored is not None:
            return self._storing(dataclasses.replace(self.stored, parts=(self.stored[index],)))

        def chosen(part: Tensor | None) -> Tensor | None:
            return None if part is None else _chosen(part, index)

        numbers, factors, offsets = _chosen(self.numbers, index), chosen(self.factors), chosen(self.offsets)
        return dataclasses.replace(self, numbers=numbers, factors=factors, offsets=offsets)

    def joined(self, other: Rows) -> Rows:
        """These rows, then those of `other`; the two must be `alike`."""
        if self.stored is not None and other.stored is not None and self.stored.decode == other.stored.decode:
            parts = self.stored.parts + other.stored.parts
            return self._storing(dataclasses.replace(self.stored, parts=parts))
        one, other = self.decoded(), other.decoded()

        def both(part: Tensor | None, more: Tensor | None) -> Tensor | None:
            return None if part is None or more is None else torch.cat([part, more])

        numbers = torch.cat([one.numbers, other.numbers])
        factors, offsets = both(one.factors, other.factors), both(one.offsets, other.offsets)
        return dataclasses.replace(one, numbers=numbers, factors=factors, offsets=offsets)

    def values(self) -> Tensor:
        """The dequantised weights, (outputs, inputs) float32."""
        if self.stored is not None:
            return self.decoded().values()
        if self.table is None:
            numbers = self.numbers.float()
        else:
            numbers = self.table.float()[self.numbers.int()]
        if self.factors is None:
            return numbers

        inputs = numbers.shape[1]
        wide = padded(numbers, 1, self.group).unflatten(1, (-1, self.group))
        wide = self.factors.float()[..., None] * wide
        if self.offsets is not None:
            wide += self.offsets.float()[..., None]
        wide = wide.flatten(1)[:, :inputs]
        return wide if self.order is None else wide[:, torch.argsort(self.order)]


_FORMAT_OF: dict[torch.dtype, Format] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int4",
    torch.float8_e4m3fn: "fp8",
}


def _chosen(part: Tensor, index: Tensor | slice) -> Tensor:
    # Faster than part[index], by a factor of 4 for rows of 1 KB.
    return part[index] if isinstance(index, slice) else part.index_select(0, index)


def in_place_of(table: Tensor | None, factors: Tensor) -> Tensor | None:
    """The offsets that replace `table`, so that each code is its own number. Zeros if there is no table; None
    if the steps of `table` are not all 1."""
    if table is None or not len(table):
        return torch.zeros_like(factors)
    lowest = lowest_of_steps(table)
    return None if lowest is None else factors * lowest


def lowest_of_steps(table: Tensor) -> int | None:
    """The number of code 0 in a table whose other numbers follow it in steps of 1; None for other tables."""
    steps = torch.equal(table.int(), torch.arange(16, dtype=torch.int32) + table[0])
    return int(table[0]) if steps else None


def quantised(weight: Tensor, form: Literal["int8", "int4"], group: int) -> Rows:
    """Round (outputs, inputs) floating-point weights to numbers and float16 scales.

    int8: symmetric, with a group's largest magnitude at 127. int4: fifteen steps from a group's smallest to
    its largest weight. Inputs that do not fill the last group are padded with zeros.
    """
    wide = padded(weight.float(), 1, group)
    groups = wide.view(wide.shape[0], -1, group)
    if form == "int8":
        factors = (groups.abs().amax(-1) / 127).half()
        numbers = _divided(groups, factors).clamp(-127, 127).to(torch.int8)
        return Rows(numbers.view(wide.shape), factors)
    low, high = groups.amin(-1), groups.amax(-1)
    offsets = low.half()
    factors = ((high - offsets.float()) / 15).half()
    numbers = _divided(groups - offsets.float()[..., None], factors).clamp(0, 15).to(torch.uint8)
    return Rows(numbers.view(wide.shape), factors, offsets)


def _divided(groups: Tensor, factors: Tensor) -> Tensor:
    """groups / factors, rounded to integers; 0 where the factor is 0."""
    wide = factors.float()[..., None]
    return torch.where(wide == 0, 0.0, groups / wide).round()


def padded(part: Tensor, dimension: int, multiple: int) -> Tensor:
    missing = -part.shape[dimension] % multiple
    if not missing:
        return part
    shape = list(part.shape)
    shape[dimension] = missing
    return torch.cat([part, part.new_zeros(shape)], dimension)
