"""Every sampling option compared with a plain reimplementation, and draws by their frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ramify.kernels.arguments.sampling_inputs import TokenCounts
from ramify.kernels.cpu.sampling import sample_tokens
from ramify.runtime.executor import sampler
from ramify.runtime.executor.sampler import SamplingBatch, SamplingRow, log_probabilities
from ramify.sampling_params import SamplingParams

VOCAB = 1000


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> np.ndarray:
    return sampler.sample(logits, SamplingBatch.of(rows), sample_tokens).numpy()


def row(
    uniform: float = 0.5, ids: list[int] | None = None, prompt_len: int = 0, **options: Any
) -> SamplingRow:
    extra = {name: options.pop(name) for name in ("mask", "banned") if name in options}
    return SamplingRow(
        params=SamplingParams(**options).check(),
        uniform=uniform,
        counts=None if ids is None else TokenCounts.from_ids(np.array(ids, dtype=np.int32), prompt_len),
        **extra,
    )


def logits_of(seed: int = 0, count: int = 1) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def reachable(logits: torch.Tensor, **options: Any) -> dict[int, float]:
    """Token → the share of evenly spaced uniform numbers for which it is drawn."""
    steps = 4000
    rows = [row((i + 0.5) / steps, **options) for i in range(steps)]
    tokens = sample(logits.repeat(steps, 1), rows)
    values, counts = np.unique(tokens, return_counts=True)
    return dict(zip(values.tolist(), (counts / steps).tolist(), strict=True))


def expected(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The expected distribution, computed with a full sort."""
    probs = torch.softmax(logits[0].double() / temperature, -1)
    order = torch.argsort(probs, descending=True)
    if top_k:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    sorted_probs = probs[order]
    drop = (torch.cumsum(sorted_probs, 0) - sorted_probs) >= top_p
    probs[order[drop]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_k": 7},
        {"temperature": 1.0, "top_k": 300},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 5.0, "top_p": 0.999},  # more tokens than are likely
        {"temperature": 2.0, "top_k": 20, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_distribution(options: dict[str, Any]) -> None:
    logits = logits_of()
    want = expected(logits, **options)
    got = reachable(logits, **options)
    assert all(want[token] > 0 for token in got), "a token that must not come"
    share = torch.zeros(VOCAB, dtype=torch.float64)
    for token, frequency in got.items():
        share[token] = frequency
    # With evenly spaced uniforms a token's share is off by less than two steps.
    assert float((share - want).abs().max()) < 2 / 4000 + 1e-6


def test_extreme_uniforms_hit_possible_tokens() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 5] = 0.0
    tokens = sample(logits, [row(0.0, temperature=1.0), row(1.0 - 2**-53, temperature=1.0)])
    assert tokens.tolist() == [5, 5]


def test_greedy_is_the_argmax_and_rows_do_not_disturb_each_other() -> None:
    logits = logits_of(count=3)
    mixed = [row(temperature=0.0), row(0.3, temperature=1.0, top_p=0.8), row(0.9, temperature=1.5)]
    together = sample(logits.clone(), mixed)
    alone = [int(sample(logits[i : i + 1].clone(), [mixed[i]])[0]) for i in range(3)]
    assert together.tolist() == alone
    assert together[0] == int(logits[0].argmax())


def test_mask_bias_and_bans() -> None:
    logits = logits_of()
    best = torch.argsort(logits[0], descending=True).tolist()
    allowed = [best[3], best[7], best[500]]
    bits = np.zeros((VOCAB + 31) // 32 * 32, dtype=np.uint8)
    bits[allowed] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    assert sample(logits.clone(), [row(temperature=0.0, mask=mask)])[0] == best[3]
    assert set(reachable(logits, temperature=50.0, mask=mask)) == set(allowed)
    assert sample(logits.clone(), [row(temperature=0.0, logit_bias={best[9]: 100.0})])[0] == best[9]
    assert sample(logits.clone(), [row(temperature=0.0, logit_bias={best[0]: -100.0})])[0] == best[1]
    assert sample(logits.clone(), [row(temperature=0.0, banned=(best[0], best[1]))])[0] == best[2]


def test_penalties() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([4.0, 3.9, -1.0, 3.0])
    history = {"ids": [0, 1, 1, 2], "prompt_len": 1}  # the prompt is token 0, the output 1 1 2
    changed = logits.clone()
    sample(changed, [row(temperature=0.0, repetition_penalty=2.0, **history)])
    assert changed[0, :4].tolist() == pytest.approx([2.0, 1.95, -2.0, 3.0])
    changed = logits.clone()
    sample(changed, [row(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, **history)])
    assert changed[0, :4].tolist() == pytest.approx([4.0, 3.9 - 0.5 - 0.5, -1.0 - 0.75, 3.0])


def test_log_probabilities() -> None:
    logits = logits_of(count=2)
    table = torch.log_softmax(logits, -1)
    tokens = torch.tensor([3, 900])
    for index, (value, best) in enumerate(log_probabilities(logits, tokens, 4)):
        assert value == pytest.approx(float(table[index, tokens[index]]), abs=1e-5)
        top = torch.topk(table[index], 4)
        assert [pair[0] for pair in best] == top.indices.tolist()
        assert [pair[1] for pair in best] == pytest.approx(top.values.tolist(), abs=1e-5)
