"""Deterministic requests on the Triton backend, interpreted: alone, together, in chunks, padded, cached.

The interpreter multiplies tiles by a library whose bits depend on a row's place, so tokens are compared, and
log-probabilities but for the last bits. `tests/gpu/test_engine.py` compares bits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ramify.runtime.model.checkpoint import ModelFiles
from ramify.runtime.model.loading.load import load_model
from tests.runtime.local import LocalScheduler
from tests.runtime.tiny import write_tiny


def test_tokens_do_not_depend_on_the_batch(tmp_path: Any, launches: Any) -> None:
    folder = write_tiny(tmp_path / "tiny")
    files = ModelFiles(name="tiny", weights=folder, tokenizer=folder)
    model = load_model(files, dtype=torch.float32)
    trunk = torch.randint(256, (9,)).tolist()
    prompts = [trunk, [*trunk[:6], 1]]

    def engine(**options: Any) -> LocalScheduler:
        return LocalScheduler(
            model, attention_backend="triton", deterministic=True, page_size=4, num_pages=64, **options
        )

    def answers(local: LocalScheduler, asked: list[list[int]]) -> tuple[list[list[int]], list[float]]:
        results = local.complete(asked, max_tokens=2, ignore_eos=True, logprobs=1)
        assert [result.error for result in results] == [None] * len(asked)
        values = [value for result in results for _, value, _ in result.logprobs]
        return [result.ids for result in results], values

    alone = [answers(engine(), [prompt]) for prompt in prompts]
    expected = [ids for (ids,), _ in alone]
    assert len({token for ids in expected for token in ids}) > 2, "the model says too little"
    assert {form["CHUNK"] for form in launches.forms("attend")} == {512}
    assert launches.forms("_product")
    together = engine(chunk_tokens=4, overlap=True, graphs=[1, 4])
    for _ in ("computed", "cached"):
        ids, values = answers(together, prompts)
        assert ids == expected
        assert values == pytest.approx([value for _, found in alone for value in found], abs=1e-5)
