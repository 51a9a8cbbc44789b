"""Norms, activation, rotary store and page copies in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.triton import activation, kv_store, norm, rope
from tests.kernels import ops_cases as cases

CPU = "cpu"


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.NORM_SHAPES)
def test_norm(shape, dtype):
    cases.check_norm(shape, dtype, CPU)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in cases.NORM_SHAPES if len(shape) == 2])
def test_norm_of_a_sum(shape, dtype):
    cases.check_add_norm(shape, dtype, CPU)


def test_norm_of_zeros_and_of_large_numbers():
    cases.check_norm_of_extremes()


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.GATED_SHAPES)
def test_activation(shape, dtype):
    cases.check_gated(shape, dtype, CPU)


def test_activation_far_out():
    x = torch.tensor([[1e4, -1e4, 0.0, torch.nan, 1.0, 1.0, 5.0, 1.0]])
    assert torch.equal(activation.silu_mul(x).nan_to_num(7.0), torch.tensor([[1e4, 0.0, 0.0, 7.0]]))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("shape", cases.ROPE_SHAPES)
def test_rotary_store(shape, dtype):
    cases.check_rope(shape, 21, dtype, CPU)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["qk", "q", "k"])
@pytest.mark.parametrize("shape", cases.ROPE_SHAPES[:3])
def test_rotary_store_with_norms(shape, norms, dtype):
    cases.check_rope(shape, 5, dtype, CPU, norms)


def test_nothing_new_is_nothing_to_do():
    cases.check_rope(cases.ROPE_SHAPES[0], 0, torch.float32, CPU)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("layers", [(), (3,)])
@pytest.mark.parametrize("page", [(2, 4, 16), (3, 5, 7), (2, 16, 128)])
def test_page_copies(layers, page, dtype):
    cases.check_copy(layers, dtype, CPU, page)


def test_every_form_is_reached(launches):
    """Rows that share a program and rows that have one; padded and whole; one part and several."""
    for shape in cases.NORM_SHAPES:
        cases.check_norm(shape, torch.float32, CPU)
    forms = {(form["ROWS"] > 1, form["SIZE"] < form["BLOCK"]) for form in launches.forms("_rms_norm")}
    assert forms == {(True, True), (True, False), (False, False)}
    for gated in cases.GATED_SHAPES:
        cases.check_gated(gated, torch.float32, CPU)
    assert {form["PARTS"] > 1 for form in launches.forms("_gated_mul")} == {True, False}
    for each in cases.ROPE_SHAPES:
        cases.check_rope(each, 3, torch.float32, CPU)
    seen = launches.forms("_rope_store")
    parts = {(form["KV_HEADS"] > form["BLOCK_H"], form["HEAD_DIM"] < form["BLOCK_D"]) for form in seen}
    assert parts == {(True, False), (False, True), (False, False)}


X, WEIGHT = torch.zeros(3, 16), torch.ones(16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: norm.rms_norm(X.double(), WEIGHT, 1e-5), "x is"),
        (lambda: norm.rms_norm(X, WEIGHT[:8], 1e-5), "weight"),
        (lambda: norm.rms_norm(torch.zeros(1, 70000), torch.ones(70000), 1e-5), "at most 65536"),
        (lambda: norm.add_rms_norm(X, X[:2].clone(), WEIGHT, 1e-5), "residual"),
        (lambda: norm.add_rms_norm(X, X.half(), WEIGHT, 1e-5), "one dtype"),
        (lambda: norm.add_rms_norm(X, X.clone(), WEIGHT, 1e-5, out=X[:, :8]), "out must be"),
        (lambda: activation.silu_mul(X[:, :5]), "2 size"),
        (lambda: activation.silu_mul(X, out=X), "out must be"),
        (lambda: kv_store.copy_pages(torch.zeros(4, 2, 4, 8).mT, torch.zeros(4, 2, 8, 4), [0], [1]), "page"),
        (lambda: kv_store.copy_pages(torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 8), [0], [4]), "within"),
    ],
)
def test_refusals_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norm_weights_of_another_size_are_refused(name):
    q, rotation = torch.zeros(3, 2, 16), torch.zeros(3, 8, dtype=torch.complex64)
    pages = torch.zeros(4, 2, 4, 16)
    with pytest.raises(ValueError, match=name):
        rope.rope_store_kv(
            q, q.clone(), q.clone(), rotation, pages, pages.clone(), torch.arange(3), **{name: torch.ones(8)}
        )
