"""An oracle: the tokens that transformers generates greedily, with the two best logits of every step."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

TIE = 1e-4
"""Logits that are closer than this count as equal, as sums in another order differ by about as much."""


@dataclasses.dataclass
class Greedy:
    ids: list[int]
    margins: list[float]
    """For each token, the difference between the best logit and the second best."""


def greedy(model: Any, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> Greedy:
    """The greedy continuation of `prompt` by `model`, a causal LM of transformers in float32."""
    from transformers import DynamicCache

    ids: list[int] = []
    margins: list[float] = []
    cache = DynamicCache(config=model.config)
    # transformers 5.24 renamed the argument, and warns of the old name.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    new = torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=new, use_cache=True, **{named: cache}).logits[0, -1]
            best = torch.topk(logits, 2)
            token = int(best.indices[0])
            ids.append(token)
            margins.append(float(best.values[0] - best.values[1]))
            if token in eos:
                break
            new = torch.tensor([[token]])
    return Greedy(ids, margins)


def assert_same(expected: Greedy, got: Sequence[int]) -> bool:
    """Assert that `got` is `expected` up to the first tie. Returns whether all tokens are equal."""
    for step, (want, have) in enumerate(zip(expected.ids, got, strict=False)):
        if want != have:
            margin = expected.margins[step]
            assert margin < TIE, f"token {step}: {have} instead of {want}, {margin:.2g} behind the best"
            return False
    assert len(got) == len(expected.ids), f"{len(got)} tokens instead of {len(expected.ids)}"
    return True
