"""Mixtures of experts of our own: each family computes what transformers computes, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.runtime.model.decoder import Model
from ramify.runtime.model.hub.resolve import ModelFiles
from ramify.runtime.model.load import load_model

from .architectures import save_tiny, tiny_config
from .dense import logits
from .equality import assert_engine_equal, assert_logits_equal

GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"norm_topk_prob": True, "num_experts_per_tok": 3},
    "olmoe": {},
    "granitemoe": {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    "granitemoeshared": {"shared_intermediate_size": 56, "logits_scaling": 1.5},
    "glm4_moe": {"n_shared_experts": 2, **GROUPED},
}
"""Options of a tiny config of each family."""


def config_of(family: str) -> Any:
    config = tiny_config(family)
    for name, value in FAMILIES[family].items():
        setattr(config, name, value)
    return config


def native(folder: Path, **options: Any) -> Model:
    files = ModelFiles(name="tiny", weights=folder, tokenizer=folder)
    model = load_model(files, dtype=torch.float32, **options)
    assert isinstance(model, Model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_tiny(config_of(family), tmp_path)
    assert_logits_equal(reference, native(tmp_path))


def test_experts_in_one_tensor_are_read_like_one_tensor_for_each(tmp_path: Path) -> None:
    reference = save_tiny(config_of("qwen2_moe"), tmp_path / "each")
    stored = load_file(tmp_path / "each" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in stored
    fused = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    (tmp_path / "fused").mkdir()
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_bytes((tmp_path / "each" / "config.json").read_bytes())
    one, other = (dict(native(tmp_path / name).named_parameters()) for name in ("each", "fused"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_engine_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    """Cold, chunked, forked, retracted and from the cache, with all layers in one compiled call."""
    reference = save_tiny(config_of("qwen2_moe"), tmp_path)
    model = native(tmp_path, packed=True, deterministic=True)
    assert model.layer_weights() is not None
    assert_engine_equal(reference, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_experts_are_near_unpacked_ones(family: str, tmp_path: Path) -> None:
    reference = save_tiny(config_of(family), tmp_path)
    assert_logits_equal(reference, native(tmp_path, packed=True, deterministic=True))
    if family == "qwen3_moe":
        ids = torch.arange(20)
        wanted = logits(native(tmp_path), ids)
        for form, share in (("int8", 0.1), ("int4", 0.7)):
            got = logits(native(tmp_path, quantization=form), ids)
            assert (got - wanted).square().mean() < share**2 * wanted.var()
