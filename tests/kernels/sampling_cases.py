"""Cases of the sampling kernels, run by the interpreter's tests on the CPU and by the GPU's on CUDA.

They are compared with the twin in float64 and with the runtime's own sampler.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.kernels.arguments.sampling_inputs import LogitEdits, RowEdits, SamplingOptions, TokenCounts
from ramify.kernels.reference import logits as twin_logits
from ramify.kernels.reference import sampling as twin
from ramify.kernels.registry import SampleTokens
from ramify.kernels.triton import logits as kernels
from ramify.kernels.triton.sampling import sample_tokens
from ramify.runtime.executor import sampler
from ramify.sampling_params import SamplingParams


@dataclasses.dataclass
class Row:
    """One row's options, mask and edits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


STRAIGHT = [Row(0.0), Row(), Row(0.3), Row(3.0), Row(min_p=0.1), Row(2.0, min_p=0.02), Row(0.7, min_p=1.0)]
ORDERED = [
    Row(top_k=1),
    Row(top_k=7),
    Row(2.0, top_k=40, top_p=0.9),
    Row(top_p=0.5),
    Row(top_p=0.95, min_p=0.05),
    Row(top_k=20, min_p=0.2),
    Row(1.5, top_k=10**6, top_p=0.8),
    Row(top_p=1e-6),
]
FAR = [
    Row(50.0, top_p=0.99),
    Row(50.0, top_k=1100),
    Row(50.0, top_k=1100, top_p=0.9, min_p=0.5),
    Row(50.0, top_p=0.9999, min_p=0.75),
]
"""Rows that may take more tokens than there are candidates."""
VOCABS = [33, 1000, 4100, 49152, 128256, 262144]
"""Sizes below 49152 are no multiples of 16, so that loads are narrow."""
DRAWS = [
    *itertools.product(VOCABS, ["none", "some"], [torch.float32, torch.bfloat16]),
    (128256, "all", torch.bfloat16),
    (128256, "some", torch.float16),
]
"""(vocab, masked, dtype): GPUs have every vocabulary in the forms that the runtime launches, and once what it
never asks for."""


def options(rows: Sequence[Row], uniforms: Sequence[float], device: str) -> SamplingOptions:
    columns = [[getattr(row, field.name) for row in rows] for field in dataclasses.fields(Row)]
    return SamplingOptions.from_columns(*columns, uniforms, device)


def logits_of(rows: int, vocab: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Random logits in strided rows, with NaN between them."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, vocab + 48), torch.nan, dtype=dtype)
    wide[:, :vocab] = 3 * torch.randn(rows, vocab, generator=random)
    return wide.to(device)[:, :vocab]


def mask_of(rows: int, vocab: int, device: str, *, share: float = 0.5, seed: int = 0) -> Tensor:
    """(rows, words) int32: allows about `share` of the tokens, and sets the bits beyond the vocabulary."""
    bits = np.random.default_rng(seed).random((rows, -(-vocab // 32) * 32)) < share
    bits[:, vocab // 2] = True  # no row without a token
    bits[:, vocab:] = True
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(words).to(device)


def masks_of(
    rows: int, vocab: int, device: str, masked: str, share: float = 0.5
) -> tuple[Tensor | None, Tensor | None]:
    """`mask` and `mask_rows`. masked: none, all, or some rows by index."""
    mask = None if masked == "none" else mask_of(rows, vocab, device, share=share)
    if masked != "some":
        return mask, None
    mask_rows = torch.arange(rows, dtype=torch.int32).flip(0)
    mask_rows[::3] = -1
    return mask, mask_rows.to(device)


def check_draws(
    rows: Sequence[Row],
    vocab: int,
    dtype: torch.dtype,
    device: str,
    *,
    masked: str = "none",
    share: float = 0.5,
    repeats: int = 1,
    draw: SampleTokens = sample_tokens,
) -> Tensor:
    """Check that tokens equal the twin's and in float32 the runtime's. masked: as in `masks_of`."""
    rows = [row for row in rows for _ in range(repeats)]
    count = len(rows)
    uniforms = np.random.default_rng(vocab).random(count)
    uniforms[:2] = (0.0, 1 - 2**-53)[:count]
    given = options(rows, uniforms.tolist(), device)
    logits = logits_of(count, vocab, dtype, device)
    before = logits.clone()
    mask, mask_rows = masks_of(count, vocab, device, masked, share)
    tokens = draw(logits, given, mask, mask_rows)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)), "the logits are left alone"
    expected = twin.sample_tokens(logits, given, mask, mask_rows)
    assert tokens.tolist() == expected.tolist()
    words = [None] * count
    if mask is not None:
        order = range(count) if mask_rows is None else mask_rows.tolist()
        words = [None if index < 0 else mask[index].cpu().numpy() for index in order]
    if dtype == torch.float32:  # others have ties, which the runtime's sampler takes as its sort leaves them
        assert tokens.tolist() == runtimes(logits, rows, uniforms, words)
    return tokens


def runtimes(
    logits: Tensor, rows: Sequence[Row], uniforms: Sequence[float], masks: Sequence[Any]
) -> list[int]:
    """The tokens that the CPU's sampler draws."""
    from ramify.kernels.cpu import sampling as compiled  # where nothing is compiled yet, a GPU need not wait

    specs = [
        sampler.SamplingRow(
            params=SamplingParams(**dataclasses.asdict(row)),
            uniform=float(uniform),
            mask=mask,
        )
        for row, uniform, mask in zip(rows, uniforms, masks, strict=True)
    ]
    found: list[int] = sampler.sample(
        logits.float().cpu().clone(), sampler.SamplingBatch.of(specs), compiled.sample_tokens
    ).tolist()
    return found


def check_frequencies(
    vocab: int, row: Row, device: str, steps: int = 200, *, draw: SampleTokens = sample_tokens
) -> None:
    """Evenly spaced uniforms draw each token as often as it is likely."""
    logits = logits_of(1, vocab, torch.float32, device)
    uniforms = [(step + 0.5) / steps for step in range(steps)]
    tokens = draw(logits.expand(steps, vocab), options([row] * steps, uniforms, device))
    expected = twin.sample_tokens(logits.expand(steps, vocab), options([row] * steps, uniforms, device))
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > 2


def make_edits(vocab: int) -> list[tuple[np.ndarray, int, dict[str, Any]]]:
    """Texts, the lengths of their prompts, and the other arguments of `RowEdits`."""
    random = np.random.default_rng(3)
    ids = random.integers(0, vocab, 40).astype(np.int32)
    bias = {int(ids[30]): 5.5, int(ids[0]): -3.25, vocab - 1: 100.0}
    return [
        (ids, 25, {}),
        (ids, 25, {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3}),
        (ids, 25, {"frequency_penalty": -0.1, "logit_bias": bias}),
        (ids, 0, {"repetition_penalty": 0.8, "logit_bias": bias, "banned": [0, int(ids[30])]}),
        (ids[:0], 0, {"presence_penalty": 1.0, "banned": [3]}),
    ]


def adjust(logits: Tensor, ids: np.ndarray, prompt_len: int, edits: RowEdits) -> None:
    """Penalties, biases and banned tokens of one row, (vocab,) float32 in place, each written out."""
    seen = torch.from_numpy(np.unique(ids).astype(np.int64))
    values, penalty = logits[seen], edits.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    tokens, counts = np.unique(ids[prompt_len:], return_counts=True)
    amount = edits.presence_penalty + edits.frequency_penalty * counts
    logits[torch.from_numpy(tokens.astype(np.int64))] -= torch.from_numpy(amount.astype(np.float32))
    for token, bias in edits.logit_bias.items():
        logits[token] += bias
    for token in edits.banned:
        logits[token] = -torch.inf


def check_edits(vocab: int, dtype: torch.dtype, device: str) -> None:
    """Check that float32 logits change bit for bit as written out, others are rounded once, and all
    return."""
    logits = logits_of(5, vocab, dtype, device)
    original, expected = logits.clone(), logits.float().cpu().clone()
    specs = []
    for row, (ids, prompt_len, options) in enumerate(make_edits(vocab)):
        specs.append(RowEdits(TokenCounts.from_ids(ids, prompt_len), **options))
        adjust(expected[row], ids, prompt_len, specs[-1])
    edits = LogitEdits.from_rows(specs, device)
    before = kernels.edit_logits(logits, edits)
    if dtype == torch.bfloat16 and device == "cpu":  # the interpreter cuts float32 off instead of rounding
        assert torch.allclose(logits, expected.to(dtype), rtol=2**-7)
    else:
        assert torch.equal(logits.cpu(), expected.to(dtype))
    other = original.clone()
    assert torch.equal(twin_logits.edit_logits(other, edits), before)
    kernels.restore_logits(logits, edits, before)
    assert torch.equal(logits, original)
    twin_logits.restore_logits(other, edits, before)
    assert torch.equal(other, original)


def check_logprobs(logits: Tensor, top: int) -> None:
    """Check at most twice torch's error in float32, both against float64, and the ids of a stable sort."""
    rows, vocab = logits.shape
    tokens = torch.arange(rows, device=logits.device) * 37 % vocab
    result = kernels.log_probabilities(logits, tokens, top)
    exact = twin_logits.log_probabilities(logits, tokens, top)
    assert torch.equal(result.ids, exact.ids)
    assert result.values.shape == (rows, min(top, vocab))
    precise = torch.log_softmax(logits.double(), -1)
    torchs = torch.log_softmax(logits.float(), -1)
    for found, at in ((result.chosen[:, None], tokens[:, None]), (result.values, result.ids.clamp(min=0))):
        want, have = precise.gather(1, at), torchs.gather(1, at)
        seen = want > -torch.inf
        assert torch.equal(found[~seen].double(), want[~seen])
        if seen.any():
            floor = torch.finfo(torch.float32).eps * want[seen].abs().max()
            error, other = ((each[seen].double() - want[seen]).abs().max() for each in (found, have))
            assert error <= 2 * other + floor
