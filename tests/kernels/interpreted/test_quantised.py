"""Products with quantised weights in Triton's interpreter: right, and the same bits for any rows beside."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ramify.kernels.reference import quantised as reference
from ramify.kernels.triton import quantised
from ramify.kernels.weights.quantised import QuantisedWeight, lay_out
from ramify.kernels.weights.rows import Rows
from ramify.kernels.weights.rows import quantised as rounded
from tests.kernels.quantised_cases import FORMS, GGUF, check, rows_of, weight_of

HALF = torch.float16


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


@pytest.mark.parametrize(("form", "group"), [*FORMS, *GGUF], ids=str)
def test_product(form: str, group: int) -> None:
    check(form, group, (3, 70, 160), HALF)
    check(form, group, (18, 130, 96), HALF, bias=True)


@pytest.mark.parametrize("add", [False, True])
def test_parts_bias_and_sum(add: bool) -> None:
    check("int4", 32, (2, 40, 1100), HALF, bias=True, add=add)
    check("int8 offsets", 64, (66, 30, 1056), torch.float32, bias=True, add=add)


def test_the_number_of_rows_changes_no_bit_by_row(launches) -> None:
    weight, x = weight_of("int4", 128, 40, 2500), torch.randn(70, 2500, dtype=HALF)
    whole = quantised.quantised_matmul(x, weight, by_row=True)
    few = quantised.quantised_matmul(x[:7], weight, by_row=True)
    quantised.quantised_matmul(x[:7], weight)
    seen = launches.forms("_quantised_product")
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
