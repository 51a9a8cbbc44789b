"""Vectors of float32 inside numba: one type and its operations, and scalars in memory.

Kernels import this module as `vl`, as Triton kernels import Triton's language as `tl`. numba leaves vectors
to LLVM's auto-vectoriser, which gives up on reductions without fast-math and on bfloat16. Here `load`, `fma`
and `store` are one instruction each, in a fixed order, so that results do not depend on the optimiser. LLVM
splits or lowers the operations on processors without a matching instruction.

`load` and `store` move vectors, `read` and `write` single numbers. Pointers are int64 addresses in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

from ramify.kernels.cpu.codegen.compiler import features, intrinsic, lanes, part

LANES = lanes()
BYTES = 4 * LANES
"""Bytes of one vector."""
LOG2_E = 1.4426950408889634
"""log2(e): exp(x) is exp2(LOG2_E * x)."""

_AVX512 = LANES == 16
BF16 = _AVX512 and {"+avx512bf16", "+avx512bw"} <= features()
"""Whether the processor has AVX512_BF16."""

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_vector, _ivector = ir.VectorType(_f32, LANES), ir.VectorType(_i32, LANES)
_hvector = ir.VectorType(ir.IntType(16), LANES)


class BFloat(ir.Type):
    """LLVM's type bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Vector(types.Type):
    """The numba type of LANES float32 numbers in a register."""

    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, _vector)


vector = Vector()

Emit = Callable[..., ir.Value]


def _op1(result: types.Type, emit: Emit) -> Any:
    @intrinsic
    def op(typing: Any, a: Any) -> Any:
        return result(a), lambda context, builder, signature, args: emit(builder, *args)

    return op


def _op2(result: types.Type, emit: Emit) -> Any:
    @intrinsic
    def op(typing: Any, a: Any, b: Any) -> Any:
        return result(a, b), lambda context, builder, signature, args: emit(builder, *args)

    return op


def _op3(result: types.Type, emit: Emit) -> Any:
    @intrinsic
    def op(typing: Any, a: Any, b: Any, c: Any) -> Any:
        return result(a, b, c), lambda context, builder, signature, args: emit(builder, *args)

    return op


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Call the LLVM intrinsic `name`, whose operands all have the type of the result."""
    kind = args[0].type
    suffix = f"v{LANES}f32" if kind == _vector else "f32"
    function = builder.module.declare_intrinsic(
        f"{name}.{suffix}", (), ir.FunctionType(kind, [arg.type for arg in args])
    )
    return builder.call(function, args)


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector whose lanes all hold `value`."""
    kind = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _i32(0))
    mask = ir.Constant(_ivector, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), mask)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once on processors with fused multiply-add."""
    return call(builder, "llvm.fmuladd", a, b, c)


def load_vector(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(pointer(builder, address, _vector), align=4)


def load_widened(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """LANES bfloat16 as float32: a bfloat16 is the upper 16 bits of a float32."""
    return _widened(builder, builder.load(pointer(builder, address, _hvector), align=2))


def _widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    bits = builder.shl(builder.zext(halves, _ivector), splat_constant(16))
    return builder.bitcast(bits, _vector)


def _load_int8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    kind = ir.VectorType(ir.IntType(8), LANES)
    return builder.sitofp(builder.load(pointer(builder, address, kind), align=1), _vector)


def _store_int8(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    kind = ir.VectorType(ir.IntType(8), LANES)
    codes = builder.trunc(builder.fptosi(value, _ivector), kind)
    builder.store(codes, pointer(builder, address, kind), align=1)
    return _i64(0)


def _widen_int8(builder: ir.IRBuilder, address: ir.Value, to: ir.Value) -> ir.Value:
    words = ir.VectorType(ir.IntType(16), 2 * LANES)
    halves = [
        builder.bitcast(_load_int8(builder, builder.add(address, _i64(LANES * half))), words)
        for half in range(2)
    ]
    upper = ir.Constant(ir.VectorType(_i32, 2 * LANES), [2 * lane + 1 for lane in range(2 * LANES)])
    builder.store(builder.shuffle_vector(*halves, upper), pointer(builder, to, words), align=2)
    return _i64(0)


def joined(builder: ir.IRBuilder, high: ir.Value, low: ir.Value) -> ir.Value:
    """256 high + low, of vectors of int32, as float32."""
    return builder.sitofp(builder.add(builder.shl(high, splat_constant(8)), low), _vector)


def _joined_at(builder: ir.IRBuilder, high: ir.Value, low: ir.Value) -> ir.Value:
    return joined(builder, *(builder.load(pointer(builder, at, _ivector), align=4) for at in (high, low)))


def splat_constant(value: int) -> ir.Constant:
    return ir.Constant(_ivector, [value] * LANES)


def store_vector(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, pointer(builder, address, value.type), align=4)


def _narrowed(builder: ir.IRBuilder, bits: ir.Value, constant: Callable[[int], ir.Constant]) -> ir.Value:
    """float32 bits rounded to the nearest bfloat16, ties to even; a NaN stays a NaN."""
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    magnitude = builder.and_(bits, constant(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(0x7F800000))
    return builder.select(is_nan, constant(0x7FC0), rounded)


def _store_narrowed(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    halves = builder.trunc(_narrowed(builder, builder.bitcast(value, _ivector), splat_constant), _hvector)
    builder.store(halves, pointer(builder, address, _hvector), align=2)
    return _i64(0)


def _store_rounded(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    if BF16:
        kind = ir.FunctionType(ir.VectorType(BFloat(), LANES), [_vector])
        function = builder.module.declare_intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", (), kind)
        halves = builder.bitcast(builder.call(function, [value]), _hvector)
        builder.store(halves, pointer(builder, address, _hvector), align=2)
    else:
        _store_narrowed(builder, address, value)
        halves = builder.load(pointer(builder, address, _hvector), align=2)
    return _widened(builder, halves)


def _store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    store_vector(builder, address, value)
    return _i64(0)


def _half_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    half = builder.load(pointer(builder, address, ir.IntType(16)))
    return builder.bitcast(builder.shl(builder.zext(half, _i32), _i32(16)), _f32)


def _set_low(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    builder.store(builder.trunc(value, _i32), pointer(builder, address, _i32))
    return _i64(0)


def _set_half(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    half = builder.trunc(_narrowed(builder, builder.bitcast(value, _i32), _i32), ir.IntType(16))
    builder.store(half, pointer(builder, address, ir.IntType(16)))
    return _i64(0)


def _at(kind: ir.Type) -> Emit:
    return lambda builder, address: builder.load(pointer(builder, address, kind))


def _unaligned(kind: ir.Type) -> Emit:
    def emit(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        found = builder.load(pointer(builder, address, kind))
        found.align = 1
        return found

    return emit


def _set(kind: ir.Type) -> Emit:
    def emit(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
        builder.store(value, pointer(builder, address, kind))
        return _i64(0)

    return emit


def prefetch_line(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at `address` into the second-level cache.

    The second-level cache allows more outstanding misses than the first-level cache (48 and 24 on Zen 4). So
    decodes of 1,000 tokens with two threads read 22 GB/s of keys and values instead of 14.
    """
    byte = ir.IntType(8).as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
    )
    # 0: to read. 2: into all levels of cache but the first. 1: data.
    builder.call(function, [builder.inttoptr(address, byte), _i32(0), _i32(2), _i32(1)])


def _permuted(pick: Callable[[int], int]) -> Emit:
    mask = ir.Constant(_ivector, [pick(lane) for lane in range(LANES)])
    return lambda builder, value: builder.shuffle_vector(value, value, mask)


def _lanes_between(builder: ir.IRBuilder, value: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """`value` in lanes [low, high), minus infinity elsewhere."""
    lane = ir.Constant(_ivector, list(range(LANES)))
    inside = builder.and_(
        builder.icmp_signed(">=", lane, splat(builder, builder.trunc(low, _i32))),
        builder.icmp_signed("<", lane, splat(builder, builder.trunc(high, _i32))),
    )
    return builder.select(inside, value, ir.Constant(_vector, [float("-inf")] * LANES))


def _zero_below(builder: ir.IRBuilder, value: ir.Value, bound: ir.Value, other: ir.Value) -> ir.Value:
    """0 where other < bound, else `value`."""
    below = builder.fcmp_ordered("<", other, bound)
    return builder.select(below, ir.Constant(_vector, [0.0] * LANES), value)


def _scaled_by_power(builder: ir.IRBuilder, value: ir.Value, exponent: ir.Value) -> ir.Value:
    """value * 2**exponent for whole exponents in [-126, 127]."""
    if _AVX512:
        name, mask = "llvm.x86.avx512.mask.scalef.ps.512", ir.IntType(16)
        kind = ir.FunctionType(_vector, [_vector, _vector, _vector, mask, _i32])
        function = builder.module.declare_intrinsic(name, (), kind)
        usual_rounding = _i32(4)
        return builder.call(function, [value, exponent, value, mask(0xFFFF), usual_rounding])
    whole = builder.fptosi(exponent, _ivector)
    bits = builder.shl(builder.add(whole, splat_constant(127)), splat_constant(23))
    return builder.fmul(value, builder.bitcast(bits, _vector))


def _reduced(combine: Emit) -> Emit:
    """Reduce all lanes by halving: the order of the operations is fixed."""

    def emit(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        width = LANES
        while width > 1:
            width //= 2
            swapped = [lane ^ width for lane in range(LANES)]
            other = builder.shuffle_vector(value, value, ir.Constant(_ivector, swapped))
            value = combine(builder, value, other)
        return builder.extract_element(value, _i32(0))

    return emit


def _maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two lanes; the lane of b if either is a NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# Scalars in memory.
read_f32, write_f32 = _op1(types.float32, _at(_f32)), _op2(types.int64, _set(_f32))
read_bf16, write_bf16 = _op1(types.float32, _half_at), _op2(types.int64, _set_half)
read_i8 = _op1(
    types.float32,
    lambda builder, address: builder.sitofp(
        builder.load(pointer(builder, address, ir.IntType(8)), align=1), _f32
    ),
)
"""An int8 as float32."""
write_i8 = _op2(
    types.int64,
    lambda builder, address, value: _set(ir.IntType(8))(
        builder, address, builder.fptosi(value, ir.IntType(8))
    ),
)
read_i32 = _op1(types.int32, _at(_i32))
write_low_i32 = _op2(types.int64, _set_low)
"""Write the lower half of an int64 to an address, as an int32."""
read_u64 = _op1(types.uint64, _unaligned(_i64))
read_i64, write_i64 = _op1(types.int64, _at(_i64)), _op2(types.int64, _set(_i64))
fetch_increment = _op1(
    types.int64,
    lambda builder, address: builder.atomic_rmw("add", pointer(builder, address, _i64), _i64(1), "acq_rel"),
)
"""Atomic fetch-and-add of 1 to the int64 at an address, by which threads take work items and count finished
items."""


SPINS = 2000
"""Rounds of busy waiting for another thread (about 30 us). Then the waiting thread yields its core, which the
other thread may need."""


def _spin_until(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    rounds = cgutils.alloca_once_value(builder, _i64(0))
    test, again, offer, done = (
        builder.append_basic_block(name) for name in ("test", "again", "offer", "done")
    )
    builder.branch(test)
    builder.position_at_end(test)
    found = builder.load_atomic(pointer(builder, address, _i64), "acquire", 8)
    builder.cbranch(builder.icmp_signed(">=", found, value), done, again)
    builder.position_at_end(again)
    if "+sse2" in features():
        pause = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), pause), [])
    elif "+neon" in features():
        hint = ir.FunctionType(ir.VoidType(), [_i32])
        builder.call(builder.module.declare_intrinsic("llvm.aarch64.hint", (), hint), [_i32(1)])
    count = builder.add(builder.load(rounds), _i64(1))
    builder.store(count, rounds)
    builder.cbranch(builder.icmp_signed(">", count, _i64(SPINS)), offer, test)
    builder.position_at_end(offer)
    kind = ir.FunctionType(_i32, [])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
    builder.branch(test)
    builder.position_at_end(done)
    return _i64(0)


spin_until = _op2(types.int64, _spin_until)
"""Wait until the int64 at an address, which other threads increment, is at least a value."""


def _transpose_bytes(builder: ir.IRBuilder, address: ir.Value, stride: ir.Value, to: ir.Value) -> ir.Value:
    sixteen = ir.VectorType(ir.IntType(8), 16)
    load, at, rows = _unaligned(sixteen), address, []
    for _ in range(16):
        rows.append(load(builder, at))
        at = builder.add(at, stride)
    # As four rows are transposed by two rounds, each of which interleaves row i and row i + 2:
    # 00 01 02 03, 10 11 12 13, 20 …, 30 …  →  00 20 01 21, 02 22 03 23, 10 30 …, 12 32 …  →  00 10 20 30, …
    joined = [place // 2 + 16 * (place % 2) for place in range(32)]
    for _ in range(4):
        rows = [
            builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, 16), [_i32(k) for k in half]))
            for a, b in zip(rows[:8], rows[8:], strict=True)
            for half in (joined[:16], joined[16:])
        ]
    for index, row in enumerate(rows):
        builder.store(row, pointer(builder, builder.add(to, _i64(16 * index)), sixteen)).align = 1
    return _i64(0)


transpose_bytes = _op3(types.int64, _transpose_bytes)
"""Transpose sixteen rows of 16 bytes, which lie `stride` bytes apart; the columns are written side by
side."""


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    prefetch_line(builder, address)
    return _i64(0)


prefetch = _op1(types.int64, _prefetch)

# Vectors.
load = _op1(vector, load_vector)
load_bf16 = _op1(vector, load_widened)
store, store_bf16 = _op2(types.int64, _store), _op2(types.int64, _store_narrowed)
store_rounded = _op2(vector, _store_rounded)
"""As `store_bf16`, but only for numbers that are 0 or at least 2**-126. Returns the rounded numbers."""
load_int8, store_int8 = _op1(vector, _load_int8), _op2(types.int64, _store_int8)
"""LANES int8 as float32, and whole numbers in [-128, 127] as int8."""
widen_int8 = _op2(types.int64, _widen_int8)
"""Write the 2 * LANES int8 at an address to another as bfloat16, which is exact."""
joined_int32 = _op2(vector, _joined_at)
"""256 a + b of the vectors of int32 at two addresses, as float32."""
broadcast = _op1(vector, splat)
add = _op2(vector, lambda builder, a, b: builder.fadd(a, b))
sub = _op2(vector, lambda builder, a, b: builder.fsub(a, b))
mul = _op2(vector, lambda builder, a, b: builder.fmul(a, b))
div = _op2(vector, lambda builder, a, b: builder.fdiv(a, b))
fma = _op3(vector, fused)
maximum = _op2(vector, _maximum)
minimum = _op2(vector, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
nearest = _op1(vector, lambda builder, a: call(builder, "llvm.rint", a))
lanes_between = _op3(vector, _lanes_between)
zero_below = _op3(vector, _zero_below)
scaled_by_power = _op2(vector, _scaled_by_power)
even_lanes = _op1(vector, _permuted(lambda lane: lane & ~1))
"""Turns (a, b, c, d, ...) into (a, a, c, c, ...)."""
odd_lanes = _op1(vector, _permuted(lambda lane: lane | 1))
"""Turns (a, b, c, d, ...) into (b, b, d, d, ...)."""
swapped_lanes = _op1(vector, _permuted(lambda lane: lane ^ 1))
"""Turns (a, b, c, d, ...) into (b, a, d, c, ...)."""
negated_even_lanes = _op1(
    vector,
    lambda builder, a: builder.fmul(a, ir.Constant(_vector, [1.0 if i % 2 else -1.0 for i in range(LANES)])),
)
first_lane = _op1(types.float32, lambda builder, a: builder.extract_element(a, _i32(0)))
sum_lanes = _op1(types.float32, _reduced(lambda builder, a, b: builder.fadd(a, b)))
max_lanes = _op1(types.float32, _reduced(_maximum))


@part
def splat_f32(value):  # type: ignore[no-untyped-def]
    return broadcast(types.float32(value))


@part
def round_up(value, unit):  # type: ignore[no-untyped-def]
    """`value` rounded up to a multiple of `unit`."""
    return (value + unit - 1) // unit * unit


@part
def load_as(address, bf16):  # type: ignore[no-untyped-def]
    """LANES numbers of a bfloat16 or float32 row."""
    return load_bf16(address) if bf16 else load(address)


@part
def store_as(address, value, bf16):  # type: ignore[no-untyped-def]
    if bf16:
        store_bf16(address, value)
    else:
        store(address, value)


@part
def read_as(address, bf16):  # type: ignore[no-untyped-def]
    """One number of a bfloat16 or float32 row."""
    return read_bf16(address) if bf16 else read_f32(address)


@part
def write_as(address, value, bf16):  # type: ignore[no-untyped-def]
    if bf16:
        write_bf16(address, value)
    else:
        write_f32(address, value)


@part
def _exp2_slope(f):  # type: ignore[no-untyped-def]
    """Q(f) = (2**f - 1) / f for |f| <= 1/2.

    A polynomial of degree 5 from the Remez exchange algorithm, minimising the relative error of
    1 + f * Q(f): 2.6e-9, far below float32's rounding (6e-8).
    """
    q = splat_f32(0.000155946781613)
    q = fma(q, f, splat_f32(0.00134066439024))
    q = fma(q, f, splat_f32(0.00961769297299))
    q = fma(q, f, splat_f32(0.0555031055101))
    q = fma(q, f, splat_f32(0.240226527829))
    return fma(q, f, splat_f32(0.693147214968))


@part
def exp2(x):  # type: ignore[no-untyped-def]
    """2**x for x <= 127, exactly 1 at 0, and 0 below -126.

    Within 1.01 units in the last place, or 1.5 on processors without fused multiply-add.
    """
    bound = splat_f32(-126.0)
    clamped = maximum(bound, x)  # in this order a NaN stays a NaN
    whole = nearest(clamped)
    fraction = sub(clamped, whole)
    power = fma(_exp2_slope(fraction), fraction, splat_f32(1.0))
    return zero_below(scaled_by_power(power, whole), bound, x)


@part
def tanh(x):  # type: ignore[no-untyped-def]
    """(e - 1) / (e + 1) with e = exp(2x), taken as t / (t + 2) with t = e - 1, to keep small x exact."""
    power = mul(x, splat_f32(2.8853900817779268))  # 2 log2(e): 2**power = exp(2x)
    power = minimum(splat_f32(28.8539), maximum(splat_f32(-28.8539), power))  # tanh(10) rounds to 1
    whole = nearest(power)
    fraction = sub(power, whole)
    one = splat_f32(1.0)
    rest = mul(_exp2_slope(fraction), fraction)
    t = fma(rest, scaled_by_power(one, whole), sub(scaled_by_power(one, whole), one))
    return div(t, add(t, splat_f32(2.0)))


@intrinsic
def as_pointer(typing: Any, address: Any) -> Any:
    """An int64 address as a void pointer, for `numba.carray`."""
    return types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(
        args[0], context.get_value_type(types.voidptr)
    )
