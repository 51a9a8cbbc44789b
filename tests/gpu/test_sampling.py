"""Draws, masks, edits and log-probabilities on a GPU, with vocabularies up to 256k and 512 rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramify.kernels.triton import logits as kernels
from ramify.kernels.triton.sampling import sample_tokens
from tests.kernels import sampling_cases as cases

CUDA = "cuda"
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("vocab", "masked", "dtype"), cases.DRAWS, ids=str)
def test_draws(vocab, masked, dtype):
    cases.check_draws(cases.STRAIGHT + cases.ORDERED, vocab, dtype, CUDA, masked=masked, repeats=2)


@pytest.mark.parametrize("masked", ["none", "some"])
def test_draws_without_top_k_and_top_p(masked):
    cases.check_draws(cases.STRAIGHT, 128256, torch.bfloat16, CUDA, masked=masked, repeats=2)


@pytest.mark.parametrize("vocab", [3000, 128256])
def test_draws_beyond_the_candidates(vocab):
    cases.check_draws(cases.FAR, vocab, torch.float32, CUDA, masked="some", share=0.95, repeats=2)


def test_ties_are_drawn_by_their_ids():
    rows = [cases.Row(top_k=3), cases.Row(top_p=0.5), cases.Row(top_k=1050, top_p=0.5), cases.Row(0.0)]
    logits = torch.full((4, 1200), 2.5, device=CUDA)
    logits[:, 0] = 1.0
    tokens = sample_tokens(logits, cases.options(rows, [0.9, 0.999, 0.5, 0.0], CUDA))
    assert tokens.tolist() == [3, 600, 263, 1]


def test_not_a_number_gives_some_token():
    logits = torch.full((3, 9000), torch.nan, device=CUDA)
    rows = [cases.Row(0.0), cases.Row(), cases.Row(top_p=0.5)]
    tokens = sample_tokens(logits, cases.options(rows, [0.5] * 3, CUDA))
    assert ((tokens >= 0) & (tokens < 9000)).all()


@pytest.mark.parametrize("row", [cases.Row(1.5), cases.Row(1.5, top_k=9), cases.Row(1.5, top_p=0.9)])
def test_frequencies(row):
    cases.check_frequencies(50000, row, CUDA, steps=2000)


def test_a_row_has_the_same_token_alone_and_among_512():
    rows = (cases.STRAIGHT + cases.ORDERED) * 40
    rows = rows[:512]
    logits = cases.logits_of(512, 128256, torch.bfloat16, CUDA)
    uniforms = np.random.default_rng(0).random(512).tolist()
    together = sample_tokens(logits, cases.options(rows, uniforms, CUDA))
    for row in range(0, 512, 37):
        given = cases.options(rows[row : row + 1], uniforms[row : row + 1], CUDA)
        assert sample_tokens(logits[row : row + 1], given)[0] == together[row]
    assert torch.equal(sample_tokens(logits, cases.options(rows, uniforms, CUDA)), together)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_edits(dtype):
    cases.check_edits(128256, dtype, CUDA)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top", [0, 1, 20, 512])
@pytest.mark.parametrize("vocab", cases.VOCABS)
def test_log_probabilities(vocab, top, dtype):
    cases.check_logprobs(cases.logits_of(5, vocab, dtype, CUDA), top)


def test_log_probabilities_with_more_ties_than_candidates():
    logits = torch.full((2, 50000), 1.0, device=CUDA)
    logits[1, 40] = 2.0
    cases.check_logprobs(logits, 5)


def test_log_probabilities_write_nothing_of_the_vocabularys_size():
    logits = torch.randn(64, 128256, dtype=torch.bfloat16, device=CUDA)
    tokens = torch.zeros(64, dtype=torch.int64, device=CUDA)
    kernels.log_probabilities(logits, tokens, 20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kernels.log_probabilities(logits, tokens, 20)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 4


def test_a_captured_draw_is_replayed():
    """No launch waits or transfers, so that a CUDA graph can hold them."""
    rows = cases.STRAIGHT + cases.ORDERED
    count = len(rows)
    logits = torch.randn(count, 128256, device=CUDA)
    given = cases.options(rows, [0.5] * count, CUDA)
    sample_tokens(logits, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_tokens(logits, given)
    for _ in range(3):
        logits.normal_(0, 3)
        given.values[4].uniform_()
        graph.replay()
        assert torch.equal(tokens, sample_tokens(logits, given))
