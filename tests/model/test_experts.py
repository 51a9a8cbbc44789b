"""Mixtures of experts of our own: each family computes what transformers computes, packed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from ramify.runtime.model.decoder import Model
from ramify.runtime.model.experts import MixtureOfExperts
from ramify.runtime.model.hub.resolve import ModelFiles
from ramify.runtime.model.load import load_model

from .architectures import tiny_config, tiny_model
from .dense import logits
from .equality import assert_engine_equal, assert_logits_equal
from .gguf_files import write_gguf

GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.75, "use_qk_norm": True}
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


def reference_of(family: str, folder: Path, **options: Any) -> Any:
    """The library's own model, with a checkpoint of it in `folder`."""
    config = config_of(family)
    for name, value in options.items():
        setattr(config, name, value)
    model = tiny_model(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(2))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """With experts that are not packed, and by packed ones in the compiled layer stack."""
    reference = reference_of(family, tmp_path)
    for packed in (False, True):
        model = native(tmp_path, packed=packed, deterministic=packed)
        assert (model.layer_weights() is not None) == packed
        assert_logits_equal(reference, model)


def test_experts_in_one_tensor_are_read_like_one_tensor_for_each(tmp_path: Path) -> None:
    reference = reference_of("qwen2_moe", tmp_path / "each")
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
    reference = reference_of("qwen2_moe", tmp_path)
    model = native(tmp_path, packed=True, deterministic=True)
    assert model.layer_weights() is not None
    assert_engine_equal(reference, model)


def test_quantised_experts_are_near_the_others(tmp_path: Path) -> None:
    reference_of("qwen3_moe", tmp_path)
    ids = torch.arange(20)
    wanted = logits(native(tmp_path), ids)
    for form, share in (("int8", 0.1), ("int4", 0.7)):
        got = logits(native(tmp_path, quantization=form), ids)
        assert (got - wanted).square().mean() < share**2 * wanted.var()


GGUF: dict[str, tuple[str, dict[str, int | float | str]]] = {
    "mixtral": ("llama", {"attention.sliding_window": 8}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {}),
    "olmoe": ("olmoe", {}),
    "granitemoeshared": (
        "granitemoe",
        {"residual_scale": 1.0, "attention.scale": 1.0, "embedding_scale": 1.0, "logit_scale": 1.5},
    ),
    "glm4_moe": (
        "glm4moe",
        {
            "rope.dimension_count": 8,
            "expert_weights_scale": 1.75,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
    ),
}
"""Architectures and metadata by family."""


@pytest.mark.parametrize("family", GGUF)
def test_gguf_files_are_read(family: str, tmp_path: Path) -> None:
    architecture, metadata = GGUF[family]
    dense = {"mlp_only_layers": []} if family == "qwen2_moe" else {}  # GGUF has no names for its dense layers
    reference = reference_of(family, tmp_path / "folder", **dense)
    counts = {"expert_count": 8, "expert_used_count": reference.config.num_experts_per_tok}
    write_gguf(reference, tmp_path / "tiny.gguf", architecture, metadata={**counts, **metadata})
    config, from_folder = (native(tmp_path / name).config for name in ("tiny.gguf", "folder"))
    assert config.experts == from_folder.experts
    assert_logits_equal(reference, native(tmp_path / "tiny.gguf"))


def test_experts_of_gguf_files_stay_packed_from_the_file_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two experts are unpacked at a time, and the values are those of the file."""
    reference = reference_of("qwen3_moe", tmp_path / "folder", moe_intermediate_size=64)
    path, counts = tmp_path / "tiny.gguf", {"expert_count": 8, "expert_used_count": 3}
    kinds = {"ffn_down_exps": GGMLQuantizationType.Q8_0}
    write_gguf(reference, path, "qwen3moe", matrices=GGMLQuantizationType.Q4_0, others=kinds, metadata=counts)
    wanted = logits(native(path), torch.arange(20))
    held: list[int] = []
    keep = MixtureOfExperts._keep

    def counting(self: MixtureOfExperts, *args: Any) -> bool:
        done = keep(self, *args)
        held.append(len(self._rows))
        return done

    monkeypatch.setattr(MixtureOfExperts, "_keep", counting)
    model = native(path, quantization="gguf")
    assert len(held) == 2 * 8 * 3
    assert max(held) == 8  # the gates' 4-bit codes, until the up projections come
    mixture = model.get_submodule("layers.0.mlp")
    assert isinstance(mixture, MixtureOfExperts)
    assert [weight.format for weight in mixture.packed] == ["f32", "int4", "int8"]
    assert mixture.gate_up.numel() == 0
    torch.testing.assert_close(logits(model, torch.arange(20)), wanted, atol=1e-4, rtol=0)
