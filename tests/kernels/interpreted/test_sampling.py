"""Masks, edits, draws and log-probabilities in Triton's interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ramify.kernels.arguments.sampling_inputs import LogitEdits, RowEdits, SamplingOptions, TokenCounts
from ramify.kernels.triton import logits as kernels
from ramify.kernels.triton import sampling
from ramify.kernels.triton.sampling import sample_tokens
from ramify.kernels.triton.tiles import sampling_scan, sampling_search
from tests.kernels import sampling_cases as cases
from tests.kernels.ops_cases import DTYPES

CPU, FLOAT, HALF = "cpu", torch.float32, torch.bfloat16


@pytest.fixture
def small_chunks(monkeypatch):
    """Small chunks, so that a small vocabulary has several."""
    monkeypatch.setattr(sampling_scan, "CHUNK", 512)


@pytest.mark.parametrize("masked", ["none", "all", "some"])
@pytest.mark.parametrize("vocab", [1, 33, 1000, 4100])
def test_straight_draws(vocab, masked):
    cases.check_draws(cases.STRAIGHT, vocab, FLOAT, CPU, masked=masked)


@pytest.mark.parametrize(("vocab", "masked"), [(33, "none"), (33, "all"), (4100, "some")])
def test_ordered_draws(vocab, masked):
    cases.check_draws(cases.ORDERED, vocab, FLOAT, CPU, masked=masked)


@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_draws_from_half_precision_with_its_ties(dtype):
    cases.check_draws(cases.STRAIGHT + cases.ORDERED[:5], 1000, dtype, CPU)


def test_draws_in_several_chunks(small_chunks):
    cases.check_draws(cases.STRAIGHT + cases.ORDERED[:5], 1100, FLOAT, CPU, masked="some")


def test_draws_beyond_the_candidates(small_chunks, monkeypatch):
    """With more tokens than candidates these rows are sampled by the search, other ordered rows are not."""
    cases.check_draws(cases.FAR, 1250, FLOAT, CPU, masked="some", share=0.95)

    def reached(*args):
        raise RuntimeError("the search is reached")

    monkeypatch.setattr(sampling, "search", reached)
    for row in cases.FAR:
        with pytest.raises(Exception, match="search is reached"):
            cases.check_draws([row], 1250, FLOAT, CPU)
    cases.check_draws(cases.ORDERED, 1000, FLOAT, CPU)


@pytest.mark.parametrize(
    ("row", "most"), [(cases.Row(50.0, top_p=0.99), 21 + 1), (cases.Row(50.0, top_k=1100), 23 + 1)]
)
def test_a_search_takes_few_passes(monkeypatch, row, most):
    """A bisection reads these rows about 60 times. The last reading finds the token among equals."""
    reads = []
    load = sampling_search.load_block

    def counted(*args):
        reads.append(args)
        return load(*args)

    monkeypatch.setattr(sampling_search, "load_block", counted)
    cases.check_draws([row], 1250, FLOAT, CPU)
    assert 0 < len(reads) <= most


def test_ties_are_drawn_by_their_ids(small_chunks):
    """All logits equal: more candidates than fit, and every token is at the bound."""
    rows = [cases.Row(top_k=3), cases.Row(top_p=0.5), cases.Row(top_k=1050, top_p=0.5), cases.Row(0.0)]
    uniforms = [0.9, 0.999, 0.5, 0.0]
    logits = torch.full((4, 1200), 2.5)
    logits[:, 0] = 1.0
    tokens = sample_tokens(logits, cases.options(rows, uniforms, CPU))
    assert tokens.tolist() == [3, 600, 263, 1]


@pytest.mark.parametrize("vocab", [300, 2000])
def test_frequencies(vocab):
    cases.check_frequencies(vocab, cases.Row(1.5), CPU, steps=12)
    cases.check_frequencies(vocab, cases.Row(1.5, top_k=9), CPU, steps=12)


def test_a_row_does_not_depend_on_others():
    rows = cases.STRAIGHT + cases.ORDERED[:4]
    logits = cases.logits_of(len(rows), 1000, FLOAT, CPU)
    uniforms = np.random.default_rng(0).random(len(rows)).tolist()
    together = sample_tokens(logits, cases.options(rows, uniforms, CPU))
    for row in (1, 4, 7, 10):
        alone = sample_tokens(
            logits[row : row + 1], cases.options(rows[row : row + 1], uniforms[row : row + 1], CPU)
        )
        assert alone[0] == together[row]


def test_rows_without_a_token_and_with_one():
    logits = torch.full((4, 70), -torch.inf)
    logits[2:, 5] = 0.0
    rows = [cases.Row(0.0), cases.Row(top_p=0.5), cases.Row(), cases.Row(top_p=0.5)]
    tokens = sample_tokens(logits, cases.options(rows, [0.0, 0.5, 1 - 2**-53, 1 - 2**-53], CPU))
    assert tokens.tolist() == [0, 0, 5, 5]


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_not_a_number_gives_some_token():
    logits = torch.full((3, 70), torch.nan)
    rows = [cases.Row(0.0), cases.Row(), cases.Row(top_p=0.5)]
    tokens = sample_tokens(logits, cases.options(rows, [0.5] * 3, CPU))
    assert ((tokens >= 0) & (tokens < 70)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edits(dtype):
    cases.check_edits(500, dtype, CPU)


def test_no_edits():
    logits = cases.logits_of(2, 40, FLOAT, CPU)
    edits = LogitEdits.from_rows([RowEdits()] * 2)
    assert not len(kernels.edit_logits(logits, edits))
    assert not len(kernels.edit_logits(logits, LogitEdits.from_rows([])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("vocab", [7, 1000, 4100])
def test_log_probabilities(vocab, top, dtype):
    cases.check_logprobs(cases.logits_of(3, vocab, dtype, CPU), top)


def test_log_probabilities_with_more_ties_than_candidates(small_chunks):
    logits = torch.full((2, 1300), 1.0)
    logits[1, 40] = 2.0
    cases.check_logprobs(logits, 5)


def test_log_probabilities_of_few_tokens():
    logits = torch.full((2, 1300), -torch.inf)
    logits[:, [4, 900]] = torch.tensor([1.0, 3.0])
    result = kernels.log_probabilities(logits, torch.tensor([900, 4]), 3)
    assert result.ids.tolist() == [[900, 4, -1]] * 2
    cases.check_logprobs(logits, 3)
    spread = torch.full((2, 4100), -torch.inf)
    spread[:, ::100] = torch.randn(41)  # fewer candidates than are asked for
    cases.check_logprobs(spread, 40)


def test_every_form_is_reached(launches):
    for rows in (cases.STRAIGHT[:2], cases.ORDERED[:2]):
        for masked in ("none", "all", "some"):
            cases.check_draws(rows, 100, FLOAT, CPU, masked=masked)
    kernels.log_probabilities(torch.zeros(1, 9), torch.zeros(1, dtype=torch.int64), 2)
    flags = {(form["HAS_MASK"], form["ORDERED"]) for form in launches.forms("_sample")}
    assert flags == set(itertools.product((False, True), repeat=2))
    scans = {(form["DRAWN"], form["GROUPED"]) for form in launches.forms("scan")}
    assert scans == {(True, False), (True, True), (False, True)}


LOGITS = torch.zeros(2, 40)
OPTIONS = SamplingOptions.from_columns([1.0] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, [0.5] * 2)
WORDS = torch.zeros(2, 2, dtype=torch.int32)
EDITS = LogitEdits.from_rows([RowEdits(TokenCounts.from_ids(np.array([3]), 0), presence_penalty=1.0)] * 2)
TOKENS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sample_tokens(LOGITS.double(), OPTIONS), "logits are"),
        (lambda: sample_tokens(LOGITS.t(), OPTIONS), "logits are"),
        (lambda: sample_tokens(LOGITS[:1], OPTIONS), "options"),
        (lambda: sample_tokens(LOGITS, OPTIONS, WORDS[:, :1]), "mask is"),
        (lambda: sample_tokens(LOGITS, OPTIONS, WORDS[:1]), "rows of mask"),
        (lambda: sample_tokens(LOGITS, OPTIONS, WORDS, torch.zeros(2)), "mask_rows must"),
        (lambda: sample_tokens(LOGITS, OPTIONS, None, torch.zeros(2)), "no mask"),
        (lambda: sample_tokens(LOGITS, OPTIONS, WORDS.long()), "mask is"),
        (lambda: kernels.edit_logits(LOGITS, LogitEdits(EDITS.places.long(), EDITS.amounts)), "places"),
        (lambda: kernels.edit_logits(LOGITS, LogitEdits(EDITS.places, EDITS.amounts[:2])), "amounts"),
        (lambda: kernels.restore_logits(LOGITS, EDITS, torch.zeros(3)), "before"),
        (lambda: kernels.log_probabilities(LOGITS, TOKENS[:1], 1), "tokens"),
        (lambda: kernels.log_probabilities(LOGITS, TOKENS, 513), "top is 513"),
    ],
)
def test_refusals_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call()
