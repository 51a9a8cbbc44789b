"""Weight matrices laid out for the compiled linear kernels: bfloat16, float32, int8, 4-bit codes, float8.

A panel is sixteen outputs. Weights lie in the order of the inputs, and for each input the weights of the
sixteen outputs side by side, so that a kernel streams through a panel once:

bf16   for each pair of inputs: 16 outputs x 2 inputs, bfloat16
f32    for each input: 16 outputs, float32
int8   for each input: 16 outputs, int8
fp8    for each input: 16 outputs, float8_e4m3fn (arXiv 2209.05433)
int4   for each eight inputs: 16 int32, one for each output. Bits 4p to 4p + 3 are the code (0 to 15) of
       input 2p if p < 4, else of input 2p - 7. So the lower and the upper half of an int32 hold the two
       inputs of a pair at the same place.

int8, fp8 and int4 have scales in float16, bfloat16 or float32. For each panel and group of inputs these are
16 factors and, in weights with offsets, then 16 offsets; fp8 has no offsets. A weight is factor * number (+
offset), so an offset is -factor * zero point. The number of an int4 code is the code, or an int8 from a table
of 16: MXFP4 is a table of 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, with powers of two as factors.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.machine.records import new_record, record
from ramify.kernels.machine.threads import on_threads
from ramify.kernels.weights.routing import ClampedGate
from ramify.kernels.weights.rows import (
    BITS,
    FORMATS,
    INPUT_MULTIPLE,
    Format,
    NumbersAt,
    Rows,
    in_place_of,
    lowest_of_steps,
    padded,
)

LAYOUT_VERSION = 5
"""Part of the cache key of packed weights on disk: raise it when the layout changes."""
WIDTH = 16
"""Outputs of a panel."""
PANEL_MULTIPLE = 4
"""Panels are padded with zeros to a multiple of this: kernels take up to four at once."""


LAYOUT = record(
    "panels_at", "panel_bytes", "scales_at", "scale_bytes", "bias_at",
    "form", "panels", "inputs", "padded", "group", "scale_kind", "offsets",
    "gated",  # 0: no, 1: SwiGLU, 2: `clamp`
    "results",
    "looked_up", "raised",  # whether codes have a table, and the number added to the weights
    "tables_at", "order_at",
    floats=("alpha", "limit"),
)  # fmt: skip
"""The arguments of compiled kernels for a packed weight: addresses, sizes in bytes, counts."""

AT_ONCE = 1 << 21
"""Most weights that a thread lays out at a time. With fewer, Python would take longer than the copies."""
SCALE_DTYPES = (torch.float16, torch.float32, torch.bfloat16)
"""Dtypes of scales, in the order of a layout's `scale_kind`."""

TABLE_BF16_AT, TABLE_BYTES_AT = 64, 128
RAISED = 128
"""Added to int8 numbers where the processor multiplies unsigned bytes by signed bytes."""


def tables(table: Tensor) -> NDArray[np.uint8]:
    """A table of 16 int8 as kernels read it: once as float32, twice as bfloat16, and four times as unsigned
    bytes raised by 128."""
    parts = [table.float(), table.bfloat16().repeat(2), (table.short() + 128).to(torch.uint8).repeat(4)]
    return np.concatenate([part.contiguous().view(torch.uint8).numpy() for part in parts])


_CODES = tables(torch.arange(16, dtype=torch.int8))


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A packed matrix W of `linear`, (outputs, inputs).

    panels : (panels, bytes) uint8
        The weights.
    scales : (panels, groups, 16 or 32) float16, bfloat16 or float32
        32 if the weights have offsets. Empty for bf16 and f32.
    bias : (panels * 16,) float32
        In the order of the panels; empty if there is no bias.
    gated : bool
        W is two matrices of one shape, gate and up projection, whose panels alternate.
    table : (16,) int8
        The number of each int4 code; empty if each code is its own number.
    clamp : the gate if it is not SwiGLU, else None
    order : (inputs,) int32
        The input of each column of the panels; empty if column i is input i.
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
        """The address of a record of `LAYOUT`, and the arrays that must live as long as that address is used.
        Cached, as every call needs it."""
        one = new_record(LAYOUT)
        looked_up = len(self.table) > 0
        codes = tables(self.table) if looked_up else _CODES
        lowest = lowest_of_steps(self.table) if looked_up else None
        one.panels, one.panel_bytes = self.panels.shape
        one.panels_at, one.scales_at = self.panels.data_ptr(), self.scales.data_ptr()
        if self.group:
            one.group, one.scale_bytes = self.group, self.scales[0].nbytes
        one.scale_kind, one.offsets = SCALE_DTYPES.index(self.scales.dtype), self.has_offsets
        one.bias_at = self.bias.data_ptr() if len(self.bias) else 0
        one.form, one.inputs, one.padded = FORMATS.index(self.format), self.inputs, self.padded_inputs
        one.gated, one.results = self.gated + (self.clamp is not None), self.results
        one.looked_up, one.tables_at = looked_up, codes.ctypes.data
        one.raised = RAISED if looked_up or self.format == "int8" else 0
        if lowest is not None:
            one.raised = -lowest
        one.order_at = self.order.data_ptr() if len(self.order) else 0
        if self.clamp is not None:
            one.alpha, one.limit = self.clamp.alpha, self.clamp.limit
        return ctypes.addressof(one), (np.frombuffer(one, LAYOUT), codes)


def with_offsets(weight: PackedWeight) -> PackedWeight:
    """A weight of the same values with float32 factors and offsets; `weight` itself if it cannot have
    offsets."""
    if weight.format not in ("int4", "int8"):
        return weight
    scales, table = weight.scales.float(), weight.table
    if not weight.has_offsets:
        offsets = in_place_of(table, scales)
        if offsets is None:
            return weight
        scales, table = torch.cat([scales, offsets], -1), table[:0]
    return dataclasses.replace(weight, scales=scales, table=table)


def form_of(weight: PackedWeight) -> tuple[object, ...]:
    """The properties in which all expert matrices of one call of the compiled kernels must be equal."""
    shapes = (weight.panels.shape, weight.scales.shape[-3:], weight.scales.dtype, len(weight.order))
    fixed = (weight.outputs, weight.inputs, weight.group, weight.gated, weight.clamp)
    return (weight.format, *fixed, *shapes, weight.table.tolist())


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
    halves = 2 if gated else 1
    outputs, columns = rows.numbers.shape
    multiple = math.lcm(INPUT_MULTIPLE, rows.group or 1)
    columns += -columns % multiple
    order = padded(_panelled(torch.arange(1, outputs + 1), halves), 0, PANEL_MULTIPLE) - 1
    panels = torch.empty(len(order), columns * WIDTH * BITS[rows.format] // 8, dtype=torch.uint8)
    scales = torch.empty(0, dtype=torch.float16)
    if rows.factors is not None:
        width = WIDTH if rows.offsets is None else 2 * WIDTH
        scales = torch.empty(len(order), columns // rows.group, width, dtype=rows.factors.dtype)
    each_thread = -(-len(order) // torch.get_num_threads())
    step = max(1, min(each_thread, AT_ONCE // (WIDTH * columns)))

    def lay_out(start: int) -> None:
        at = slice(start, start + step)
        chosen = order[at].flatten()
        missing = chosen < 0
        laid_scales = _lay_out_rows(rows, chosen.clamp(min=0), missing, multiple, panels[at])
        for index, each in enumerate(laid_scales):
            if each is not None:
                _zero(each, missing)
                laid = scales[at, :, index * WIDTH : (index + 1) * WIDTH]
                laid[:, each.shape[1] :] = 0
                laid[:, : each.shape[1]] = each.unflatten(0, (-1, WIDTH)).transpose(1, 2)

    on_threads(lay_out, range(0, len(order), step))
    laid_bias = torch.empty(0)
    if bias is not None:
        laid_bias = padded(_panelled(bias.float(), halves), 0, PANEL_MULTIPLE).flatten().contiguous()
    table = torch.empty(0, dtype=torch.int8) if rows.table is None else rows.table
    columns_of = torch.empty(0, dtype=torch.int32) if rows.order is None else rows.order.int().contiguous()
    return PackedWeight(
        rows.format, outputs, inputs, rows.group, gated, panels, scales, laid_bias, table, clamp, columns_of
    )


class Stack:
    """A stack of `count` matrices of one shape and form in one piece of memory. `put` fills it; `unstacked`
    splits it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.there: set[int] = set()
        self._one: PackedWeight | None = None
        self._panels, self._scales = torch.empty(0), torch.empty(0)

    def put(self, index: int, weight: PackedWeight) -> bool:
        """Copy a matrix to place `index`. Returns False, and changes nothing, if its form does not fit the
        earlier matrices.

        If the matrices differ in having offsets or in the dtype of scales, all get float32 factors and
        offsets.
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
        """Write the values of the matrices put so far to `values`, (count, outputs, inputs), and drop the
        matrices."""
        for index in self.there:
            assert self._one is not None
            panels, scales = self._panels[index], self._scales[index]
            values[index] = unpack(dataclasses.replace(self._one, panels=panels, scales=scales))
        self.there, self._one = set(), None
        self._panels, self._scales = torch.empty(0), torch.empty(0)

    def whole(self, bias: Tensor | None = None) -> PackedWeight:
        """All matrices as one weight. Every matrix must have been put before. `bias` is (count, outputs)."""
        assert self._one is not None
        laid = torch.empty(0)
        if bias is not None:
            halves = 2 if self._one.gated else 1
            laid = torch.cat(
                [padded(_panelled(row.float(), halves), 0, PANEL_MULTIPLE).flatten() for row in bias]
            )
        panels, scales = self._panels.flatten(0, 1), self._scales
        return dataclasses.replace(
            self._one, panels=panels, scales=scales.flatten(0, 1) if scales.numel() else scales[0], bias=laid
        )


def unstacked(weight: PackedWeight, count: int) -> list[PackedWeight]:
    """The `count` matrices of `weight`, which is the whole of a `Stack`. They share its memory."""
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
    split = padded(part.view(halves, len(part) // halves, *part.shape[1:]), 1, WIDTH)
    return split.reshape(halves, -1, WIDTH, *part.shape[1:]).transpose(0, 1).flatten(0, 1)


def _lay_out_rows(
    rows: Rows, chosen: Tensor, missing: Tensor, multiple: int, out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Write the rows `chosen`, zeros where `missing`, to the panels `out`, (panels, bytes). Returns the
    factors and offsets of `chosen`.

    Columns are padded with zeros to a multiple of `multiple`.
    """
    stored, columns = rows.stored, rows.numbers.shape[1]
    if stored is None or stored.verbatim is None:
        part = rows.decoded(chosen)
        _zero(part.numbers, missing)
        _lay_out(padded(part.numbers, 1, multiple).unflatten(0, (-1, WIDTH)), rows.format, out)
        return part.factors, part.offsets
    assert columns % multiple == 0, "such blocks are multiples of 32 inputs and of their groups"
    data = stored[chosen]
    scales = stored.verbatim.scales(data)
    _zero(data, missing)
    _lay_out_from(data, stored.verbatim.numbers, out)
    return scales


def _zero(part: Tensor, missing: Tensor) -> None:
    if missing.any():  # to write to no rows takes as long as to lay all out
        part.view(torch.uint8)[missing] = 0


def _lay_out(numbers: Tensor, form: Format, out: Tensor) -> None:
    """Write `numbers`, (panels, 16, inputs), to the panels `out`, (panels, bytes)."""
    panels, _, inputs = numbers.shape
    if form == "int4":
        from ramify.kernels.cpu.parts.packing import lay_out_codes

        eights = numbers.contiguous().view(torch.uint64).numpy()
        lay_out_codes(eights, out.numpy().view(np.uint32).reshape(panels, inputs // 8, WIDTH))
    elif form in ("int8", "fp8"):
        rows = numbers.contiguous().view(torch.uint8).flatten(0, 1)
        _lay_out_from(rows, NumbersAt(bits=8, block=inputs, first=0, size=inputs), out)
    else:
        # bfloat16 two at a time.
        laid = out.view(torch.int32).view(panels, -1, WIDTH)
        laid.numpy()[...] = numbers.contiguous().view(torch.int32).numpy().transpose(0, 2, 1)


def _lay_out_from(rows: Tensor, at: NumbersAt, out: Tensor) -> None:
    """Write the numbers at `at` in `rows`, (panels * 16, bytes), to the panels `out`, (panels, bytes)."""
    from ramify.kernels.cpu.parts import packing

    packing.lay_out(rows.numpy(), out.numpy(), **dataclasses.asdict(at))


def _place(k: int) -> int:
    """The index of the four bits of an int32 that hold input `k` of its eight inputs."""
    return k // 2 + 4 * (k % 2)
