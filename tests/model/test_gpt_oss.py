"""gpt-oss of our own: what transformers computes, packed or not, and in the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ramify.runtime.model.decoder import Model
from ramify.runtime.model.experts import MixtureOfExperts
from ramify.runtime.model.hf_config import config_from_hf
from ramify.runtime.model.hub.resolve import ModelFiles
from ramify.runtime.model.load import load_model
from tests.model.architectures import save_tiny, tiny_config, tiny_model
from tests.model.equality import assert_engine_equal, assert_logits_equal
from tests.model.gguf_files import random_blocks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return save_tiny(tiny_of(), folder), folder


def tiny_of() -> Any:
    config = tiny_config("gpt_oss")
    config.swiglu_limit = 0.7  # which some of the tiny numbers exceed
    return config


def native(folder: Path, **options: Any) -> Model:
    files = ModelFiles(name="tiny", weights=folder, tokenizer=folder)
    model = load_model(files, dtype=torch.float32, **options)
    assert isinstance(model, Model)
    return model


def test_logits_equal_transformers(saved: tuple[Any, Path]) -> None:
    reference, folder = saved
    model = native(folder)
    assert model.config.windows == (8, 0)
    assert model.config.sinks == (True, True)
    assert model.config.rope.kind == "yarn"
    assert_logits_equal(reference, model)


def test_the_engine_gives_the_tokens_of_transformers(saved: tuple[Any, Path]) -> None:
    """Cold, chunked, forked, retracted and from the cache, with all layers in one compiled call."""
    reference, folder = saved
    model = native(folder, packed=True, deterministic=True)
    assert model.layer_weights() is not None
    assert_logits_equal(reference, model)
    assert_engine_equal(reference, model)


def test_a_folder_in_mxfp4_stays_packed(tmp_path: Path) -> None:
    """As published: blocks, scales and biases of all experts of a layer. The values are the library's own."""
    reference = tiny_model(tiny_of())
    generator = torch.Generator().manual_seed(2)
    stored = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for name, values in reference.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = values.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator).byte()
        scales = torch.randint(122, 126, blocks.shape[:3], generator=generator).byte()
        values.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    reference.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    reference.config.save_pretrained(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    model = native(tmp_path, quantization="checkpoint", packed=True, deterministic=True)
    for layer in model.layers:
        assert isinstance(layer.mlp, MixtureOfExperts)
        router, gate_up, down = layer.mlp.packed
        assert (router.format, gate_up.format, down.format) == ("f32", "int4", "int4")
        assert len(gate_up.table) == 16
    assert model.layer_weights() is not None
    assert_logits_equal(reference, model)
    assert_logits_equal(reference, native(tmp_path))


def write_gguf(reference: Any, path: Path) -> None:
    """The file that llama.cpp would write, its experts random MXFP4, which `reference` is given."""
    config, rope = reference.config, reference.config.rope_parameters
    writer = GGUFWriter(path, "gpt-oss")
    for key, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }.items():
        writer.add_uint32(f"gpt-oss.{key}", value)
    writer.add_string("gpt-oss.rope.scaling.type", "yarn")
    writer.add_float32("gpt-oss.rope.scaling.factor", rope["factor"])
    writer.add_float32("gpt-oss.rope.freq_base", rope["rope_theta"])
    writer.add_float32("gpt-oss.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    named = get_tensor_name_map(MODEL_ARCH.GPT_OSS, config.num_hidden_layers).get_name
    kind = GGMLQuantizationType.MXFP4
    for name, parameter in reference.named_parameters():
        array = parameter.detach()
        if "experts" in name:
            block, _, last = name.partition(".mlp.experts.")
            place = named(block + ".input_layernorm").rpartition(".")[0]  # type: ignore[union-attr]
            parts = ("gate", "up") if last.startswith("gate_up") else ("down",)
            for at, part in enumerate(parts):
                full = f"{place}.ffn_{part}_exps"
                if last.endswith("bias"):
                    writer.add_tensor(f"{full}.bias", array[:, at :: len(parts)].contiguous().numpy())
                    continue
                count, inputs, outputs = array[..., at :: len(parts)].shape
                raw = random_blocks((count * outputs, inputs), kind).reshape(count, outputs, -1)
                writer.add_tensor(f"{full}.weight", raw, raw_dtype=kind)
                values = torch.from_numpy(dequantize(raw, kind))
                parameter.data[..., at :: len(parts)] = values.transpose(1, 2)
            continue
        stem, _, suffix = (f"{name}.weight" if name.endswith("sinks") else name).rpartition(".")
        writer.add_tensor(f"{named(stem)}.{suffix}", array.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_files_with_sinks_and_packed_experts(saved: tuple[Any, Path], tmp_path: Path) -> None:
    reference = tiny_model(tiny_of())
    reference.config.swiglu_limit = 7.0  # GGUF files have none of their own
    for layer in reference.model.layers:
        layer.mlp.experts.limit = 7.0
    write_gguf(reference, tmp_path / "tiny.gguf")
    model = native(tmp_path / "tiny.gguf", quantization="gguf")
    assert [weight.format for weight in model.layers[0].mlp.packed] == ["f32", "int4", "int4"]
    assert model.config.sinks == (True, True)
    assert_logits_equal(reference, model)


def test_the_published_config() -> None:
    """Of gpt-oss-20b, without its quantisation."""
    published = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    config = config_from_hf(published)
    assert config.windows == (128, 0) * 12
    assert config.experts is not None
    assert (config.experts.count, config.experts.size, config.experts.routing.top_k) == (32, 2880, 4)
    assert config.experts.clamp is not None
    assert (config.experts.clamp.alpha, config.experts.clamp.limit) == (1.702, 7.0)
    assert (config.rope.theta, config.rope.factor, config.rope.truncate) == (150000, 32.0, False)
    named = {"layer_types", "rope_scaling", "rope_theta", "sliding_window", "head_dim", "rms_norm_eps"}
    bare = {name: value for name, value in published.items() if name not in named}
    assert config_from_hf(bare) == config
