"""Products with packed weights: compiled and twin against float64, and the bits that may not change."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from ramify.kernels.cpu import linear as compiled
from ramify.kernels.cpu.codegen import dots
from ramify.kernels.registry import ops
from ramify.kernels.weights.packed import PackedWeight, in_order, pack, unpack
from ramify.kernels.weights.rows import Rows, quantised
from tests.kernels.backends import CPU

TORCH = ops("torch")
DTYPES = [torch.float32, torch.bfloat16]
FORMS = ["f32", "bf16", "int8/16", "int8/64", "int4/32", "int4/128", "int8/32 wide", "int4/32 wide"]
FORMS += ["int8/64 offsets", "table/32", "table/32 ordered", "fp8/128"]
IQ4_NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).char()
"""A table that looks like no other numbers do (ggml's `kvalues_iq4nl`)."""
SHAPES = [(576, 576), (16, 1), (1, 33), (50, 40), (3, 100), (130, 1537)]
ROWS = [1, 2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 70]


def weights(form: str, outputs: int, inputs: int) -> Rows:
    name, _, rest = form.partition("/")
    plain = torch.randn(outputs, inputs)
    if name in ("f32", "bf16"):
        return Rows(plain if name == "f32" else plain.bfloat16())
    group, _, wide = rest.partition(" ")
    groups = -(-inputs // int(group)) if group else 1
    factors = torch.rand(outputs, groups) + 0.5
    if name == "table":
        codes = torch.randint(16, (outputs, inputs)).byte()
        order = torch.randperm(inputs) if wide == "ordered" else None
        return Rows(codes, factors.bfloat16() / 64, table=IQ4_NL, group=int(group), order=order)
    if name == "fp8":
        return Rows(plain.to(torch.float8_e4m3fn), factors, group=int(group or 0))
    if wide == "offsets":
        numbers = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
        return Rows(numbers, factors / 100, torch.randn(outputs, groups), group=int(group))
    rows = quantised(plain, "int8" if name == "int8" else "int4", int(group))
    if wide:  # scales that float16 does not hold
        offsets = None if rows.offsets is None else rows.offsets.float() * 1.0001
        rows = Rows(rows.numbers, rows.factors.float() * 1.0001, offsets)
    return rows


def packed(form: str, outputs: int, inputs: int, *, gated: bool = False, bias: bool = True) -> PackedWeight:
    given = torch.randn(outputs) if bias else None
    return pack(weights(form, outputs, inputs), inputs=inputs, bias=given, gated=gated)


def is_tiled(x: torch.Tensor, weight: PackedWeight) -> bool:
    return compiled.way_for(len(x), weight.format, x.dtype) == compiled.BY_TILES


def rounded(weight: PackedWeight) -> PackedWeight:
    """The weight rounded to bfloat16, as tiles take it."""
    bias = in_order(weight.bias.view(-1, 16), weight)
    return pack(Rows(unpack(weight).bfloat16()), inputs=weight.inputs, bias=bias, gated=weight.gated)


def test_the_ways_of_this_machine_are_covered():
    """The ways of this machine, which the tests below run; `test_registry` imitates other machines."""
    ways = {
        compiled.way_for(rows, form, torch.bfloat16) for rows in ROWS for form in ("bf16", "int8", "int4")
    }
    assert (compiled.BY_TILES in ways) == compiled.tiles_allowed()
    assert (compiled.BY_DOTS in ways) == dots.DOTS


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_packing_loses_nothing(form, shape):
    rows = weights(form, *shape)
    assert torch.equal(unpack(pack(rows, inputs=shape[1])), rows.values()[:, : shape[1]])
    if shape[0] % 2 == 0:
        assert torch.equal(unpack(pack(rows, inputs=shape[1], gated=True)), rows.values()[:, : shape[1]])


@pytest.mark.parametrize(("form", "steps"), [("int8", 254), ("int4", 15)])
def test_rounding_is_to_the_nearest_step(form, steps):
    plain = torch.randn(20, 100) * torch.logspace(-3, 1, 20)[:, None]
    plain[3, :32], plain[4, :32], plain[5, :32] = 0.0, 1.0, -0.25
    found = quantised(plain, form, 32).values()[:, :100]
    padded = torch.nn.functional.pad(plain, (0, 28)).view(20, 4, 32)
    span = padded.amax(-1) - padded.amin(-1) if form == "int4" else 2 * padded.abs().amax(-1)
    # Half a step, and what float16 scales add: 2^-11 of the factor (at every step) and of the offset.
    bound = span / steps / 2 + 2**-10 * padded.abs().amax(-1) + 2**-24 * steps
    assert ((found - plain).abs() <= bound.repeat_interleave(32, 1)[:, :100]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_against_float64(form, shape, dtype):
    """Results are within float32's rounding of each step. Tiles multiply by weights rounded to bfloat16."""
    outputs, inputs = shape
    weight = packed(form, outputs, inputs, bias=inputs % 2 == 0)
    exact_weight = unpack(weight).double()
    bias = weight.bias[:outputs].double() if len(weight.bias) else torch.zeros(outputs)
    for count in ROWS:
        x = torch.randn(count, inputs).to(dtype)
        # A number and its offset may cancel, so both count.
        magnitude = x.double().abs() @ weight_parts(weight).t() + bias.abs()
        bound = magnitude * 2**-24 * 4 * (inputs + 8) ** 0.5 + 1e-30
        for backend, tiled in ((CPU, is_tiled(x, weight)), (TORCH, False)):
            out = torch.full((count, outputs), torch.nan)
            assert backend.linear(x, weight, out=out) is out
            seen = exact_weight.bfloat16().double() if tiled else exact_weight
            exact = x.double() @ seen.t() + bias
            assert ((out.double() - exact).abs() <= bound).all(), (count, backend is CPU)
        narrow = CPU.linear(x, weight)
        assert narrow.dtype == dtype
        assert torch.equal(narrow, CPU.linear(x, weight, out=torch.full(out.shape, torch.nan)).to(dtype))


def weight_parts(weight: PackedWeight) -> torch.Tensor:
    """|factor * number| + |offset| of every weight, (outputs, inputs)."""
    if not weight.has_offsets:
        return unpack(weight).double().abs()
    factors, offsets = weight.scales.clone(), weight.scales.clone()
    factors[..., 16:], offsets[..., :16] = 0, 0
    return sum(unpack(dataclasses.replace(weight, scales=part)).double().abs() for part in (factors, offsets))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_follows_the_product(form, dtype):
    """Bias, gate, addition to `out` and a norm before, as in the reference."""
    for half in (48, 37):
        weight = packed(form, 2 * half, 90, gated=True)
        for count in (1, 3, 20):
            x, norm = torch.randn(count, 90).to(dtype), (torch.rand(90).to(dtype) + 0.5, 1e-5)
            for options in ({}, {"norm": norm}, {"add": True}, {"norm": norm, "add": True}):
                before = torch.randn(count, half)
                found = CPU.linear(x, weight, out=before.clone(), **options)
                seen = rounded(weight) if is_tiled(x, weight) else weight
                wanted = TORCH.linear(x, seen, out=before.clone(), **options)
                if dtype == torch.bfloat16 and "norm" in options:
                    # Two norms may round a number of x to different sides, 2^-8 of it, and the gate
                    # multiplies what comes of that: no bound for each number, but few differ.
                    assert torch.linalg.norm(found - wanted) <= 2**-8 * torch.linalg.norm(wanted)
                    continue
                # Numbers and offsets cancel.
                close = 1e-4 if weight.has_offsets else 1e-5
                torch.testing.assert_close(found, wanted, atol=close * 10, rtol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_before_the_product_changes_no_bit(form, dtype):
    weight = packed(form, 64, 100)
    norm = (torch.rand(100).to(dtype), 1e-6)
    for count in (1, 2, 4, 7, 40):
        x = torch.randn(count, 100).to(dtype)
        separate = CPU.linear(CPU.rms_norm(x, *norm), weight)
        assert torch.equal(CPU.linear(x, weight, norm=norm), separate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form, dtype):
    """Within one way of multiplying, a row's bits do not depend on the other rows, even if these are NaN."""
    weight = packed(form, 130, 200)
    x = torch.randn(70, 200).to(dtype)
    by_way: dict[int, torch.Tensor] = {}
    for count in (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 31, 32, 33, 48, 70):
        way = compiled.way_for(count, weight.format, dtype)
        first = CPU.linear(x[:count], weight)
        last = CPU.linear(x[70 - count :], weight)
        if way not in by_way:
            others = torch.full((80, 200), torch.nan, dtype=dtype)
            chunks = [torch.cat([row[None], others[: count - 1]]) for row in x]
            by_way[way] = torch.stack([CPU.linear(chunk, weight)[0] for chunk in chunks])
        assert torch.equal(first, by_way[way][:count])
        assert torch.equal(last, by_way[way][70 - count :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["f32", "bf16", "int8/32", "int4/32", "table/32", "fp8"])
def test_by_row_the_number_of_rows_changes_no_bit(form, dtype):
    weight = packed(form, 130, 200)
    x = torch.randn(40, 200).to(dtype)
    by_row = functools.partial(compiled.linear, by_row=True)
    alone = torch.cat([by_row(row[None], weight) for row in x])
    for count in (2, 3, 5, 8, 17, 40):
        assert torch.equal(by_row(x[:count], weight), alone[:count])


@pytest.mark.parametrize("form", ["bf16", "int4/32", "int8/16", "fp8/128"])
def test_blocks_of_rows_and_inputs_change_no_bit(form):
    """More rows than a block of tiles has, inputs that end in a part of a block, and rows so few that decoded
    weights are overwritten."""
    weight = packed(form, 40, 600)
    x = torch.randn(compiled.MOST_TILE_ROWS + 76, 600).bfloat16()
    found = CPU.linear(x, weight)
    for part in (slice(0, 40), slice(compiled.MOST_TILE_ROWS - 20, None), slice(0, 7), slice(9, 41)):
        assert torch.equal(found[part], CPU.linear(x[part], weight))


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("form", ["bf16", "int8/32", "int4/32"])
def test_threads_change_no_bit(form):
    weight = packed(form, 1000, 300, gated=True)
    for dtype in DTYPES:
        for count in (1, 6, 40):
            x = torch.randn(count, 300).to(dtype)
            results = []
            for threads in (1, 2, 3, 7):
                torch.set_num_threads(threads)
                results.append(CPU.linear(x, weight))
            assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_neighbours(dtype):
    """Rows of x and of the result may lie apart; what is between them stays."""
    weight = packed("int4/32", 50, 64)
    for count in (1, 4, 19, 40):
        wide_x = torch.randn(count, 100).to(dtype)
        wide_out = torch.full((count, 90), 7.0, dtype=dtype)
        out = CPU.linear(wide_x[:, 20:84], weight, out=wide_out[:, 30:80])
        assert torch.equal(out, CPU.linear(wide_x[:, 20:84].contiguous(), weight))
        assert (wide_out[:, :30] == 7.0).all()
        assert (wide_out[:, 80:] == 7.0).all()


def test_no_rows():
    assert CPU.linear(torch.zeros(0, 64), packed("bf16", 8, 64)).shape == (0, 8)


def test_large_gates_neither_overflow_nor_vanish():
    rows = Rows(torch.tensor([[1.0], [1.0]]).bfloat16())
    weight = pack(rows, inputs=1, gated=True)
    gates = torch.tensor([[-1e4], [-100.0], [-20.0], [0.0], [50.0], [1e4]])
    found = CPU.linear(gates, weight)
    torch.testing.assert_close(found, torch.nn.functional.silu(gates) * gates, atol=1e-30, rtol=1e-5)


X, WEIGHT = torch.zeros(3, 64), pack(Rows(torch.zeros(16, 64).bfloat16()), inputs=64)


@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(3, 32)}, "x is"),
        ({"x": X.half()}, "x is"),
        ({"x": torch.zeros(64, 3).t()}, "x is"),
        ({"out": torch.zeros(3, 8)}, "out must be"),
        ({"out": torch.zeros(3, 16).half()}, "out must be"),
        ({"out": torch.zeros(16, 3).t()}, "out must be"),
        ({"add": True}, "no out"),
        ({"norm": (torch.ones(32), 1e-5)}, "norm"),
        ({"norm": (torch.ones(64).bfloat16(), 1e-5)}, "norm"),
    ],
)
def test_refusals_name_the_argument(backend, change, words):
    arguments = {"x": X, "weight": WEIGHT, **change}
    with pytest.raises(ValueError, match=words):
        backend.linear(arguments.pop("x"), arguments.pop("weight"), **arguments)
