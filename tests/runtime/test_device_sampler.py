"""Sampling on the device gives the tokens and log-probabilities of sampling on the host."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.kernels.registry import ops
from ramify.runtime.executor.sampler import DeviceSampler, HostSampler, SamplingBatch, SamplingRow
from ramify.sampling_params import SamplingParams

VOCAB = 700
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {3: 9.0}},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.1},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"temperature": 0.9, "min_p": 0.05},
]


def rows_of(options: list[dict[str, Any]], *, masked: bool, banned: bool) -> list[SamplingRow]:
    rng, numbers = random.Random(1), np.random.default_rng(1)
    mask = numbers.integers(-(2**31), 2**31, (len(options), -(-VOCAB // 32)), dtype=np.int64).astype(np.int32)
    return [
        SamplingRow(
            params=SamplingParams(**each).check(),
            uniform=rng.random(),
            counts=TokenCounts.from_ids(numbers.integers(0, VOCAB, 30).astype(np.int32), 11),
            mask=mask[index] if masked and index % 2 else None,
            banned=(5, 6) if banned and index % 3 == 0 else (),
        )
        for index, each in enumerate(options)
    ]


@pytest.mark.parametrize("banned", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [OPTIONS, OPTIONS[:1], OPTIONS[2:3]], ids=["mixed", "greedy", "drawn"])
def test_as_on_the_host(options: list[dict[str, Any]], masked: bool, banned: bool) -> None:
    rows = rows_of(options, masked=masked, banned=banned)
    device = DeviceSampler(ops("torch").sampling, torch.device("cpu"))  # type: ignore[arg-type]
    logits = 3 * torch.randn(len(rows), VOCAB)
    asked = list(range(0, len(rows), 2))
    drawings = [
        sampler.begin_draw(logits.clone(), SamplingBatch.of(rows), asked, 4)
        for sampler in (HostSampler(), device)
    ]
    assert torch.equal(drawings[0].tokens, drawings[1].tokens)
    (expected, expected_logprobs), (tokens, logprobs) = (drawing.result() for drawing in drawings)
    assert tokens == expected
    assert len(logprobs) == len(asked)
    for (mine, best), (theirs, other) in zip(logprobs, expected_logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5), "of the model's own logits, edited or not"
        assert [token for token, _ in best] == [token for token, _ in other]
        assert [value for _, value in best] == pytest.approx([value for _, value in other], abs=1e-5)


def test_known_tokens() -> None:
    logits, tokens = torch.randn(3, VOCAB), np.array([1, 600, 7], np.int32)
    device = DeviceSampler(ops("torch").sampling, torch.device("cpu"))  # type: ignore[arg-type]
    expected = HostSampler().log_probabilities(logits, tokens, 2)
    for (mine, best), (theirs, other) in zip(
        device.log_probabilities(logits, tokens, 2), expected, strict=True
    ):
        assert mine == pytest.approx(theirs, abs=1e-5)
        assert [token for token, _ in best] == [token for token, _ in other]
    assert device.log_probabilities(logits, tokens, 0)[0][1] == ()


def test_without_log_probabilities_none_come() -> None:
    rows = rows_of(OPTIONS[:2], masked=False, banned=False)
    device = DeviceSampler(ops("torch").sampling, torch.device("cpu"))  # type: ignore[arg-type]
    assert device.begin_draw(torch.randn(2, VOCAB), SamplingBatch.of(rows), [], 0).result()[1] == []
