"""Numbers of 4 and 8 bits: out of a file's bytes, and into panels (`kernels.weights.packed`) for products.

    for panel of 16 rows: for block of a row's bytes: for run of numbers in it:
        transpose 16 rows x 16 bytes, or pack eight 4-bit codes of each row into an int32

Rows of a file lie in row-major order, rows of a panel in the order of use. Reading the file bounds the speed.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled, part


def nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(a, b, n) to (a, b, 2n): the low four bits of n bytes, then their high four bits.

    The n bytes must be contiguous; the other strides may be anything.
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


@part
def _joined(pairs):  # type: ignore[no-untyped-def]
    """Bytes c0 to c7, at most 15 each, as c0 c2 c4 c6 c1 c3 c5 c7, four bits each."""
    pairs |= pairs >> 12  # bytes 0, 1, 4 and 5 are c0 c2, c1 c3, c4 c6 and c5 c7
    even = (pairs & 0xFF) | (pairs >> 24 & 0xFF00)
    odd = (pairs >> 8 & 0xFF) | (pairs >> 32 & 0xFF00)
    return even | odd << 16


@compiled(types.void(*[types.int64] * 9))
def _run(address, row_bytes, bits, block, first, size, runs, panels, to):  # type: ignore[no-untyped-def]
    for top in range(address, address + panels * 16 * row_bytes, 16 * row_bytes):
        for start in range(top + first, top + row_bytes, block):
            for run in range(start, start + runs * size, size):
                if bits == 8:
                    for at in range(run, run + size, 16):
                        vl.transpose_bytes(at, row_bytes, to)
                        to += 256
                    continue
                for lane in range(16):
                    place = to + 4 * lane
                    for shift in range(0, 8, 4):
                        for at in range(run + lane * row_bytes, run + lane * row_bytes + size, 8):
                            eight = (vl.read_u64(at) >> shift) & 0x0F0F0F0F0F0F0F0F
                            vl.write_low_i32(place, _joined(eight))
                            place += 64
                to += 16 * size


def lay_out(
    rows: NDArray[np.uint8],
    out: NDArray[np.uint8],
    *,
    bits: int,
    block: int,
    first: int,
    size: int,
    runs: int,
) -> None:
    """Write the numbers of `rows`, (panels * 16, bytes), to the panels `out`, (panels, bytes); see
    `kernels.weights.packed`.

    The numbers lie in a row as `kernels.weights.rows.NumbersAt` says.
    """
    assert rows.flags.c_contiguous
    assert out.flags.c_contiguous
    assert len(rows) == 16 * len(out)
    _run(rows.ctypes.data, rows.shape[1], bits, block, first, size, runs, len(out), out.ctypes.data)


@compiled(types.void(types.Array(types.uint64, 3, "C"), types.Array(types.uint32, 3, "C")))
def lay_out_codes(codes, out):  # type: ignore[no-untyped-def]
    """Pack `codes`, (panels, 16, inputs / 8), into `out`, (panels, inputs / 8, 16). Byte j of element i is
    the code of input 8i + j."""
    panels, lanes, eights = codes.shape
    for panel in range(panels):
        for lane in range(lanes):
            for place in range(eights):
                out[panel, place, lane] = _joined(codes[panel, lane, place])
