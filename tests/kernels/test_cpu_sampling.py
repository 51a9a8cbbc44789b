"""Draws of the compiled kernel beside its twin in float64."""

from __future__ import annotations

import pytest
import torch

from ramify.kernels.cpu import sampling
from ramify.kernels.cpu.sampling import sample_tokens
from ramify.kernels.reference import sampling as twin
from tests.kernels import sampling_cases as cases


@pytest.mark.parametrize("masked", ["none", "all", "some"])
@pytest.mark.parametrize("vocab", [1, 15, 33, 1000, 4100])
def test_draws(vocab: int, masked: str) -> None:
    rows = cases.STRAIGHT + cases.ORDERED + cases.FAR
    cases.check_draws(rows, vocab, torch.float32, "cpu", masked=masked, repeats=3, draw=sample_tokens)


def test_draws_of_many_likely_tokens() -> None:
    """Nearly flat logits: neither top-k nor top-p ends among the likely tokens."""
    logits = 0.3 * torch.randn(40, 20_000)
    rows = [cases.Row(0.9, top_p=0.95), cases.Row(top_k=9_000), cases.Row(top_k=15_000, top_p=0.7)] * 13
    given = cases.options([*rows, cases.Row(2.0, top_p=0.999)], torch.rand(40).tolist(), "cpu")
    assert sample_tokens(logits, given).tolist() == twin.sample_tokens(logits, given).tolist()


def test_equals_are_taken_in_the_order_of_their_ids() -> None:
    logits = torch.randn(60, 3000).round()
    rows = [cases.Row(top_k=700), cases.Row(top_p=0.8), cases.Row(top_k=100, top_p=0.5, min_p=0.01)] * 20
    given = cases.options(rows, torch.rand(60).tolist(), "cpu")
    tokens = sample_tokens(logits, given)
    assert tokens.tolist() == twin.sample_tokens(logits, given).tolist()
    flat = sample_tokens(torch.zeros(60, 3000), given)
    assert flat.tolist() == twin.sample_tokens(torch.zeros(60, 3000), given).tolist()


def test_rows_do_not_depend_on_each_other_or_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn(15, 5000)
    rows = (cases.STRAIGHT + cases.ORDERED)[:15]
    uniforms = torch.rand(15).tolist()
    together = sample_tokens(logits, cases.options(rows, uniforms, "cpu")).tolist()
    monkeypatch.setattr(sampling, "SERIAL_NUMBERS", 1 << 40)
    assert sample_tokens(logits, cases.options(rows, uniforms, "cpu")).tolist() == together
    for index, row in enumerate(rows):
        alone = cases.options([row], uniforms[index : index + 1], "cpu")
        assert sample_tokens(logits[index : index + 1], alone).tolist() == together[index : index + 1]


def test_frequencies() -> None:
    cases.check_frequencies(3000, cases.Row(3.0, top_p=0.9), "cpu", draw=sample_tokens)
    cases.check_frequencies(3000, cases.Row(3.0), "cpu", draw=sample_tokens)


def test_a_row_without_a_token_gives_token_0() -> None:
    logits = torch.full((4, 77), -torch.inf)
    logits[3, 76] = 5.0
    rows = [cases.Row(0.0), cases.Row(), cases.Row(top_p=0.5), cases.Row(0.0)]
    assert sample_tokens(logits, cases.options(rows, [0.5] * 4, "cpu")).tolist() == [0, 0, 0, 76]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        sample_tokens(torch.zeros(1, 8).bfloat16(), cases.options([cases.Row()], [0.5], "cpu"))
