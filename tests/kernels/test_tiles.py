"""The vector code that kernels are built from: products, transposes, 2**x, tanh, bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit, types

from ramify.kernels.cpu import attention_loops
from ramify.kernels.cpu.codegen import dots, simd

i64 = types.int64


@njit(i64(*[i64] * 9))
def multiply(a, a_row, b, b_row, c, c_row, rows, depth, columns):
    attention_loops.multiply(a, a_row, b, b_row, c, c_row, rows, depth, columns, 0)
    return 0


@njit(i64(*[i64] * 9))
def multiply_pairs(a, a_row, b, b_row, c, c_row, rows, depth, columns):
    attention_loops.multiply_pairs(a, a_row, b, b_row, c, c_row, rows, depth, columns, 0)
    return 0


@njit(i64(*[i64] * 11))
def multiply_in_place(a, a_row, pool, offsets, bf16, dots, c, c_row, rows, depth, columns):
    attention_loops.multiply_in_place(
        a, a_row, pool, offsets, offsets, bf16 != 0, dots != 0, c, c_row, rows, depth, columns
    )
    return 0


@njit(i64(*[i64] * 5))
def transpose(kind, base, offsets, out, out_row):
    if kind == 0:
        attention_loops.transpose_f32(base, offsets, offsets, out, out_row)
    elif kind == 1:
        attention_loops.transpose_bf16(base, offsets, offsets, out, out_row)
    else:
        attention_loops.transpose_bf16_pairs(base, offsets, offsets, out, out_row)
    return 0


@njit(i64(*[i64] * 4))
def each(kind, x, y, count):
    """Apply one function to `count` (a multiple of LANES) numbers."""
    for i in range(0, count, simd.LANES):
        if kind == 0:
            simd.store(y + 4 * i, simd.exp2(simd.load(x + 4 * i)))
        elif kind == 1:
            simd.store(y + 4 * i, simd.tanh(simd.load(x + 4 * i)))
        elif kind == 2:
            simd.store_bf16(y + 2 * i, simd.load(x + 4 * i))
        elif kind == 4:
            rounded = simd.store_rounded(y + 2 * i, simd.load(x + 4 * i))
            simd.store_bf16(y + 2 * i, rounded)
        else:
            for j in range(i, i + simd.LANES):
                simd.write_bf16(y + 2 * j, simd.read_f32(x + 4 * j))
    return 0


def applied(kind: int, x: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    x = np.ascontiguousarray(np.resize(x, -(-len(x) // simd.LANES) * simd.LANES), dtype=np.float32)
    y = np.empty(len(x), dtype)
    each(kind, x.ctypes.data, y.ctypes.data, len(x))
    return y


PAIRS = pytest.param(True, marks=pytest.mark.skipif(not dots.DOTS, reason="dots are not taken here"))
PANEL = attention_loops.PANEL


@pytest.mark.parametrize("pairs", [False, PAIRS], ids=["floats", "pairs"])
@pytest.mark.parametrize("columns", [1, simd.LANES + 1, 2 * simd.LANES, PANEL, 2 * PANEL - 1])
@pytest.mark.parametrize("rows", [*range(1, 14), 25])
def test_products_of_every_number_of_rows_and_vectors(rows, columns, pairs):
    depth, room = 37, 2 * PANEL
    a, b = torch.randn(30, depth, 2 if pairs else 1), torch.randn(depth, room, 2 if pairs else 1)
    if pairs:
        a, b = a.bfloat16(), b.bfloat16()
    c = torch.full((32, room), torch.nan)
    arrays = (a.data_ptr(), 4 * depth, b.data_ptr(), 4 * room, c.data_ptr(), 4 * room)
    (multiply_pairs if pairs else multiply)(*arrays, rows, depth, columns)
    exact = a.double().flatten(1) @ b.double().transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(c[:rows, :columns].double(), exact[:rows, :columns], atol=2e-5, rtol=1e-5)
    written_rows = rows + (rows % 6 == 5)
    assert c[written_rows:].isnan().all(), "no row beyond the promised room"


@pytest.mark.parametrize(
    ("bf16", "pairs"), [(False, False), (True, False), pytest.param(True, True, marks=PAIRS.marks)]
)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8])
def test_products_in_place_have_the_bits_of_products_of_a_copy(rows, bf16, pairs):
    depth, columns, joined = 37, 2 * PANEL, 2 if pairs else 1
    a = torch.randn(12, depth, joined)
    pool = torch.randn(100, columns).to(torch.bfloat16 if bf16 else torch.float32)
    picked = torch.randperm(100)[: joined * depth]
    offsets = picked * columns * pool.element_size()
    copy = pool[picked].view(depth, joined, columns).transpose(1, 2).contiguous()
    a, copy = (a.bfloat16(), copy) if pairs else (a, copy.float())
    c, expected = torch.full((2, 12, columns), torch.nan)
    out = (c.data_ptr(), 4 * columns, rows, depth, columns)
    multiply_in_place(a.data_ptr(), 4 * depth, pool.data_ptr(), offsets.data_ptr(), bf16, pairs, *out)
    out = (expected.data_ptr(), 4 * columns, rows, depth, columns)
    (multiply_pairs if pairs else multiply)(a.data_ptr(), 4 * depth, copy.data_ptr(), 4 * columns, *out)
    assert torch.equal(c[:rows], expected[:rows])


@pytest.mark.parametrize(("kind", "dtype", "columns"), [(0, "f", 1), (1, "h", 1), (2, "h", 2)])
def test_transposes(kind, dtype, columns):
    columns *= simd.LANES
    rows = torch.randn(40, columns).to(torch.float32 if dtype == "f" else torch.bfloat16)
    picked = torch.randperm(40)[: simd.LANES]
    offsets = picked * columns * rows.element_size()
    out = torch.full((columns, simd.LANES + 3), torch.nan)
    transpose(kind, rows.data_ptr(), offsets.data_ptr(), out.data_ptr(), 4 * out.stride(0))
    assert torch.equal(out[:, : simd.LANES], rows[picked].float().t())
    assert out[:, simd.LANES :].isnan().all()


def test_exp2_is_within_its_bound():
    x = np.concatenate(
        [np.linspace(-126, 0, 400_001), -np.geomspace(1e-30, 126, 100_000), np.linspace(0, 127, 9_999)]
    )
    x = x.astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    error = np.abs(applied(0, x)[: len(x)] - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 1.5


def test_exp2_at_the_edges():
    x = np.array([0.0, -0.0, -1, -126, -126.01, -1e30, -np.inf, np.nan, 10], np.float32)
    expected = np.array([1, 1, 0.5, 2.0**-126, 0, 0, 0, np.nan, 1024], np.float32)
    np.testing.assert_array_equal(applied(0, x)[: len(x)], expected)


def test_tanh_is_within_its_bound():
    x = np.concatenate([np.linspace(-12, 12, 400_001), np.geomspace(1e-30, 50, 100_000), [np.inf, -np.inf]])
    x = x[x != 0].astype(np.float32)
    result = applied(1, x)[: len(x)]
    exact = np.tanh(x.astype(np.float64))
    assert (np.abs(result - exact) / np.abs(exact)).max() <= 4e-7
    assert np.abs(result).max() <= 1
    assert np.isnan(applied(1, np.array([np.nan], np.float32))[0])


@pytest.mark.parametrize("kind", [2, 3, 4], ids=["vector", "scalar", "normal numbers"])
def test_rounding_to_bfloat16_is_torchs(kind):
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    halfway = np.arange(0, 2**16, dtype=np.uint32) << 16 | 0x8000
    x = np.concatenate([bits, halfway, halfway - 1, halfway + 1]).view(np.float32)
    if kind == 4:
        x[np.abs(x) < 2.0**-126] = 0
    result = torch.from_numpy(applied(kind, x, np.uint16)[: len(x)]).view(torch.bfloat16)
    expected = torch.from_numpy(x).bfloat16()
    assert torch.equal(result.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(result[number].view(torch.int16), expected[number].view(torch.int16))
