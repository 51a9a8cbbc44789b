"""Weight matrices laid out for the compiled linear kernels: bfloat16, float32, int8, 4-bit codes, float8.

A panel is sixteen outputs. Its weights lie in the order of the inputs, and for each input those of the
sixteen outputs side by side, so that a kernel streams through the panel once:

bf16   for each pair of inputs: 16 outputs x 2 inputs, bfloat16
f32    for each input: 16 outputs, float32
int8   for each input: 16 outputs, int8
fp8    for each input: 16 outputs, float8_e4m3fn (arXiv 2209.05433)
int4   for each eight inputs: 16 int32, one for each output. Bits 4p to 4p + 3 are the code (0 to 15) of
       input 2p if p < 4, else of input 2p - 7. So the lower and the upper half of an int32 hold the two
       inputs of a pair at the same place.

int8, fp8 and int4 have scales, float16, bfloat16 or float32, for each panel and each group of inputs: 16
factors, and with offsets then 16 offsets (not fp8). A weight is factor * number (+ offset). The number of an
int4 code is the code, or an int8 from a table of 16: MXFP4 is a table of 0, 1, 2, 3, 4, 6, 8, 12 and their
negatives, with powers of two as factors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.routing import ClampedGate

Format = Literal["bf16", "int8", "int4", "f32", "fp8"]
FORMATS: tuple[Format, ...] = ("bf16", "int8", "int4", "f32", "fp8")
BITS: dict[Format, int] = {"bf16": 16, "int8": 8, "int4": 4, "f32": 32, "fp8": 8}
"""Bits of a weight, without scales."""

LAYOUT_VERSION = 5
"""Part of the cache key of packed weights on disk: raise it when the layout changes."""
WIDTH = 16
"""Outputs of a panel."""
INPUT_MULTIPLE = 32
"""Inputs are padded with zeros to a multiple of this, and of the group."""
PANEL_MULTIPLE = 4
"""Panels are padded with zeros to a multiple of this: kernels take up to four at once."""


LAYOUT = np.dtype([(name, np.int64) for name in (
    "panels_at", "panel_bytes", "scales_at", "scale_bytes", "bias_at",
    "form", "panels", "inputs", "padded", "group", "scale_kind", "offsets", "gated", "results",
    "looked_up", "tables_at", "order_at",
)] + [("alpha", np.float64), ("limit", np.float64)])  # fmt: skip
"""The arguments of compiled kernels for a packed weight: addresses, sizes in bytes, counts."""

CODES_AT_ONCE = 1 << 18
"""Codes that are laid out at a time, so that they stay in the processor's cache between steps."""
SCALE_DTYPES = (torch.float16, torch.float32, torch.bfloat16)
"""By `scale_kind` of a layout."""

TABLE_BF16_AT, TABLE_BYTES_AT = 64, 128


def tables(table: Tensor) -> NDArray[np.uint8]:
    """A table of 16 int8 as kernels read it: once as float32, twice as bfloat16, and four times as unsigned
    bytes raised by 128."""
    parts = [table.float(), table.bfloat16().repeat(2), (table.short() + 128).to(torch.uint8).repeat(4)]
    return np.concatenate([part.contiguous().view(torch.uint8).numpy() for part in parts])


_CODES = tables(torch.arange(16, dtype=torch.int8))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a weight matrix, quantised or not, in row-major order.

    numbers : (outputs, inputs) float32, bfloat16, int8, float8_e4m3fn or, for int4, uint8 codes from 0 to 15
    factors : (outputs, groups) float16, bfloat16 or float32; None for float32 and bfloat16
    offsets : like factors, for int8 and int4; or None
    table : (16,) int8, the numbers of the codes; None for the codes themselves
    group : inputs of a group, a multiple of 16; the last group may be partial. 0: all inputs in equal groups,
        or in one
    order : (inputs,), for groups of inputs that do not lie side by side: column i of `numbers` is for input
        order[i]. None for the inputs' own order.
    float8_activations : float8 numbers that were made to be multiplied by activations rounded to float8
    """

    numbers: Tensor
    factors: Tensor | None = None
    offsets: Tensor | None = None
    table: Tensor | None = None
    group: int = 0
    order: Tensor | None = None
    float8_activations: bool = False

    def __post_init__(self) -> None:
        if self.factors is None or self.group:
            return
        inputs, groups = self.numbers.shape[1], self.factors.shape[1]
        group = inputs // groups if groups > 1 else inputs + -inputs % INPUT_MULTIPLE
        object.__setattr__(self, "group", group)

    def with_offsets(self) -> Rows:
        """The same values by float32 factors and offsets, if they can be had so; else these rows."""
        if self.factors is None or self.format not in ("int4", "int8"):
            return self
        factors, offsets, table = self.factors.float(), self.offsets, self.table
        if offsets is None:
            offsets, table = _in_place_of(table, factors), None
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
        """The rows `index`, in that order."""

        def chosen(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[index]

        numbers, factors, offsets = self.numbers[index], chosen(self.factors), chosen(self.offsets)
        return dataclasses.replace(self, numbers=numbers, factors=factors, offsets=offsets)

    def joined(self, other: Rows) -> Rows:
        """These rows, then those of `other`; the two must be `alike`."""

        def both(part: Tensor | None, more: Tensor | None) -> Tensor | None:
            return None if part is None or more is None else torch.cat([part, more])

        numbers = torch.cat([self.numbers, other.numbers])
        factors, offsets = both(self.factors, other.factors), both(self.offsets, other.offsets)
        return dataclasses.replace(self, numbers=numbers, factors=factors, offsets=offsets)

    def values(self) -> Tensor:
        """The dequantised weights, (outputs, inputs) float32."""
        if self.table is None:
            numbers = self.numbers.float()
        else:
            numbers = self.table.float()[self.numbers.int()]
        if self.factors is None:
            return numbers

        def of_inputs(scales: Tensor) -> Tensor:
            return scales.float().repeat_interleave(self.group, 1)[:, : numbers.shape[1]]

        wide = of_inputs(self.factors) * numbers
        if self.offsets is not None:
            wide += of_inputs(self.offsets)
        return wide if self.order is None else wide[:, torch.argsort(self.order)]


_FORMAT_OF: dict[torch.dtype, Format] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int4",
    torch.float8_e4m3fn: "fp8",
}


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A packed matrix W of `linear`, (outputs, inputs).

    panels : (panels, bytes) uint8
        The weights.
    scales : (panels, groups, 16 or 32) float16, bfloat16 or float32
        32: with offsets. Empty for bf16 and f32.
    bias : (panels * 16,) float32
        In the order of the panels; empty for none.
    gated : bool
        W is two matrices of one shape, gate and up projection, whose panels alternate.
    table : (16,) int8
        The numbers of int4 codes; empty for the codes themselves.
    clamp : the gate, if it is not SwiGLU
    order : (inputs,) int32
        The input of each column of the panels; empty for 0, 1, 2, …
    """

    format: Format
    outputs: int
    inputs: int
    group: int
    gated: bool
    panels: Tensor
    scales: Tensor
    bias: Tensor
    table: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int8))
    clamp: ClampedGate | None = None
    order: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.int32))

    @property
    def padded_inputs(self) -> int:
        return self.panels.shape[1] * 8 // (WIDTH * BITS[self.format])

    @property
    def has_offsets(self) -> bool:
        return self.scales.shape[-1] == 2 * WIDTH

    @functools.cached_property
    def results(self) -> int:
        """Numbers that `linear` gives for each row of x."""
        return self.outputs // 2 if self.gated else self.outputs

    @functools.cached_property
    def layout(self) -> tuple[int, Any]:
        """The address of a record of `LAYOUT`, and what it points to. Cached, as every call needs it."""
        record = np.zeros(1, LAYOUT)
        looked_up = len(self.table) > 0
        codes = tables(self.table) if looked_up else _CODES
        alpha, limit = (0.0, 0.0) if self.clamp is None else (self.clamp.alpha, self.clamp.limit)
        record[0] = (
            self.panels.data_ptr(), self.panels.shape[1],
            self.scales.data_ptr(), self.scales[0].nbytes if self.group else 0,
            self.bias.data_ptr() if len(self.bias) else 0,
            FORMATS.index(self.format), len(self.panels), self.inputs, self.padded_inputs, self.group,
            SCALE_DTYPES.index(self.scales.dtype), self.has_offsets,
            self.gated + (self.clamp is not None), self.results, looked_up, codes.ctypes.data,
            self.order.data_ptr() if len(self.order) else 0, alpha, limit,
        )  # fmt: skip
        return record.ctypes.data, (record, codes)


def _in_place_of(table: Tensor | None, factors: Tensor) -> Tensor | None:
    """The offsets by which codes have the numbers of `table`; None if its steps are not all 1."""
    if table is None or not len(table):
        return torch.zeros_like(factors)
    steps = torch.equal(table.int(), torch.arange(16, dtype=torch.int32) + table[0])
    return factors * table[0] if steps else None


def with_offsets(weight: PackedWeight) -> PackedWeight:
    """As `Rows.with_offsets`."""
    if weight.format not in ("int4", "int8"):
        return weight
    scales, table = weight.scales.float(), weight.table
    if not weight.has_offsets:
        offsets = _in_place_of(table, scales)
        if offsets is None:
            return weight
        scales, table = torch.cat([scales, offsets], -1), table[:0]
    return dataclasses.replace(weight, scales=scales, table=table)


def form_of(weight: PackedWeight) -> tuple[object, ...]:
    """What one call of the compiled kernels needs to be equal in all of its matrices of experts."""
    shapes = (weight.panels.shape, weight.scales.shape[-3:], weight.scales.dtype, len(weight.order))
    fixed = (weight.outputs, weight.inputs, weight.group, weight.gated, weight.clamp)
    return (weight.format, *fixed, *shapes, weight.table.tolist())


def quantised(weight: Tensor, form: Literal["int8", "int4"], group: int) -> Rows:
    """Round (outputs, inputs) floating-point weights to numbers and float16 scales.

    int8: symmetric, with a group's largest magnitude at 127. int4: fifteen steps from a group's smallest to
    its largest weight. Inputs that do not fill the last group are padded with zeros.
    """
    wide = _padded(weight.float(), 1, group)
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


def pack(
    rows: Rows,
    *,
    inputs: int,
    bias: Tensor | None = None,
    gated: bool = False,
    clamp: ClampedGate | None = None,
) -> PackedWeight:
    """Lay `rows` out in panels. `inputs` is the number of columns before padding.

    With `gated` the first half of the rows is the gate, the second half the up projection.
    """
    outputs = rows.numbers.shape[0]
    multiple = math.lcm(INPUT_MULTIPLE, rows.group or 1)

    panelled = functools.partial(_panelled, halves=2 if gated else 1)
    numbers = _padded(panelled(rows.numbers), 2, multiple)
    scales = torch.empty(0, dtype=torch.float16)
    if rows.factors is not None:
        parts = [rows.factors] if rows.offsets is None else [rows.factors, rows.offsets]
        padded = [_padded(panelled(part), 2, numbers.shape[2] // rows.group) for part in parts]
        scales = torch.cat([part.transpose(1, 2) for part in padded], 2).contiguous()
    laid_bias = torch.empty(0)
    if bias is not None:
        laid_bias = panelled(bias.float()).flatten().contiguous()
    panels = _laid_out(numbers, rows.format)
    table = torch.empty(0, dtype=torch.int8) if rows.table is None else rows.table
    order = torch.empty(0, dtype=torch.int32) if rows.order is None else rows.order.int().contiguous()
    return PackedWeight(
        rows.format, outputs, inputs, rows.group, gated, panels, scales, laid_bias, table, clamp, order
    )


class Stack:
    """`count` matrices of one shape and form, laid out one after the other as they come; see `unstacked`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.there: set[int] = set()
        self._one: PackedWeight | None = None
        self._panels, self._scales = torch.empty(0), torch.empty(0)

    def put(self, index: int, weight: PackedWeight) -> bool:
        """Returns False, and does nothing, for a matrix that cannot have the form of those that are there.

        Offsets, or another dtype of scales, change the form of those that are there.
        """
        if self._one is None:
            self._one = weight
            panels, scales = weight.panels, weight.scales
            self._panels = panels.new_empty(self.count, *panels.shape)
            self._scales = scales.new_empty(self.count, *scales.shape)
        elif form_of(self._one) != form_of(weight):
            wide = with_offsets(dataclasses.replace(self._one, scales=self._scales))
            one, weight = dataclasses.replace(wide, scales=wide.scales[0]), with_offsets(weight)
            if form_of(one) != form_of(weight):
                return False
            self._one, self._scales = one, wide.scales
        self._panels[index], self._scales[index] = weight.panels, weight.scales
        self.there.add(index)
        return True

    def unpack_into(self, values: Tensor) -> None:
        """Write the values of the matrices that are there to `values`, (count, outputs, inputs), and forget
        them."""
        for index in self.there:
            assert self._one is not None
            panels, scales = self._panels[index], self._scales[index]
            values[index] = unpack(dataclasses.replace(self._one, panels=panels, scales=scales))
        self.there, self._one = set(), None
        self._panels, self._scales = torch.empty(0), torch.empty(0)

    def whole(self, bias: Tensor | None = None) -> PackedWeight:
        """All matrices, when each is there; `bias` is (count, outputs)."""
        assert self._one is not None
        laid = torch.empty(0)
        if bias is not None:
            laid = torch.cat([_panelled(row.float(), 2 if self._one.gated else 1).flatten() for row in bias])
        panels, scales = self._panels.flatten(0, 1), self._scales
        return dataclasses.replace(
            self._one, panels=panels, scales=scales.flatten(0, 1) if scales.numel() else scales[0], bias=laid
        )


def unstacked(weight: PackedWeight, count: int) -> list[PackedWeight]:
    """The matrices of a `Stack`, which share its memory."""
    parts = [getattr(weight, name) for name in ("panels", "scales", "bias")]
    split = [part.chunk(count) if len(part) else [part] * count for part in parts]
    return [
        dataclasses.replace(weight, panels=panels, scales=scales, bias=bias)
        for panels, scales, bias in zip(*split, strict=True)
    ]


def unpack(weight: PackedWeight) -> Tensor:
    """The dequantised weights, (outputs, inputs) float32."""
    panels, inputs = weight.panels.shape[0], weight.padded_inputs
    if weight.format == "bf16":
        pairs = weight.panels.view(torch.bfloat16).view(panels, inputs // 2, WIDTH, 2)
        wide = pairs.transpose(1, 2).reshape(panels, WIDTH, inputs).float()
    elif weight.format == "f32":
        wide = weight.panels.view(torch.float32).view(panels, inputs, WIDTH).transpose(1, 2)
    elif weight.format in ("int8", "fp8"):
        dtype = torch.int8 if weight.format == "int8" else torch.float8_e4m3fn
        wide = weight.panels.view(dtype).view(panels, inputs, WIDTH).transpose(1, 2).float()
    else:
        packed = weight.panels.view(torch.int32).view(panels, inputs // 8, WIDTH).transpose(1, 2)
        codes = torch.stack([packed >> 4 * _place(k) & 15 for k in range(8)], -1).flatten(2)
        wide = weight.table.float()[codes] if len(weight.table) else codes.float()
    if weight.group:
        scales = weight.scales.float().transpose(1, 2).repeat_interleave(weight.group, 2)
        wide = wide * scales[:, :WIDTH]
        if weight.has_offsets:
            wide = wide + scales[:, WIDTH:]
    wide = in_order(wide, weight)[:, : weight.inputs]
    return wide[:, torch.argsort(weight.order)] if len(weight.order) else wide


def in_order(panelled: Tensor, weight: PackedWeight) -> Tensor:
    """(panels, 16, ...) to (outputs, ...): rows in the order of W, without padding."""
    halves = 2 if weight.gated else 1
    half = weight.outputs // halves
    used = -(-half // WIDTH) * halves
    parts = panelled[:used].reshape(-1, halves, *panelled.shape[1:]).transpose(0, 1).flatten(1, 2)
    rows: Tensor = parts[:, :half].flatten(0, 1)
    return rows


def _panelled(part: Tensor, halves: int) -> Tensor:
    """(outputs, ...) to (panels, 16, ...). The panels of two halves alternate."""
    split = _padded(part.view(halves, len(part) // halves, *part.shape[1:]), 1, WIDTH)
    split = split.reshape(halves, -1, WIDTH, *part.shape[1:]).transpose(0, 1).flatten(0, 1)
    return _padded(split, 0, PANEL_MULTIPLE)


def _laid_out(numbers: Tensor, form: Format) -> Tensor:
    """(panels, 16, inputs) to (panels, bytes)."""
    panels, _, inputs = numbers.shape
    if form == "bf16":
        pairs = numbers.view(panels, WIDTH, inputs // 2, 2).transpose(1, 2).contiguous()
        return pairs.view(torch.uint8).view(panels, -1)
    if form in ("int8", "fp8", "f32"):
        return numbers.transpose(1, 2).contiguous().view(torch.uint8).view(panels, -1)
    out = torch.empty(panels, inputs // 8, WIDTH, dtype=torch.int32)
    step = max(1, CODES_AT_ONCE // (WIDTH * inputs))
    for start in range(0, panels, step):
        # Eight codes are the bytes c0 to c7 of an int64. Its bytes 0, 1, 4 and 5 become c0 c2, c1 c3, c4 c6
        # and c5 c7, and the int32 is its bytes 0, 4, 1 and 5. This takes 1 ns a code.
        eights = numbers[start : start + step].contiguous().view(torch.int64)
        odd = eights | eights >> 12
        even = odd & 0xFF000000FF
        even |= even >> 24
        odd &= 0xFF000000FF00
        odd <<= 8
        odd |= odd >> 24
        even &= 0xFFFF
        even |= odd.bitwise_and_(0xFFFF0000)
        out[start : start + step] = even.int().transpose(1, 2)
    return out.view(torch.uint8).view(panels, -1)


def _place(k: int) -> int:
    """The index of the four bits of an int32 that hold input `k` of its eight inputs."""
    return k // 2 + 4 * (k % 2)


def _divided(groups: Tensor, factors: Tensor) -> Tensor:
    """groups / factors, rounded to integers; 0 where the factor is 0."""
    wide = factors.float()[..., None]
    return torch.where(wide == 0, 0.0, groups / wide).round()


def _padded(part: Tensor, dimension: int, multiple: int) -> Tensor:
    missing = -part.shape[dimension] % multiple
    if not missing:
        return part
    shape = list(part.shape)
    shape[dimension] = missing
    return torch.cat([part, part.new_zeros(shape)], dimension)
