"""The two inner loops of attention as LLVM code: a register-blocked product and a transposing copy.

Both keep a grid of vectors in registers, which numba's Python cannot express. The blocking follows
Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34(3), 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.attention_amx import AMX_ROWS, CODES, TILES, tile_panel
from ramify.kernels.cpu.codegen.compiler import part
from ramify.kernels.cpu.codegen.dots import DOTS, dot
from ramify.kernels.cpu.codegen.functions import llvm_function
from ramify.kernels.cpu.codegen.simd import (
    BYTES,
    LANES,
    fused,
    load_vector,
    load_widened,
    pointer,
    prefetch_line,
    splat,
    splat_constant,
    store_vector,
)

TILE_ROWS = 6
"""Rows of the product computed in one pass over the right-hand matrix."""
PADDED_ROWS = AMX_ROWS if TILES else TILE_ROWS
"""Matrices of rows have room for a multiple of this."""
PANEL_VECTORS = 2 if LANES == 8 else 4
"""Vectors of columns in a pass. Six rows need 6 x 4 accumulators of the 32 registers of AVX-512 and NEON, or
6 x 2 of the 16 registers of AVX."""
PANEL = PANEL_VECTORS * LANES
"""float32 columns of a pass."""
AHEAD = 64
"""Rows in a table of rows to prefetch."""

_i64, _f32 = ir.IntType(64), ir.FloatType()


Load = Callable[[ir.IRBuilder, ir.Value], ir.Value]
_PAIRS = "pairs"


def _product(rows: int, vectors: int, in_place: tuple[str, int, Load] | None = None, kind: str = "") -> Any:
    """C = A B for `rows` rows of A and `vectors` vectors of a row of B.

    The function takes (a, a_row, b, b_row, c, c_row, depth, ahead), addresses and bytes between rows.

    in_place : (name, bytes of a vector, its loader) if the rows of B are scattered. `b_row` is then the
        address of a table of int64 offsets: row i lies at b + entry i. `ahead` is the address of a second
        table of offsets, of the rows to prefetch.
    kind : with _PAIRS each number of A and of B is a pair of bfloat16. In place, rows 2 i and 2 i + 1 of B
        make the pairs, and `depth` counts pairs. If not in place, `ahead` is 0 or a table of the addresses of
        AHEAD rows to prefetch, two cache lines a step. The first line of each row is left out.
    """
    name, vector_bytes, load = in_place or (kind or "dense", BYTES, load_vector)
    together = 2 if in_place and kind == _PAIRS else 1

    def fill(builder: ir.IRBuilder, *args: ir.Value) -> None:
        a, a_row, b, b_row, c, c_row, depth, ahead = args
        zero = splat(builder, _f32(0.0))
        cell: Any = cgutils.alloca_once_value
        grid = [[cell(builder, zero) for _ in range(vectors)] for _ in range(rows)]
        starts = [builder.add(a, builder.mul(a_row, _i64(row))) for row in range(rows)]
        with cgutils.for_range(builder, depth) as loop:
            if in_place is None:
                at = builder.add(b, builder.mul(b_row, loop.index))
                if kind == _PAIRS:
                    with builder.if_then(builder.icmp_unsigned("!=", ahead, _i64(0))):
                        _prefetch_lines(builder, ahead, loop.index)
            else:
                found = []
                for row in range(together):
                    offset = builder.add(builder.mul(loop.index, _i64(8 * together)), _i64(8 * row))
                    entry = builder.add(b_row, offset)
                    found.append(builder.add(b, builder.load(pointer(builder, entry, _i64))))
                    entry = builder.add(ahead, offset)
                    later = builder.add(b, builder.load(pointer(builder, entry, _i64)))
                    for byte in range(0, vector_bytes * vectors, 64):
                        prefetch_line(builder, builder.add(later, _i64(byte)))
                at = found[0]
            if together == 2:
                right = _interleaved(builder, found, vectors)
            else:
                right = [load(builder, builder.add(at, _i64(vector_bytes * v))) for v in range(vectors)]
            offset = builder.shl(loop.index, _i64(2))
            for row in range(rows):
                left = builder.load(pointer(builder, builder.add(starts[row], offset), _f32))
                left = splat(builder, left)
                for v in range(vectors):
                    sum_ = grid[row][v]
                    combine = dot if kind == _PAIRS else _fused_last
                    builder.store(combine(builder, builder.load(sum_), left, right[v]), sum_)
        for row in range(rows):
            at = builder.add(c, builder.mul(c_row, _i64(row)))
            for v in range(vectors):
                store_vector(builder, builder.add(at, _i64(BYTES * v)), builder.load(grid[row][v]))

    return llvm_function(f"ramify_product_{name}_{rows}x{vectors}", 8, fill)


def _prefetch_lines(builder: ir.IRBuilder, table: ir.Value, step: ir.Value) -> None:
    """Prefetch two cache lines of the AHEAD rows whose addresses are in `table`.

    The lines come in the order: second lines of all rows, third lines of all rows, and so on. Step `step`
    prefetches lines 2 * step and 2 * step + 1 of that order, counted from 0.
    """
    first = builder.shl(step, _i64(1))
    row = builder.and_(first, _i64(AHEAD - 1))
    line = builder.add(builder.lshr(first, _i64(AHEAD.bit_length() - 1)), _i64(1))
    for other in range(2):
        entry = builder.add(table, builder.shl(builder.add(row, _i64(other)), _i64(3)))
        at = builder.load(pointer(builder, entry, _i64))
        prefetch_line(builder, builder.add(at, builder.shl(line, _i64(6))))


def _interleaved(builder: ir.IRBuilder, rows: list[ir.Value], vectors: int) -> list[ir.Value]:
    """The two bfloat16 rows at the addresses `rows`, interleaved into `vectors` vectors of pairs: pair i has
    number i of each row."""
    words = ir.VectorType(ir.IntType(16), 2 * LANES)
    found = []
    for first in range(0, vectors, 2):
        both = [
            builder.load(pointer(builder, builder.add(row, _i64(BYTES // 2 * first)), words), align=2)
            for row in rows
        ]
        for half in range(2):
            lanes = [LANES * half + lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), lanes)
            found.append(builder.shuffle_vector(*both, mask))
    return found


def _fused_last(builder: ir.IRBuilder, sum_: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    return fused(builder, a, b, sum_)


def _panel(vectors: int, in_place: tuple[str, int, Load] | None = None, kind: str = "") -> Any:
    """The product for any number of rows and one panel of columns: six rows at a time, then the rest."""
    tile1, tile2, tile3, tile4, tile6 = (
        _product(rows, vectors, in_place, kind) for rows in (1, 2, 3, 4, TILE_ROWS)
    )
    scattered = in_place is not None

    @part
    def panel(a, a_row, b, b_row, c, c_row, rows, depth, ahead):  # type: ignore[no-untyped-def]
        while rows > 4:
            tile6(a, a_row, b, b_row, c, c_row, depth, ahead if scattered or rows <= TILE_ROWS else 0)
            rows -= TILE_ROWS
            a += TILE_ROWS * a_row
            c += TILE_ROWS * c_row
        if rows == 1:
            tile1(a, a_row, b, b_row, c, c_row, depth, ahead)
        elif rows == 2:
            tile2(a, a_row, b, b_row, c, c_row, depth, ahead)
        elif rows == 3:
            tile3(a, a_row, b, b_row, c, c_row, depth, ahead)
        elif rows == 4:
            tile4(a, a_row, b, b_row, c, c_row, depth, ahead)

    return panel


_wide_f32 = _panel(PANEL_VECTORS, ("f32", BYTES, load_vector))
_wide_bf16 = _panel(PANEL_VECTORS, ("bf16", BYTES // 2, load_widened))
_wide_pairs = _wide_bf16
if DOTS:
    _wide_pairs = _panel(PANEL_VECTORS, ("bf16_pairs", BYTES // 2, load_widened), _PAIRS)


def _multiplier(single: Any, double: Any, wide: Any) -> Any:
    @part
    def multiply(a, a_row, b, b_row, c, c_row, rows, depth, columns, ahead):  # type: ignore[no-untyped-def]
        while columns > 0:
            if columns > 2 * LANES:
                wide(a, a_row, b, b_row, c, c_row, rows, depth, ahead)
                step = PANEL
            elif columns > LANES:
                double(a, a_row, b, b_row, c, c_row, rows, depth, ahead)
                step = 2 * LANES
            else:
                single(a, a_row, b, b_row, c, c_row, rows, depth, ahead)
                step = LANES
            b += 4 * step
            c += 4 * step
            columns -= step

    return multiply


multiply = _multiplier(*(_panel(vectors) for vectors in (1, 2, PANEL_VECTORS)))
"""C = A B in float32, each number of C summed over `depth` in ascending order.

Takes (a, a_row, b, b_row, c, c_row, rows, depth, columns, ahead): addresses, and bytes between rows. `ahead`
is as in `_product`, or 0. The three matrices need room for padding: `columns` is rounded up to whole vectors
and at most to a whole PANEL, and five last rows are computed as six."""


multiply_pairs = multiply
"""As `multiply`, for A and B of bfloat16 pairs; the two products of a pair are added. Needs DOTS or TILES."""
multiply_codes = multiply
"""As `multiply`, for A and B of fours of int8; C is int32. Needs CODES."""
if CODES:
    multiply_codes = _multiplier(*(tile_panel(tiles, "tdpbssd") for tiles in (1, 2, PANEL_VECTORS)))
if TILES:
    multiply_pairs = _multiplier(*map(tile_panel, (1, 2, PANEL_VECTORS)))
elif DOTS:
    multiply_pairs = _multiplier(*(_panel(vectors, kind=_PAIRS) for vectors in (1, 2, PANEL_VECTORS)))


@part
def multiply_in_place(a, a_row, pool, offsets, ahead, bf16, dots, c, c_row, rows, depth, columns):  # type: ignore[no-untyped-def]
    """As `multiply`, bit for bit, with the rows of B read in place: row i is at pool + int64 offsets[i]. With
    `dots` it is as `multiply_pairs`: two neighbouring rows of B make the pairs, and `depth` counts pairs.

    `ahead` is the address of a table of offsets like `offsets`, of the rows to prefetch. Each step prefetches
    one row: a burst of requests would fill the processor's queue and stall it (10 GB/s a core instead of 20).
    Each row of B is widened once for every six rows of A. `columns` must be a multiple of PANEL.
    """
    for column in range(0, columns, PANEL):
        if dots:
            _wide_pairs(a, a_row, pool + 2 * column, offsets, c + 4 * column, c_row, rows, depth, ahead)
        elif bf16:
            _wide_bf16(a, a_row, pool + 2 * column, offsets, c + 4 * column, c_row, rows, depth, ahead)
        else:
            _wide_f32(a, a_row, pool + 4 * column, offsets, c + 4 * column, c_row, rows, depth, ahead)


def _pair_rows() -> Any:
    def fill(builder: ir.IRBuilder, *args: ir.Value) -> None:
        pool, offsets, ahead, out, out_row, pairs, row_bytes, _ = args
        with cgutils.for_range(builder, pairs) as loop:
            place = builder.shl(loop.index, _i64(4))

            def rows_of(table: ir.Value) -> list[ir.Value]:
                entries = [builder.add(builder.add(table, place), _i64(8 * row)) for row in range(2)]
                return [builder.add(pool, builder.load(pointer(builder, at, _i64))) for at in entries]

            rows, later = rows_of(offsets), rows_of(ahead)
            to = builder.add(out, builder.mul(out_row, loop.index))
            with cgutils.for_range(builder, builder.udiv(row_bytes, _i64(BYTES))) as columns:
                offset = builder.mul(columns.index, _i64(BYTES))
                both = _interleaved(builder, [builder.add(row, offset) for row in rows], 2)
                for index, found in enumerate(both):
                    at = builder.add(to, builder.mul(columns.index, _i64(2 * BYTES)))
                    store_vector(builder, builder.add(at, _i64(BYTES * index)), found)
                for row in later if TILES else ():
                    prefetch_line(builder, builder.add(row, offset))

    return llvm_function("ramify_pair_rows", 8, fill)


pair_rows = _pair_rows()
"""Pair neighbouring bfloat16 rows. Takes (pool, offsets, ahead, out, out_row, pairs, row_bytes, 0): row i is
at pool + entry i of the table of int64 `offsets`. With AMX the rows of the table `ahead` are prefetched."""


def _pair_codes() -> Any:
    def fill(builder: ir.IRBuilder, *args: ir.Value) -> None:
        pool, offsets, ahead, out, out_row, pairs, dim, _ = args
        kind, bits = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(32), LANES)
        with cgutils.for_range(builder, pairs) as loop:
            place = builder.shl(loop.index, _i64(4))

            def rows_of(table: ir.Value) -> list[ir.Value]:
                entries = [builder.add(builder.add(table, place), _i64(8 * row)) for row in range(2)]
                return [builder.add(pool, builder.load(pointer(builder, at, _i64))) for at in entries]

            rows, later = rows_of(offsets), rows_of(ahead)
            prefetch_line(builder, later[0])
            to = builder.add(out, builder.mul(out_row, loop.index))
            with cgutils.for_range(builder, builder.udiv(dim, _i64(64))) as columns:
                at = builder.mul(columns.index, _i64(64))
                for d in range(0, 64, LANES):
                    low, high = (
                        builder.bitcast(
                            builder.sitofp(
                                builder.load(
                                    pointer(builder, builder.add(row, builder.add(at, _i64(d))), kind),
                                    align=1,
                                ),
                                ir.VectorType(_f32, LANES),
                            ),
                            bits,
                        )
                        for row in rows
                    )
                    both = builder.or_(builder.lshr(low, splat_constant(16)), high)
                    store_vector(
                        builder, builder.add(to, builder.add(builder.shl(at, _i64(2)), _i64(4 * d))), both
                    )
                for row in later:
                    prefetch_line(builder, builder.add(row, builder.add(at, _i64(64))))

    return llvm_function("ramify_pair_codes", 8, fill)


pair_codes = _pair_codes()
"""As `pair_rows` for rows of `dim` codes: takes (pool, offsets, ahead, out, out_row, pairs, dim, 0). `dim`
must be a multiple of 64. An int8 is a bfloat16 exactly."""


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The transpose of a LANES x LANES matrix, by swapping off-diagonal blocks of 1, 2, 4, ... lanes."""
    rows = list(rows)
    kind = ir.VectorType(ir.IntType(32), LANES)
    step = 1
    while step < LANES:
        upper = [LANES + lane - step if lane & step else lane for lane in range(LANES)]
        lower = [LANES + lane if lane & step else lane + step for lane in range(LANES)]
        for first in range(LANES):
            if not first & step:
                a, b = rows[first], rows[first | step]
                rows[first] = builder.shuffle_vector(a, b, ir.Constant(kind, upper))
                rows[first | step] = builder.shuffle_vector(a, b, ir.Constant(kind, lower))
        step *= 2
    return rows


def _load_pair(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Load 2 LANES bfloat16 as LANES integers, each holding two neighbours."""
    return builder.load(pointer(builder, address, ir.VectorType(ir.IntType(32), LANES)), align=2)


def _split_pair(builder: ir.IRBuilder, pair: ir.Value) -> list[ir.Value]:
    """The lower and the upper bfloat16 of each integer, widened."""
    kind = ir.VectorType(_f32, LANES)
    low = builder.bitcast(builder.shl(pair, splat_constant(16)), kind)
    high = builder.bitcast(builder.and_(pair, splat_constant(0xFFFF0000)), kind)
    return [low, high]


def _transpose(
    name: str, load: Callable[..., ir.Value], split: Callable[..., list[ir.Value]], prefetches: bool = True
) -> Any:
    """A function that reads LANES rows and writes their columns as rows of float32, or of bfloat16 pairs."""

    def fill(builder: ir.IRBuilder, *args: ir.Value) -> None:
        base, offsets, ahead, out, out_row = args
        rows = []
        for row in range(LANES):
            offset = builder.load(pointer(builder, builder.add(offsets, _i64(8 * row)), _i64))
            rows.append(load(builder, builder.add(base, offset)))
            if prefetches:
                later = builder.load(pointer(builder, builder.add(ahead, _i64(8 * row)), _i64))
                prefetch_line(builder, builder.add(base, later))
        columns = [half for column in _transposed(builder, rows) for half in split(builder, column)]
        for index, column in enumerate(columns):
            store_vector(builder, builder.add(out, builder.mul(out_row, _i64(index))), column)

    return llvm_function(f"ramify_transpose_{name}", 5, fill)


transpose_f32 = _transpose("f32", load_vector, lambda builder, column: [column])
"""Transpose LANES columns of LANES float32 rows. Takes (base, offsets, ahead, out, out_row). Row i starts at
base + entry i of the table of int64 at `offsets`; the table at `ahead` has the offsets of the rows to
prefetch."""
transpose_bf16 = _transpose("bf16", load_widened, lambda builder, column: [column])
"""As `transpose_f32` for bfloat16 rows, widened to float32."""
transpose_bf16_pairs = _transpose("bf16_pairs", _load_pair, _split_pair)
"""As `transpose_bf16` for 2 LANES columns. Two neighbours move as one integer, which halves the shuffles."""
transpose_pairs = _transpose("pairs", _load_pair, lambda builder, column: [column])
"""As `transpose_bf16_pairs`, but each pair of columns becomes one row of bfloat16 pairs."""
transpose_pairs_alone = _transpose("pairs_alone", _load_pair, lambda builder, column: [column], False)
"""As `transpose_pairs`, without prefetching."""
