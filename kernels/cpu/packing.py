"""4-bit codes: out of the bytes of a file, and into panels for the linear kernels (see `kernels.packed`)."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from ramify.kernels.cpu.codegen import simd as vl
from ramify.kernels.cpu.codegen.compiler import carray, compiled


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


@compiled(types.void(types.Array(types.uint64, 3, "C"), types.Array(types.uint32, 3, "C")))
def lay_out_codes(codes, out):  # type: ignore[no-untyped-def]
    """(panels, 16, inputs / 8) to (panels, inputs / 8, 16). The bytes of a code are inputs 8i to 8i + 7.

    Bytes c0 to c7 become c0 c2 c4 c6 c1 c3 c5 c7, four bits each: 0.3 ns a code.
    """
    panels, lanes, eights = codes.shape
    for panel in range(panels):
        for lane in range(lanes):
            for place in range(eights):
                # Bytes 0, 1, 4 and 5 become c0 c2, c1 c3, c4 c6 and c5 c7.
                pairs = codes[panel, lane, place]
                pairs |= pairs >> 12
                even = (pairs & 0xFF) | (pairs >> 24 & 0xFF00)
                odd = (pairs >> 8 & 0xFF) | (pairs >> 32 & 0xFF00)
                out[panel, place, lane] = even | odd << 16
