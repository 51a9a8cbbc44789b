"""Numbers of 4 and 8 bits: out of the bytes of a file, and into panels for the linear kernels (see
`kernels.packed`)."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled, part
from ramify.kernels.rows import NumbersAt


def nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(a, b, n) to (a, b, 2n): the low four bits of n bytes, then their high four bits.

    The n bytes lie side by side, other strides are free.
    """
    out = np.empty((*data.shape[:2], 2 * data.shape[2]), np.uint8)
    assert data.strides[2] == 1
    _nibbles(data.ctypes.data, data.strides[0], data.strides[1], data.shape[2], out)
    return out


@compiled(types.void(*[types.int64] * 4, types.Array(types.uint8, 3, "C")))
def _nibbles(address, stride, inner_stride, size, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            source = carray(vl.as_pointer(address + i * stride + j * inner_stride), size, np.uint8)
            for k in range(size):
                out[i, j, k] = source[k] & 15
                out[i, j, size + k] = source[k] >> 4


@compiled(types.void(types.Array(types.int64, 1, "C"), types.Array(types.uint8, 2, "C")))
def gather_rows(addresses, out):  # type: ignore[no-untyped-def]
    """Copy the bytes at each address to a row of `out`."""
    for i in range(len(addresses)):
        source = carray(vl.as_pointer(addresses[i]), out.shape[1], np.uint8)
        for k in range(out.shape[1]):
            out[i, k] = source[k]


def lay_out(rows: NDArray[np.uint8], at: NumbersAt, out: NDArray[np.uint8]) -> None:
    """The numbers in (panels * 16, bytes) to panels: (panels, bytes). See `kernels.packed`."""
    assert rows.flags.c_contiguous
    assert len(rows) == 16 * len(out)
    where = (rows.ctypes.data, rows.shape[1], at.block, at.first, at.size, at.runs)
    if at.bits == 4:
        _lay_out_nibbles(*where, out.view(np.uint32).reshape(len(out), -1, 16))
    else:
        assert out.flags.c_contiguous
        _lay_out_bytes(*where, len(out), out.ctypes.data)


@part
def _joined(pairs):  # type: ignore[no-untyped-def]
    """Bytes c0 to c7 as c0 c2 c4 c6 c1 c3 c5 c7, four bits each."""
    pairs |= pairs >> 12  # bytes 0, 1, 4 and 5 are c0 c2, c1 c3, c4 c6 and c5 c7
    even = (pairs & 0xFF) | (pairs >> 24 & 0xFF00)
    odd = (pairs >> 8 & 0xFF) | (pairs >> 32 & 0xFF00)
    return even | odd << 16


@compiled(types.void(*[types.int64] * 6, types.Array(types.uint32, 3, "C")))
def _lay_out_nibbles(address, row_bytes, block, first, size, runs, out):  # type: ignore[no-untyped-def]
    for row in range(out.shape[0] * 16):
        panel, lane, place = row // 16, row % 16, 0
        for start in range(row * row_bytes + first, (row + 1) * row_bytes, block):
            for run in range(address + start, address + start + runs * size, size):
                for shift in range(0, 8, 4):
                    for at in range(run, run + size, 8):
                        out[panel, place, lane] = _joined(vl.read_u64(at) >> shift & 0x0F0F0F0F0F0F0F0F)
                        place += 1


@compiled(types.void(*[types.int64] * 8))
def _lay_out_bytes(address, row_bytes, block, first, size, runs, panels, to):  # type: ignore[no-untyped-def]
    for row in range(0, panels * 16, 16):
        for start in range(row * row_bytes + first, (row + 1) * row_bytes, block):
            for at in range(address + start, address + start + runs * size, 16):
                vl.transpose_bytes(at, row_bytes, to)
                to += 256


@compiled(types.void(types.Array(types.uint64, 3, "C"), types.Array(types.uint32, 3, "C")))
def lay_out_codes(codes, out):  # type: ignore[no-untyped-def]
    """(panels, 16, inputs / 8) to (panels, inputs / 8, 16). The bytes of a code are inputs 8i to 8i + 7."""
    panels, lanes, eights = codes.shape
    for panel in range(panels):
        for lane in range(lanes):
            for place in range(eights):
                out[panel, place, lane] = _joined(codes[panel, lane, place])
