"""Token counts on the device, compared with logit edits made anew by the host: same bits, fewer bytes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ramify.kernels.arguments import device_counts, sampling_inputs
from ramify.kernels.arguments.device_counts import DeviceCounts
from ramify.kernels.arguments.sampling_inputs import LogitEdits, RowEdits, TokenCounts
from ramify.kernels.machine.transfers import to_device
from ramify.runtime.executor.sampler import DeviceSampler, HostSampler
from ramify.runtime.scheduler.requests.constrained import Healer
from tests.runtime.local import LocalScheduler
from tests.runtime.test_healing import vocabulary

VOCAB = 5000
CPU = torch.device("cpu")


class Text:
    """A growing sequence with random penalties."""

    def __init__(self, rng: random.Random, length: int, **options: Any) -> None:
        self.rng, self.prompt = rng, length
        self.ids = [rng.randrange(VOCAB) for _ in range(length)]
        self.counts = TokenCounts(prompt=rng.random() < 0.5)
        self.options = options or {
            "repetition_penalty": rng.choice((1.0, 1.1, 1.37)),
            "presence_penalty": rng.choice((0.0, 0.3)),
            "frequency_penalty": rng.choice((0.0, 0.7, -0.1)),
        }

    def row(self, tokens: int = 1) -> RowEdits:
        self.ids += [self.rng.choice([*range(7), self.rng.randrange(VOCAB)]) for _ in range(tokens)]
        self.counts.extend(np.array(self.ids, np.int32), self.prompt)
        return RowEdits(self.counts, **self.options)


def edited(edits: LogitEdits | None, rows: int) -> torch.Tensor:
    """The amounts of `edits` as a tensor (3, rows, VOCAB); NaN for logits that are not edited."""
    found = torch.full((3, rows, VOCAB), torch.nan)
    if edits is not None:
        row, token = edits.places.long()
        assert len({*zip(row.tolist(), token.tolist(), strict=True)}) == len(row), "a logit is edited once"
        assert edits.places.is_contiguous()
        assert edits.amounts.is_contiguous()
        found[:, row, token] = edits.amounts
    return found


@pytest.mark.parametrize("seed", range(4))
def test_edits_are_those_of_the_host(seed: int) -> None:
    """Texts start, pause, grow by one or many tokens, and end. Some rows have biases, some have no edits."""
    rng, device = random.Random(seed), DeviceCounts(CPU)
    texts: list[Text] = []
    for step in range(120):
        if rng.random() < 0.3 or not texts:
            texts.append(Text(rng, rng.choice((0, 5, 300))))
        rows: list[RowEdits | None] = []
        for text in rng.sample(texts, rng.randrange(len(texts) + 1)):
            row = text.row(rng.choice((1, 1, 1, 2, 90)))
            if rng.random() < 0.1:
                row.logit_bias = {3: 1.5, VOCAB - 1: -2.0}
            if rng.random() < 0.1:
                row.banned = (4, 3000)
            rows += [row, *([None] if rng.random() < 0.2 else [])]
        found = device.edits(rows)
        assert (found is None) == all(row is None for row in rows)
        expected = LogitEdits.from_rows([row or RowEdits() for row in rows])
        torch.testing.assert_close(
            edited(found, len(rows)), edited(expected, len(rows)), rtol=0, atol=0, equal_nan=True
        )
        if step % 7 == 0:
            texts.pop(rng.randrange(len(texts)))


def test_a_step_sends_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        sent.append(array.nbytes)
        return to_device(array, device)

    for module in (device_counts, sampling_inputs):
        monkeypatch.setattr(module, "to_device", counted)
    rng, device = random.Random(0), DeviceCounts(CPU)
    texts = [Text(rng, 600, repetition_penalty=1.1, frequency_penalty=0.5) for _ in range(32)]
    for text in texts:
        text.counts = TokenCounts()
    steps = []
    for _ in range(20):
        sent.clear()
        rows: list[RowEdits | None] = [text.row() for text in texts]
        found = device.edits(rows)
        assert found is not None
        steps.append((sum(sent), 20 * found.places.shape[1]))
    assert steps[0][0] == steps[0][1], "the first is made on the host, as counts for one step would be"
    for mine, of_pairs in steps[2:]:
        assert 0 < mine <= 32 * (12 + 24 + 12)
        assert of_pairs > 200 * mine


def test_the_pool_holds_what_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, device = random.Random(0), DeviceCounts(CPU)
    for _ in range(300):
        text = Text(rng, 100, repetition_penalty=1.2)
        for _ in range(3):
            device.edits([text.row()])
        once: list[RowEdits | None] = [Text(rng, 100, repetition_penalty=1.2).row() for _ in range(4)]
        device.edits(once)
    assert device.pool.shape[1] <= 4 * 2 * 110


def test_outputs_are_those_of_the_host(tiny_model: Any) -> None:
    """Requests with and without penalties give the same outputs with the device's sampler and the host's."""
    found = []
    for sampler in (None, HostSampler()):
        local = LocalScheduler(tiny_model, attention_backend="torch", page_size=16)
        if sampler is not None:
            local.runner.sampler = sampler
        for index in range(6):
            penalties = {"frequency_penalty": 0.9, "repetition_penalty": 1.3} if index % 2 else {}
            prompt = [(index * place) % 250 for place in range(1, 40)]
            local.submit(prompt, max_tokens=24, temperature=0.8, seed=index, ignore_eos=True, **penalties)
        local.run()
        if sampler is None:
            assert isinstance(local.runner.sampler, DeviceSampler)
            assert local.runner.sampler.counts.pool.numel()
        found.append([(each.ids, each.finish) for each in local.results.values()])
    assert found[0] == found[1]


def test_the_kept_end_of_a_healed_prompt_counts_nothing(tiny_model: Any) -> None:
    """A sample that keeps the healed end adds no output, so the counts stay empty."""
    draw = random.Random(5)
    prompts = [[draw.choice(b"abcd :") for _ in range(draw.randint(2, 9))] for _ in range(12)]
    found = []
    for sampler in (None, HostSampler()):
        healer = Healer(vocabulary())
        local = LocalScheduler(tiny_model, attention_backend="torch", page_size=16, healer=healer)
        if sampler is not None:
            local.runner.sampler = sampler
        for prompt in prompts:
            local.submit(prompt, open_end=True, max_tokens=8, ignore_eos=True, frequency_penalty=0.9)
        local.run()
        found.append([(each.ids, each.overlap, each.error) for each in local.results.values()])
    assert found[0] == found[1]
    assert {bool(overlap) for _, overlap, _ in found[0]} == {False, True}, "both ways were taken"
