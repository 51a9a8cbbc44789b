"""The products of attention by AMX tiles, as LLVM code.

    more than FEW_ROWS rows:    C[16, 64] = A[16, depth] · B[depth, 64]
    few rows, as in decodes:    scores[32, 4] = K[32, dim] · queries[dim, 4], with K as it lies in the pages
                                output[rows, 32] = weights[rows, depth] · values[depth, 32]

Keys are bfloat16, or codes of int8 pages (`attention_int8.py`). A tile has 16 rows of 64 bytes. A number of
the result has the same bits in both ways: an instruction adds the products of 16 pairs in ascending order,
and does not depend on the other rows and columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ramify.kernels.cpu.codegen.compiler import features, part
from ramify.kernels.cpu.codegen.functions import llvm_function
from ramify.kernels.cpu.codegen.simd import BYTES, LANES, joined, load_vector, pointer, store_vector
from ramify.kernels.cpu.packed_linear.tiles import TILES as TILES

AMX_ROWS = 16
"""Rows of a tile."""
FEW_ROWS = 4
"""The most rows (the heads of one token in most models) whose scores are products of the keys, as they lie in
the pages, and the transposed rows. No key is copied."""

_i64 = ir.IntType(64)


def _tile(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), args)


CODES = TILES and "+amx-int8" in features()
"""Whether AMX multiplies int8."""


def tile_panel(columns: int, multiply: str = "tdpbf16ps") -> Any:
    """C = A B for any number of rows and `columns` tiles of columns, by the AMX instruction `multiply`: 16
    rows at a time. `depth` must be a multiple of 16 pairs of bfloat16 or fours of int8."""

    def fill(builder: ir.IRBuilder, *args: ir.Value) -> None:
        a, a_row, b, b_row, c, c_row, depth, _ = args

        def at(address: ir.Value, offset: int = 0) -> ir.Value:
            return pointer(builder, builder.add(address, _i64(offset)), ir.IntType(8))

        # Registers: sums in 0 to 3, A in 4, B in 5 to 7 in turn.
        register = ir.IntType(8)
        for tile in range(columns):
            _tile(builder, "tilezero", register(tile))
        with cgutils.for_range(builder, builder.lshr(depth, _i64(4))) as loop:
            left = builder.add(a, builder.shl(loop.index, _i64(6)))
            right = builder.add(b, builder.shl(builder.mul(loop.index, b_row), _i64(4)))
            _tile(builder, "tileloadd64", register(4), at(left), a_row)
            for tile in range(columns):
                _tile(builder, "tileloadd64", register(5 + tile % 3), at(right, 64 * tile), b_row)
                _tile(builder, multiply, register(tile), register(4), register(5 + tile % 3))
        for tile in range(columns):
            _tile(builder, "tilestored64", register(tile), at(c, 64 * tile), c_row)

    tiles = llvm_function(f"ramify_product_{multiply}_{columns}", 8, fill)

    @part
    def panel(a, a_row, b, b_row, c, c_row, rows, depth, ahead):  # type: ignore[no-untyped-def]
        while rows > 0:
            tiles(a, a_row, b, b_row, c, c_row, depth, ahead)
            rows -= AMX_ROWS
            a += AMX_ROWS * a_row
            c += AMX_ROWS * c_row

    return panel


def _tile_at(builder: ir.IRBuilder, tile: int, name: str, address: ir.Value, row: ir.Value) -> None:
    register = ir.IntType(8)
    _tile(builder, name, register(tile), pointer(builder, address, register), row)


def _key_tiles(multiply: str, width: int, builder: ir.IRBuilder, *args: ir.Value) -> None:
    """`width`: bytes of a row of the transposed queries, and of the result."""
    chunks, k_row, queries, out, depth = args
    byte = ir.IntType(8)
    keys = [builder.load(pointer(builder, builder.add(chunks, _i64(8 * i)), _i64)) for i in range(2)]
    for chunk in range(2):
        _tile(builder, "tilezero", byte(3 + chunk))
    with cgutils.for_range(builder, builder.lshr(depth, _i64(4))) as loop:
        offset = builder.shl(loop.index, _i64(6))
        at = builder.add(queries, builder.mul(loop.index, _i64(AMX_ROWS * width)))
        _tile_at(builder, 5, "tileloadd64", at, _i64(width))
        for chunk in range(2):
            _tile_at(builder, 6 + chunk, "tileloadd64", builder.add(keys[chunk], offset), k_row)
            _tile(builder, multiply, byte(3 + chunk), byte(6 + chunk), byte(5))
    for chunk in range(2):
        at = builder.add(out, _i64(AMX_ROWS * width * chunk))
        _tile_at(builder, 3 + chunk, "tilestored64", at, _i64(width))


def _value_tiles(builder: ir.IRBuilder, *args: ir.Value) -> None:
    a, a_row, b, b_row, c, c_row, depth, _ = args
    byte = ir.IntType(8)
    for column in range(2):
        _tile(builder, "tilezero", byte(column))
    with cgutils.for_range(builder, builder.lshr(depth, _i64(4))) as loop:
        _tile_at(builder, 2, "tileloadd64", builder.add(a, builder.shl(loop.index, _i64(6))), a_row)
        at = builder.add(b, builder.shl(builder.mul(loop.index, b_row), _i64(4)))
        for column in range(2):
            _tile_at(builder, 6 + column, "tileloadd64", builder.add(at, _i64(64 * column)), b_row)
            _tile(builder, "tdpbf16ps", byte(column), byte(2), byte(6 + column))
    for column in range(2):
        _tile_at(builder, column, "tilestored64", builder.add(c, _i64(64 * column)), c_row)


def _configure(builder: ir.IRBuilder, config: ir.Value, *_: ir.Value) -> None:
    _tile(builder, "ldtilecfg", pointer(builder, config, ir.IntType(8)))


_KIND = ir.VectorType(ir.IntType(32), LANES)


def _mixed(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(_KIND, lanes))


def _turn(builder: ir.IRBuilder, *args: ir.Value) -> None:
    at, out, out_row, _, _ = args
    rows = [load_vector(builder, builder.add(at, _i64(BYTES * i))) for i in range(4)]
    _store_turned(builder, rows, out, out_row)


def _turn_codes(builder: ir.IRBuilder, *args: ir.Value) -> None:
    at, out, out_row, factors, _ = args
    places = [builder.add(at, _i64(BYTES * i)) for i in range(8)]
    sums = [builder.load(pointer(builder, place, _KIND), align=4) for place in places]
    four = ir.VectorType(ir.FloatType(), FEW_ROWS)
    times = builder.load(pointer(builder, factors, four), align=4)
    lanes = [lane % FEW_ROWS for lane in range(LANES)]
    times = builder.shuffle_vector(times, times, ir.Constant(_KIND, lanes))
    # A vector has two positions, each with FEW_ROWS sums of higher and FEW_ROWS sums of lower rows.
    halves = [[8 * (lane // 4) + lane % 4 + 4 * low for lane in range(LANES)] for low in range(2)]
    rows = []
    for first in range(0, 8, 2):
        high, low = (_mixed(builder, sums[first], sums[first + 1], half) for half in halves)
        rows.append(builder.fmul(joined(builder, high, low), times))
    _store_turned(builder, rows, out, out_row)


def _store_turned(builder: ir.IRBuilder, rows: list[ir.Value], out: ir.Value, out_row: ir.Value) -> None:
    """Write four vectors of 4 positions times FEW_ROWS rows as FEW_ROWS rows of 16 positions."""

    def mixed(a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return _mixed(builder, a, b, lanes)

    for pair in range(2):  # rows 2 * pair and 2 * pair + 1 of the result
        both = [2 * pair + 4 * i + j for j in range(2) for i in range(8)]
        halves = [mixed(rows[2 * i], rows[2 * i + 1], both) for i in range(2)]
        for row in range(2):
            lanes = [8 * row + i + 16 * half for half in range(2) for i in range(8)]
            to = builder.add(out, builder.mul(out_row, _i64(2 * pair + row)))
            store_vector(builder, to, mixed(halves[0], halves[1], lanes))


@part
def _nothing(*arguments):  # type: ignore[no-untyped-def]
    return 0


configure_tiles = release_tiles = _nothing
"""Stand-ins, as the next three, for processors without AMX, where they are never called."""
key_tiles = _nothing
"""The scores of 32 positions. Takes (chunks, k_row, queries, out, depth): the address of the addresses of two
times 16 keys in a page, bytes between keys, (pairs, FEW_ROWS) pairs of the queries, and the result, which is
(32, FEW_ROWS) float32."""
value_tiles = _nothing
"""Two tiles of columns of weights times values, as `multiply_pairs`."""
turn_scores = _nothing
"""Write 16 of the results of `key_tiles` as FEW_ROWS rows. Takes (results, out, out_row, 0, 0)."""
key_code_tiles = turn_code_scores = _nothing
"""As `key_tiles` and `turn_scores` for codes: the queries are (fours, 2 FEW_ROWS), each four int8, and the
results (32, 2 FEW_ROWS) int32, the higher halves of the queries first. `turn_code_scores` takes (results,
out, out_row, factors, 0) with the FEW_ROWS float32 factors of the queries."""
if TILES:
    key_tiles = llvm_function("ramify_attention_key_tiles", 5, partial(_key_tiles, "tdpbf16ps", 4 * FEW_ROWS))
    key_code_tiles = llvm_function(
        "ramify_attention_key_code_tiles", 5, partial(_key_tiles, "tdpbssd", 8 * FEW_ROWS)
    )
    turn_code_scores = llvm_function("ramify_attention_turn_codes", 5, _turn_codes)
    value_tiles = llvm_function("ramify_attention_value_tiles", 8, _value_tiles)
    turn_scores = llvm_function("ramify_attention_turn", 5, _turn)
    configure_tiles = llvm_function("ramify_attention_configure", 5, _configure)
    release_tiles = llvm_function(
        "ramify_attention_release", 5, lambda builder, *_: _tile(builder, "tilerelease")
    )
