"""Products with quantised weights in Triton's interpreter: right, and the same bits for any rows beside."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ramify.kernels.quantised import QuantisedWeight, lay_out
from ramify.kernels.reference import quantised as reference
from ramify.kernels.rows import Rows
from ramify.kernels.rows import quantised as rounded
from ramify.kernels.triton import quantised
from ramify.kernels.triton.interpret import INTERPRETED
from tests.kernels import ops_cases as cases

assert INTERPRETED
HALF = torch.float16
SHIFTED, E2M1 = torch.arange(-8, 8, dtype=torch.int8), torch.tensor([0, 1, 2, 3, 4, 6, 8, 12] * 2).char()


def rows_of(form: str, outputs: int, inputs: int, group: int) -> Rows:
    """Rows as the readers of checkpoints give them: `group` 0 is one factor for an output."""
    made = torch.Generator().manual_seed(1)
    shape, groups = (outputs, inputs), -(-inputs // group) if group else 1
    factors = (torch.rand(outputs, groups, generator=made) + 0.5) / 64
    offsets = -8 * factors * torch.rand(outputs, groups, generator=made)
    codes = torch.randint(256, shape, generator=made, dtype=torch.uint8)
    if form == "fp8":
        numbers = (4 * torch.randn(shape, generator=made)).to(torch.float8_e4m3fn)
        return Rows(numbers, factors, group=group)
    if form.startswith("int8"):
        return Rows(codes.view(torch.int8), factors, offsets if "offsets" in form else None, group=group)
    table = SHIFTED if "shifted" in form else E2M1 if "table" in form else None
    order = torch.randperm(inputs, generator=made).int() if "order" in form else None
    offsets_ = offsets if table is None else None
    return Rows(codes & 15, factors.half(), offsets_, table, group=group, order=order)


FORMS = [
    ("int4", 128),
    ("int4 shifted", 64),
    ("int4 order", 32),
    ("int4 table", 32),
    ("int8 offsets", 16),
    ("int8", 128),
    ("fp8", 0),
    ("fp8", 128),
]


@pytest.mark.parametrize(("form", "group"), FORMS, ids=str)
def test_the_layout_has_the_values(form: str, group: int) -> None:
    rows = rows_of(form, 5, 160, group)
    laid = lay_out(rows, inputs=160, device="cpu")
    assert laid is not None
    assert torch.equal(laid.values(), rows.values())
    kept = {"int4 table": 8}.get(form, 4 if form.startswith("int4") else 8)
    assert laid.numbers.numel() * 8 == 5 * laid.padded * kept


def test_rows_of_floats_have_no_layout() -> None:
    assert lay_out(Rows(torch.zeros(4, 32)), inputs=32, device="cpu") is None


def check(form: str, group: int, shape: tuple[int, int, int], dtype: torch.dtype, **given: bool) -> None:
    """(rows, outputs, inputs); x is strided, and what lies behind it is NaN."""
    rows, outputs, inputs = shape
    weight = lay_out(rows_of(form, outputs, inputs, group), inputs=inputs, device="cpu")
    assert weight is not None
    x = cases.poisoned(rows, inputs + 3, dtype=dtype, device="cpu")[:, :inputs]
    x.copy_(cases.random(rows, inputs, dtype=dtype, device="cpu"))
    bias = cases.random(outputs, dtype=dtype, device="cpu", seed=2) if given.get("bias") else None
    wide = cases.poisoned(rows, outputs + 5, dtype=dtype, device="cpu")
    add = given.get("add", False)
    out = wide[:, :outputs]
    if add:
        out.copy_(cases.random(rows, outputs, dtype=dtype, device="cpu", seed=3))
    wanted = out.clone() if add else None
    wanted = reference.quantised_matmul(x, weight, bias, out=wanted, add=add)
    assert quantised.quantised_matmul(x, weight, bias, out=out, add=add) is out
    # Both round once, and their float32 sums differ in the order alone.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out, wanted, rtol=2 * step, atol=1e-5 * wanted.abs().max().item())
    assert wide[:, outputs:].isnan().all(), "written beyond its rows"


@pytest.mark.parametrize(("form", "group"), FORMS, ids=str)
def test_product(form: str, group: int) -> None:
    check(form, group, (3, 70, 160), HALF)
    check(form, group, (18, 130, 96), HALF, bias=True)


@pytest.mark.parametrize("add", [False, True])
def test_parts_bias_and_sum(add: bool) -> None:
    check("int4", 32, (2, 40, 1100), HALF, bias=True, add=add)
    check("int8 offsets", 64, (66, 30, 1056), torch.float32, bias=True, add=add)


def test_the_number_of_rows_changes_no_bit_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = cases.forms(monkeypatch, quantised, "_quantised_product")
    weight = lay_out(rows_of("int4", 40, 2500, 128), inputs=2500, device="cpu")
    assert weight is not None
    x = torch.randn(70, 2500, dtype=HALF)
    whole = quantised.quantised_matmul(x, weight, by_row=True)
    few = quantised.quantised_matmul(x[:7], weight, by_row=True)
    quantised.quantised_matmul(x[:7], weight)
    assert [(form["SPREAD"], form["ROWS"]) for form in seen] == [(False, 64), (True, 64), (True, 16)]
    assert torch.equal(whole[:7], few)


@pytest.mark.parametrize("module", [reference, quantised], ids=["twin", "kernel"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.int32)}, "x is"),
        ({"x": torch.zeros(2, 63)}, "x is"),
        ({"bias": torch.zeros(5)}, "bias"),
        ({"out": torch.zeros(2, 5)}, "out must be"),
        ({"add": True}, "no out to add to"),
    ],
)
def test_refusals_name_the_argument(module, change, words) -> None:
    weight = lay_out(rounded(torch.randn(4, 64), "int4", 32), inputs=64, device="cpu")
    assert isinstance(weight, QuantisedWeight)
    assert dataclasses.astuple(weight)[0] == "int4"
    given = {"x": torch.zeros(2, 64), "weight": weight}
    with pytest.raises(ValueError, match=words):
        module.quantised_matmul(**{**given, **change})
