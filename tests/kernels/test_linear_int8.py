"""Products whose x is rounded to int8 or int16: against float64 of rounded x, and the bits that stay."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest
import torch

from ramify.kernels.cpu import linear as compiled
from ramify.kernels.cpu.packed_linear.byte_dots import FORMS as TAKEN
from ramify.kernels.cpu.packed_linear.byte_dots import INT16_X
from ramify.kernels.registry import ops
from ramify.kernels.weights.packed import PackedWeight, pack, unpack
from ramify.kernels.weights.rows import quantised
from tests.kernels.test_linear import ROWS, SHAPES, packed, weight_parts

CPU, TORCH = ops("cpu"), ops("torch")
FORMS = ["int8/16", "int8/64", "int4/32", "int4/128", "int8/32 wide", "int4/32 wide"]
FORMS += ["int8/64 offsets", "table/32", "table/32 ordered"]
ROUNDED = [
    form
    for form in FORMS
    if form.partition("/")[0].replace("table", "int4") in TAKEN or (INT16_X and form.startswith("int8"))
]
LINEAR, EXACT = (functools.partial(compiled.linear, **{way: True}) for way in ("int8", "by_row"))
BY_ROW, BY_ROW_INT16 = (functools.partial(EXACT, **{way: True}) for way in ("int8", "int16"))

needs_bytes = pytest.mark.skipif(not TAKEN, reason="int8 is not taken on this processor")


def rounded(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """(T, inputs) float64: each group of inputs in 127 steps to its largest magnitude; in int16, 32,767."""
    limit = 127 if weight.format in TAKEN else 32767
    wide = torch.nn.functional.pad(x.double(), (0, weight.padded_inputs - weight.inputs))
    if len(weight.order):
        wide = torch.cat([wide[:, weight.order], wide[:, weight.inputs :]], 1)
    groups = wide.unflatten(1, (-1, weight.group))
    most = groups.abs().amax(-1, keepdim=True).float()
    steps = torch.full_like(most, limit) / most  # limit / most would be rounded twice
    steps[most == 0] = 0
    numbers = (groups * steps.double()).round()
    found = (numbers * (most / limit).double()).flatten(1)[:, : weight.inputs]
    return found[:, torch.argsort(weight.order)] if len(weight.order) else found


@needs_bytes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_against_float64(form, shape, dtype):
    """Groups are summed exactly, and added up within float32's rounding."""
    outputs, inputs = shape
    weight = packed(form, outputs, inputs, bias=inputs % 2 == 0)
    bias = weight.bias[:outputs].double() if len(weight.bias) else torch.zeros(outputs)
    for count in ROWS:
        x = (torch.randn(count, inputs) * torch.logspace(-3, 3, count)[:, None]).to(dtype)
        seen = rounded(x, weight)
        exact = seen @ unpack(weight).double().t() + bias
        # A number and its offset may cancel, so both count.
        parts = seen.abs() @ weight_parts(weight).t() + bias.abs()
        out = torch.full((count, outputs), torch.nan)
        assert BY_ROW(x, weight, out=out) is out
        assert (
            (out.double() - exact).abs() <= parts * 2**-24 * 4 * (inputs / weight.group + 8) + 1e-30
        ).all()
        narrow = BY_ROW(x, weight)
        assert narrow.dtype == dtype
        assert torch.equal(narrow, out.to(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_it_is_close_to_the_product_that_rounds_nothing(form):
    """The way is chosen with and without the instruction, and where tiles are used instead."""
    weight = packed(form, 130, 200)
    for count in (1, 3, 8, 40):
        x = torch.randn(count, 200).bfloat16()
        wanted = TORCH.linear(x, weight, out=torch.empty(count, 130))
        found = LINEAR(x, weight, out=torch.empty(count, 130))
        assert torch.linalg.norm(found - wanted) <= 0.01 * torch.linalg.norm(wanted)


@needs_bytes
@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_follows_and_precedes_the_product(form, dtype):
    """A norm, bias, gate and addition give the bits of separate calls."""
    weight, plain = packed(form, 96, 90, gated=True), packed(form, 37, 90)
    norm = (torch.rand(90).to(dtype) + 0.5, 1e-5)
    for count in (1, 3, 20, 70):
        x = torch.randn(count, 90).to(dtype)
        normed = CPU.rms_norm(x, *norm)
        assert torch.equal(BY_ROW(x, weight, norm=norm), BY_ROW(normed, weight))
        before = torch.randn(count, 37)
        product = BY_ROW(x, plain, out=torch.empty(count, 37))
        assert torch.equal(BY_ROW(x, plain, out=before.clone(), add=True), product + before)
        bits = TORCH.linear(rounded(x, weight).float(), weight)
        close = 1e-3 if weight.has_offsets else 1e-4
        torch.testing.assert_close(
            BY_ROW(x, weight, out=torch.empty(count, 48)), bits, atol=10 * close, rtol=close
        )


@pytest.mark.parametrize("form", ["int8/32", "int4/32", "bf16"])
def test_a_row_depends_on_nothing_else(form):
    """A row's bits do not depend on the number of rows, the other rows (even NaN) or the threads."""
    weight = packed(form, 1000, 200)
    x = torch.randn(70, 200).bfloat16()
    alone = torch.cat([BY_ROW(row[None], weight) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for count in (2, 3, 5, 8, 17, 33, 70):
                assert torch.equal(BY_ROW(x[:count], weight), alone[:count])
                assert torch.equal(BY_ROW(x[70 - count :], weight), alone[70 - count :])
    finally:
        torch.set_num_threads(before)
    beside = x.clone()
    beside[1::2] = torch.nan
    assert torch.equal(BY_ROW(beside, weight)[::2], alone[::2])
    assert BY_ROW(beside, weight)[1::2].isnan().all()


@pytest.mark.parametrize(
    "product",
    [LINEAR, BY_ROW, BY_ROW_INT16, EXACT],
    ids=["int8", "int8 by row", "int16 by row", "exact by row"],
)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_zeros_and_numbers_at_the_edges(form, product):
    """No sum of rounded x overflows. Float32 holds what it does in any order of addition: numbers whose
    products with the codes of the weights, up to 127, have magnitudes with a finite sum. The order differs
    between processors (pairs, chains)."""
    weight = pack(quantised(torch.ones(16, 32), form, 32), inputs=32)  # type: ignore[arg-type]
    exact = unpack(weight).double().sum(1)
    way = compiled.way_for(2, form, torch.bfloat16, **product.keywords)
    largest = 3e38 if way in (compiled.BY_INT8, compiled.BY_INT16) else 3e38 / (32 * 128)
    for value in (0.0, 1e-38, 1e-30, largest):
        x = torch.full((2, 32), value).bfloat16()
        x[:, 1::2] *= -1
        x[:, 0] = 0
        found = product(x, weight, out=torch.empty(2, 16)).double()
        assert (found + x[0, 2].double() * exact / 32).abs().max() <= 0.01 * abs(value) + 1e-29
    infinite = torch.zeros(1, 32).bfloat16()
    infinite[0, 3] = torch.inf
    assert not product(infinite, weight).isfinite().any()


TARGETS = {
    "haswell": "+avx,+avx2,+fma,+f16c,+ssse3,+sse2",
    "skylake-avx512": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq",
    "cascadelake": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni",
    "znver4": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,+avx512bf16",
    "alderlake": "+avx,+avx2,+fma,+f16c,+avxvnni",
}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TARGETS)
def test_edges_in_the_code_for_another_processor(name):
    """The same tests for every target whose instructions this machine has; most of the time is compiling."""
    here = llvm.get_host_cpu_features()
    if missing := [each for each in TARGETS[name].split(",") if not here.get(each[1:])]:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    environment = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": TARGETS[name]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "edges and not another"]
    result = subprocess.run(
        [*command, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_what_is_rounded():
    """x is rounded for int8 and int4 weights if asked for and if the processor is faster with it."""
    for rows, dtype in itertools.product((1, 100), (torch.bfloat16, torch.float32)):
        for form in ("int8", "int4"):
            assert compiled.way_for(rows, form, dtype) not in (compiled.BY_INT8, compiled.BY_INT16)
            way = compiled.way_for(rows, form, dtype, by_row=True, int8=True)
            assert (way == compiled.BY_INT8) == (form in TAKEN)
            if INT16_X and form == "int8":
                assert way in (compiled.BY_INT8, compiled.BY_INT16)
                assert compiled.way_for(rows, form, dtype, by_row=True, int16=True) == compiled.BY_INT16
        for form in ("bf16", "f32", "fp8"):
            way = compiled.way_for(rows, form, dtype, by_row=True)
            assert compiled.way_for(rows, form, dtype, by_row=True, int8=True) == way


@pytest.mark.skipif(not compiled.tiles_allowed(), reason="the processor has no AMX tiles")
def test_few_rows_are_rounded_and_many_go_by_tiles():
    """16 rows by tiles take as long as TILE_FROM_ROUNDED rows of x in int8."""
    few, many = compiled.TILE_FROM_ROUNDED - 1, compiled.TILE_FROM_ROUNDED
    for form in TAKEN:
        for by_row in (False, True):
            way = functools.partial(
                compiled.way_for, form=form, dtype=torch.bfloat16, int8=True, by_row=by_row
            )
            assert way(few) == compiled.BY_INT8
            assert way(many) == (compiled.BY_INT8 if by_row else compiled.BY_TILES)
        assert compiled.way_for(few, form, torch.bfloat16) == compiled.BY_TILES


@pytest.mark.skipif(not INT16_X, reason="x is not rounded to int16 on this processor")
def test_long_groups_stay_float32():
    """An outlier would cost all inputs of its group their precision."""
    x = torch.randn(3, 1024).bfloat16()
    for group, float32 in ((512, False), (1024, True)):
        weight = pack(quantised(torch.randn(48, 1024), "int8", group), inputs=1024)
        rounding, exact = (linear(x, weight, out=torch.empty(3, 48)) for linear in (BY_ROW_INT16, EXACT))
        assert torch.equal(rounding, exact) == float32
        assert torch.linalg.norm(rounding - exact) <= 1e-4 * torch.linalg.norm(exact)


@needs_bytes
@pytest.mark.parametrize(
    ("form", "group"), [("int8", 32), ("int8", 512), ("int4", 16), ("int4", 32), ("int4", 48)]
)
def test_the_largest_sums(form, group):
    """Sums of products in int16, and of products of int16, do not overflow."""
    inputs = max(96, group)
    weight = pack(quantised(torch.where(torch.rand(48, inputs) > 0.1, 1.0, -1.0), form, group), inputs=inputs)
    for sign in (1, -1):
        x = torch.full((5, inputs), 127.0 * sign)
        exact = x.double() @ unpack(weight).double().t()
        parts = x.abs().double() @ weight_parts(weight).t()
        assert ((BY_ROW(x, weight).double() - exact).abs() <= parts * 2**-20).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_head_is_rounded_to_int16_at_most(deterministic):
    kernels = ops("cpu", deterministic=deterministic, int8=True)
    mask = torch.full((1, 7), -1, dtype=torch.int32)
    for form in ("int8/32 wide", "int4/32"):
        weight = packed(form, 200, 96, bias=False)
        x = torch.randn(3, 96).bfloat16()
        exact = x.double() @ unpack(weight).double().t()
        found = kernels.linear(x, weight, out=torch.empty(3, 200))
        assert torch.linalg.norm(found - exact) <= 1e-4 * torch.linalg.norm(exact)
        if INT16_X:
            assert torch.equal(found, BY_ROW_INT16(x, weight, out=torch.empty(3, 200)))
            same = torch.equal(found, EXACT(x, weight, out=torch.empty(3, 200)))
            assert same == (weight.format == "int4")
        under_mask = kernels.masked_linear(
            x, weight, mask, torch.zeros(3, dtype=torch.int32), out=torch.empty(3, 200)
        )
        assert torch.equal(under_mask, found)
        assert kernels.layer_linear is not None
        layer = kernels.layer_linear(x, weight, out=torch.empty(3, 200))
        assert torch.equal(layer, (BY_ROW if deterministic else LINEAR)(x, weight, out=torch.empty(3, 200)))
    assert ops("cpu", deterministic=deterministic).layer_linear is None
