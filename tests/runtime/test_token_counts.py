"""Token counts that grow with a sequence, compared with a recount of the whole sequence."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ramify.engine_messages import Submit
from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.requests.slots import uniforms
from ramify.sampling_params import SamplingParams


def counted(ids: np.ndarray, prompt_len: int, *, prompt: bool) -> dict[int, int]:
    seen = ids if prompt else ids[prompt_len:]
    return {token: ids[prompt_len:].tolist().count(token) for token in set(seen.tolist())}


@pytest.mark.parametrize("prompt", [False, True])
def test_counts_grow_with_the_text(prompt: bool) -> None:
    rng = random.Random(5)
    ids = np.array([rng.randrange(150) for _ in range(400)], np.int32)
    counts, length = TokenCounts(prompt=prompt), 0
    while length < len(ids):
        length += rng.randrange(1, 60)
        counts.extend(ids[:length], 120)
        tokens, times = counts.arrays.tolist()
        assert len(set(tokens)) == len(tokens)
        assert dict(zip(tokens, times, strict=True)) == counted(ids[:length], 120, prompt=prompt)


@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_a_request_keeps_its_counts_through_draft_known_and_replaced_tokens(repetition: float) -> None:
    rng = random.Random(2)
    params = SamplingParams(max_tokens=400, frequency_penalty=0.5, repetition_penalty=repetition)
    submit = Submit(rid="0", ids=tuple(rng.randrange(9) for _ in range(20)), sampling=params)
    request = Request(submit, arrival=0.0, max_tokens=400)
    for _ in range(200):
        move = rng.randrange(4)
        if move == 0 and request.output_len > 3:
            request.take_back(rng.randrange(3))
        elif move == 1:
            request.add_known(rng.randrange(9))
            request.keep_known()
        elif move == 2:
            request.add_draft([rng.randrange(9) for _ in range(3)])
        request.append(rng.randrange(9))
        tokens, times = request.token_counts().arrays.tolist()
        found = dict(zip(tokens, times, strict=True))
        assert found == counted(request.ids, request.prompt_len, prompt=repetition != 1.0)


def test_random_numbers_are_even_and_each_request_has_its_own() -> None:
    """For 64 neighbouring seeds and 1,000 positions: no number occurs twice, each quarter of [0, 1) has a
    quarter of the numbers, and neighbours are uncorrelated in both directions."""
    seeds = np.arange(-9, 55).astype(np.uint64)
    table = np.array([uniforms(seeds, np.full(64, position)) for position in range(1000)]).T
    assert len(np.unique(table)) == table.size
    assert table.min() >= 0.0
    assert table.max() < 1.0
    shares = np.bincount((table * 4).astype(int).ravel()) / table.size
    assert shares == pytest.approx([0.25] * 4, abs=0.01)
    for one, next_one in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), next_one.ravel())[0, 1]) < 0.02
    before, after = uniforms(np.full(2, 7, np.uint64), np.array([-3, 3]))
    assert before != after
