"""Mixtures of experts of our own: each family computes what transformers computes, packed or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.errors import InvalidRequest
from ramify.kernels.weights.routing import Routing
from ramify.runtime.model.experts import MixtureOfExperts
from ramify.runtime.model.shape.config import Experts, Family

from .dense import logits
from .equality import assert_engine_equal, assert_logits_equal, native
from .gguf_files import write_gguf
from .own_families import FAMILIES, assert_lora_equal, assert_quantised_equal, reference_of
from .quantised_files import gptq, write

pytestmark = pytest.mark.usefixtures("one_thread")

MIXTURES = [family for family, own in FAMILIES.items() if "expert_count" in own.gguf.metadata]


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_equal_transformers(family: Family, tmp_path: Path) -> None:
    """Experts that are not packed, and packed ones in the compiled layer stack."""
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
    """Requests that are cold, chunked, forked, retracted and cached, with all layers in one compiled call."""
    reference = reference_of("qwen2_moe", tmp_path)
    model = native(tmp_path, packed=True, deterministic=True)
    assert model.layer_weights() is not None
    assert_engine_equal(reference, model)


def test_an_adapter_of_attention_beside_packed_experts_is_as_its_merged_weights(tmp_path: Path) -> None:
    assert_lora_equal("qwen3_moe", tmp_path, packed=True)


def test_quantised_experts_are_near_the_others(tmp_path: Path) -> None:
    reference_of("qwen3_moe", tmp_path)
    ids = torch.arange(20)
    wanted = logits(native(tmp_path), ids)
    for form, share in (("int8", 0.1), ("int4", 0.7)):
        got = logits(native(tmp_path, quantization=form), ids)
        assert (got - wanted).square().mean() < share**2 * wanted.var()


@pytest.mark.parametrize(
    ("differing", "stays"), [("symmetric", True), ("ordered", False), ("unquantised", False)]
)
def test_experts_whose_forms_differ_have_their_values(
    differing: str, stays: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Offsets of some experts are given to all; where an order differs, or a format, all are dequantised."""
    rng = random.Random(1)

    def mixed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        flags = {"symmetric": True} | ({} if differing == "unquantised" else {differing: rng.random() < 0.5})
        return gptq(4, 32, **flags)(weight)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    skip = "experts.1." if differing == "unquantised" else " "
    reference = write(reference_of("qwen3_moe"), tmp_path, config, mixed, skip=skip)
    model = native(tmp_path, quantization="checkpoint", packed=True)
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    formats = {weight.format for mixture in mixtures for weight in mixture.packed[1:]}
    assert formats == ({"int4"} if stays else set())
    assert ("Layer 0: gate_up of all experts is dequantised" in caplog.text) == (not stays)
    if stays:
        assert all(weight.has_offsets for mixture in mixtures for weight in mixture.packed[1:])
    assert_logits_equal(reference, model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"top_k": 9}, "top_k is 9 of 8 experts"),
        ({"groups": 3}, "8 experts cannot be in 3 groups"),
        ({"groups": 0}, "8 experts cannot be in 0 groups"),
        ({"groups": 8, "top_groups": 2}, "8 experts cannot be in 8 groups"),
        ({"groups": 4, "top_groups": 5}, "5 of 4 groups"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "1 groups of 2 experts hold fewer than 3"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Experts(count=8, size=32, routing=Routing(**{"top_k": 2, **fields}), sparse=(True,))


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
    keep = MixtureOfExperts.keep_rows

    def counting(self: MixtureOfExperts, *args: Any) -> bool:
        done = keep(self, *args)
        held.append(len(self._rows))
        return done

    monkeypatch.setattr(MixtureOfExperts, "keep_rows", counting)
    model = native(path, quantization="gguf")
    assert len(held) == 2 * 8 * 3
    assert max(held) == 8  # the gates' 4-bit codes, until the up projections come
    mixture = model.get_submodule("layers.0.mlp")
    assert isinstance(mixture, MixtureOfExperts)
    assert [weight.format for weight in mixture.packed] == ["f32", "int4", "int8"]
    assert mixture.gate_up.numel() == 0
    torch.testing.assert_close(logits(model, torch.arange(20)), wanted, atol=1e-4, rtol=0)


def test_a_quantised_shared_expert_of_one_tensor_is_read_in_its_halves(tmp_path: Path) -> None:
    assert_quantised_equal("granitemoeshared", tmp_path)
