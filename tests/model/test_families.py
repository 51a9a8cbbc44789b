"""Each family computes what transformers computes, on random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.kernels.registry import ops
from ramify.runtime.model.loading.load import load_model

from .checkpoints import CASES, Case, build, expected, prompt, save
from .dense import logits
from .equality import packed_head, paged_logits

pytestmark = pytest.mark.slow

LENGTH = 128
"""The context: longrope's prompts here are longer than the original one."""
STOPS = [0, 17, 22, *range(23, 41)]
"""A prefill, a chunk, and decodes."""
UNLIKE_LLAMA = [case for case in CASES if case.model_type not in ("llama", "mistral", "qwen2", "qwen3")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    reference = build(case)
    ids = prompt()
    wanted = expected(reference, ids)
    assert wanted.std() > 0.5  # else everything would be close to everything
    model = load_model(save(reference, tmp_path), dtype=torch.float32, context_length=LENGTH)
    for step in (0, 1, 7):
        torch.testing.assert_close(logits(model, ids, step=step), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", UNLIKE_LLAMA, ids=lambda case: case.name)
def test_logits_from_pages_equal_transformers(case: Case, packed: bool, tmp_path: Path) -> None:
    """Compiled kernels, with weights as they are and packed, and their twins."""
    reference = build(case)
    ids = prompt()
    wanted = expected(reference, ids)
    files = save(reference, tmp_path)
    for backend in ("cpu",) if packed else ("cpu", "torch"):
        options = {"packed": packed, "deterministic": packed, "context_length": LENGTH}
        model = load_model(files, dtype=torch.float32, **options)
        assert packed == (packed_head(model) is not None)
        (found,) = paged_logits(model, [ids], ops(backend), [STOPS])  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_the_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text = build(Case("", "gemma3_text", {"head_dim": 16, "sliding_window": 5}))
    files = save(text, tmp_path)
    ids = prompt()
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": config, "vision_config": {}}))
    tensors = load_file(tmp_path / "model.safetensors")
    image = {"multi_modal_projector.mm_input_projection_weight": torch.zeros(3)}
    for layout in ("language_model.model.", "model.language_model."):
        named = {name.replace("model.", layout, 1): tensor for name, tensor in tensors.items()}
        save_file(named | image, tmp_path / "model.safetensors", {"format": "pt"})
        model = load_model(files, dtype=torch.float32)
        torch.testing.assert_close(logits(model, ids), expected(text, ids), atol=1e-4, rtol=0)
